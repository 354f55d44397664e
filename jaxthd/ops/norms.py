"""Norms whose backward passes keep nothing but their inputs.

Autodiff keeps centred, scaled and gated values in float32, and writes the gradients of gated values to memory
before it divides them. These read their inputs and the result's gradient again. All sums are in
promote(float32, x's dtype); results and gradients have the dtypes of what they belong to.

Legend: N tokens, I features, G groups of them, i features of a group.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.ops.activations import silu, silu_slope
from jaxthd.ops.numerics import accumulation_dtype


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm(
    groups: int, eps: float, x_NI: Float[Array, "N I"], w_I: Float[Array, " I"]
) -> Float[Array, "N I"]:
    """x / sqrt(mean square of its group + eps) * w."""
    wide_NGi = _grouped(groups, x_NI)
    normed_NGi = wide_NGi * _factor(wide_NGi, eps)
    return (normed_NGi.reshape(x_NI.shape) * w_I).astype(x_NI.dtype)


def _rms_norm_backward(groups: int, eps: float, given: tuple[Any, ...], dout_NI: Array) -> tuple[Array, ...]:
    x_NI, w_I = given
    dx_NI, dw_I = _normed_back(_grouped(groups, x_NI), w_I, dout_NI.astype(accumulation_dtype(x_NI)), eps)
    return dx_NI.astype(x_NI.dtype), dw_I


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_rms_norm(
    groups: int, eps: float, y_NI: Float[Array, "N I"], z_NI: Float[Array, "N I"], w_I: Float[Array, " I"]
) -> Float[Array, "N I"]:
    """rms_norm of y silu(z), in z's dtype: as Mamba2 ends (Dao and Gu, 2024)."""
    gated_NGi = _grouped(groups, _gated(y_NI, z_NI))
    normed_NGi = gated_NGi * _factor(gated_NGi, eps)
    return (normed_NGi.reshape(z_NI.shape) * w_I).astype(z_NI.dtype)


def _gated_rms_norm_backward(
    groups: int, eps: float, given: tuple[Any, ...], dout_NI: Array
) -> tuple[Array, ...]:
    y_NI, z_NI, w_I = given
    acc = accumulation_dtype(z_NI)
    gated_NGi = _grouped(groups, _gated(y_NI, z_NI))
    dgated_NI, dw_I = _normed_back(gated_NGi, w_I, dout_NI.astype(acc), eps)
    wide_NI = z_NI.astype(acc)
    dz_NI = dgated_NI * y_NI.astype(acc) * silu_slope(wide_NI)
    return (dgated_NI * silu(wide_NI)).astype(y_NI.dtype), dz_NI.astype(z_NI.dtype), dw_I


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_norm(
    eps: float, x_NI: Float[Array, "N I"], w_I: Float[Array, " I"], bias_I: Float[Array, " I"]
) -> Float[Array, "N I"]:
    """(x - mean) / sqrt(variance + eps) * w + bias."""
    wide_NI = _centred(x_NI)
    return (wide_NI * _factor(wide_NI, eps) * w_I + bias_I).astype(x_NI.dtype)


def _layer_norm_backward(eps: float, given: tuple[Any, ...], dout_NI: Array) -> tuple[Array, ...]:
    x_NI, w_I, bias_I = given
    dout_NI = dout_NI.astype(accumulation_dtype(x_NI))
    centred_NI = _centred(x_NI)
    factor_N1 = _factor(centred_NI, eps)
    dcentred_NI = _without_own(centred_NI, factor_N1, dout_NI * w_I)
    dx_NI = dcentred_NI - dcentred_NI.mean(-1, keepdims=True)
    # Sums over tokens from statistics of their own: else XLA writes what they sum to memory.
    again_NI, factor_N1 = jax.lax.optimization_barrier((x_NI, factor_N1))
    mean_N1 = again_NI.astype(dout_NI.dtype).mean(-1, keepdims=True)
    mean_N1 = jax.lax.optimization_barrier(mean_N1)
    dw_I = (dout_NI * ((again_NI - mean_N1) * factor_N1)).sum(0)
    return dx_NI.astype(x_NI.dtype), dw_I.astype(w_I.dtype), dout_NI.sum(0).astype(bias_I.dtype)


@jax.custom_vjp
def squared_deviations(
    x_NI: Float[Array, "N I"], valid_N1: Bool[Array, "N 1"], mean_I: Float[Array, " I"]
) -> Float[Array, " I"]:
    """Sums of (x - mean)^2 over valid tokens. Added over ranks, they have their least value where mean is
    that of all valid tokens. It must be that one: its gradient is taken to be 0.
    """
    return jnp.where(valid_N1, jnp.square(x_NI.astype(mean_I.dtype) - mean_I), 0).sum(0)


def _squared_deviations_backward(given: tuple[Any, ...], dsum_I: Array) -> tuple[Any, ...]:
    x_NI, valid_N1, mean_I = given
    dx_NI = jnp.where(valid_N1, 2 * dsum_I * (x_NI.astype(mean_I.dtype) - mean_I), 0)
    return dx_NI.astype(x_NI.dtype), None, jnp.zeros_like(mean_I)


@jax.custom_vjp
def scaled_deviations(
    x_NI: Float[Array, "N I"],
    mean_I: Float[Array, " I"],
    scale_I: Float[Array, " I"],
    bias_I: Float[Array, " I"],
) -> Float[Array, "N I"]:
    """(x - mean) * scale + bias."""
    return ((x_NI.astype(mean_I.dtype) - mean_I) * scale_I + bias_I).astype(x_NI.dtype)


def _scaled_deviations_backward(given: tuple[Any, ...], dout_NI: Array) -> tuple[Array, ...]:
    x_NI, mean_I, scale_I, bias_I = given
    dout_NI = dout_NI.astype(mean_I.dtype)
    dbias_I = dout_NI.sum(0)
    dscale_I = (dout_NI * (x_NI.astype(mean_I.dtype) - mean_I)).sum(0)
    dx_NI = (dout_NI * scale_I).astype(x_NI.dtype)
    return dx_NI, -dbias_I * scale_I, dscale_I.astype(scale_I.dtype), dbias_I.astype(bias_I.dtype)


def _grouped(groups: int, x_NI: Array) -> Array:
    """[N, G, i] in the accumulation dtype; [N, I] of one group.

    XLA's reductions on CPUs take ten times as long over an array with a dimension of 1.
    """
    wide_NI = x_NI.astype(accumulation_dtype(x_NI))
    return wide_NI if groups == 1 else wide_NI.reshape(len(x_NI), groups, -1)


def _gated(y_NI: Array, z_NI: Array) -> Array:
    acc = accumulation_dtype(z_NI)
    return y_NI.astype(acc) * silu(z_NI.astype(acc))


def _centred(x_NI: Array) -> Array:
    wide_NI = x_NI.astype(accumulation_dtype(x_NI))
    return wide_NI - wide_NI.mean(-1, keepdims=True)


def _factor(x: Array, eps: float) -> Array:
    found: Array = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    return found


def _without_own(x: Array, factor: Array, gradient: Array) -> Array:
    """The gradient of x, from that of x * factor (see _factor)."""
    inner = (gradient * x).mean(-1, keepdims=True)
    return factor * gradient - x * (inner * factor**3)


def _normed_back(x_NGi: Array, w_I: Array, dout_NI: Array, eps: float) -> tuple[Array, Array]:
    """Gradients of x [N, I] and of w, from that of rms_norm's result."""
    factor_NG1 = _factor(x_NGi, eps)
    dx_NGi = _without_own(x_NGi, factor_NG1, (dout_NI * w_I).reshape(x_NGi.shape))
    dw_I = (dout_NI.reshape(x_NGi.shape) * x_NGi * factor_NG1).sum(0).reshape(w_I.shape)
    return dx_NGi.reshape(dout_NI.shape), dw_I.astype(w_I.dtype)


rms_norm.defvjp(lambda groups, eps, *given: (rms_norm(groups, eps, *given), given), _rms_norm_backward)
gated_rms_norm.defvjp(
    lambda groups, eps, *given: (gated_rms_norm(groups, eps, *given), given), _gated_rms_norm_backward
)
layer_norm.defvjp(lambda eps, *given: (layer_norm(eps, *given), given), _layer_norm_backward)
squared_deviations.defvjp(lambda *given: (squared_deviations(*given), given), _squared_deviations_backward)
scaled_deviations.defvjp(lambda *given: (scaled_deviations(*given), given), _scaled_deviations_backward)
