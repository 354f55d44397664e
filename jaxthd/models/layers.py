"""The small layers that every model shares.

Legend: N tokens, D features in, F features out, r rank of the low-rank matrices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.models.lora_tokens import dropped, is_on_everywhere, where_adapted
from jaxthd.ops.activations import silu
from jaxthd.ops.fp8 import fp8_product
from jaxthd.ops.norms import gated_rms_norm, layer_norm, rms_norm
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.product import narrowed, product
from jaxthd.parallel.mesh import TENSOR
from jaxthd.parallel.params import Init, ShardedDim, once, own_part, stack

LAYER_NORM_EPS = 1e-5


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with a mean for each group of the last dim.

    The statistics are computed in promote(float32, x).
    sharded: how the last dim is sharded over tensor ranks. A group may span several ranks. Ranks that share a
        unit (own_part) have one group.
    zero_centred: the parameter is weight - 1. factor: on the result.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        init: Init,
        *,
        groups: int = 1,
        sharded: ShardedDim | None = None,
        zero_centred: bool = False,
        factor: float = 1.0,
    ) -> None:
        self.weight = (init.zeros if zero_centred else init.ones)((dim,), (sharded,))
        self.sharded, self.mesh = sharded, init.mesh
        self.zero_centred, self.factor = zero_centred, factor
        self.eps = eps
        ranks = init.mesh.tensor if sharded else 1
        self.groups, self.ranks_of_group = max(groups // ranks, 1), max(ranks // groups, 1)

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N D"]:
        weight_D = self._weight()
        if self.ranks_of_group == 1:
            return rms_norm(self.groups, self.eps, x_ND, weight_D)
        wide_ND = x_ND.astype(accumulation_dtype(x_ND))
        mean_tN = jax.lax.all_gather(jnp.square(wide_ND).mean(-1), TENSOR)
        first = jax.lax.axis_index(TENSOR) // self.ranks_of_group * self.ranks_of_group
        mean_tN = jax.lax.dynamic_slice_in_dim(mean_tN, first, self.ranks_of_group)
        wide_ND = wide_ND * jax.lax.rsqrt(mean_tN.mean(0)[:, None] + self.eps)
        return (wide_ND * weight_D).astype(x_ND.dtype)

    def gated(self, y_ND: Float[Array, "N D"], z_ND: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """The norm of y silu(z), in z's dtype (Dao and Gu, Mamba2, 2024)."""
        if self.ranks_of_group == 1:
            return gated_rms_norm(self.groups, self.eps, y_ND, z_ND, self._weight())
        acc = accumulation_dtype(z_ND)
        return self(y_ND.astype(acc) * silu(z_ND.astype(acc))).astype(z_ND.dtype)

    def of_heads(self, x_NHD: Float[Array, "N H D"]) -> Float[Array, "N H D"]:
        """Each head by itself, all with the same weight."""
        return self(x_NHD.reshape(-1, x_NHD.shape[-1])).reshape(x_NHD.shape)

    def _weight(self) -> Array:
        own_D = own_part(self.weight[...], 0, self.sharded, self.mesh)
        weight_D = 1 + own_D if self.zero_centred else own_D
        return weight_D if self.factor == 1 else self.factor * weight_D


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dim, in promote(float32, x)."""

    def __init__(self, dim: int, init: Init, eps: float = LAYER_NORM_EPS) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))
        self.eps = eps

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N D"]:
        normed: Array = layer_norm(self.eps, x_ND, self.weight[...], self.bias[...])
        return normed

    def of_heads(self, x_NHD: Float[Array, "N H D"]) -> Float[Array, "N H D"]:
        """Each head by itself, all with the same weight and bias."""
        return self(x_NHD.reshape(-1, x_NHD.shape[-1])).reshape(x_NHD.shape)


class LoRA(nnx.Module):
    """scale (x @ a) @ b (Hu et al., LoRA, 2021). a is [D, r], b is [r, F].

    b starts as zeros. a starts normal with std 1 / sqrt(3 D), the std of peft's kaiming_uniform_(a=sqrt(5)).
    sharded_in, sharded_out: see Linear. a is sharded like x, b like the result.

    dora: the adapted matrix w + scale a @ b also gets magnitudes (Liu et al., DoRA, 2024), which start as
    those of w: each of its columns has the norm of w's column times m. m is [F] and starts as ones.
    dropout: the share of x's elements that do not enter x @ a in training (models/lora_tokens.py). number: of
    the projection, unlike others'.
    """

    def __init__(
        self,
        dim: int,
        out: int,
        rank: int,
        scale: float,
        init: Init,
        sharded_in: ShardedDim | None,
        sharded_out: ShardedDim | None,
        dora: bool = False,
        dropout: float = 0.0,
        number: int = 0,
    ) -> None:
        self.a = init.normal((dim, rank), (sharded_in, None), 1 / math.sqrt(3 * dim), projects=True)
        self.b = init.matrix(jnp.zeros((rank, out)), (None, sharded_out), projects=True)
        self.m = init.ones((out,), (sharded_out,)) if dora else None
        self.scale, self.sharded_out, self.mesh = scale, sharded_out, init.mesh
        self.sums = sharded_in is not None and sharded_in.is_sharded(init.mesh)
        self.dropout, self.number = dropout, number

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N F"]:
        b_rF = own_part(self.b[...], 1, self.sharded_out, self.mesh)
        if self.dropout:
            x_ND = dropped(x_ND, self.dropout, self.number, sharded=self.sums)
        return self.scale * (x_ND @ self.a[...].astype(x_ND.dtype)) @ b_rF.astype(x_ND.dtype)

    def magnitude(self, w_DF: Float[Array, "D F"]) -> Float[Array, " F"] | None:
        """The factor of each output feature; None without DoRA. w: in the parameters' dtype.

        As in the paper, the norm of the adapted columns counts as a constant in the backward pass.
        """
        if self.m is None:
            return None
        a_Dr, b_rF, m_F = self.a[...], self.b[...], self.m[...]
        b_rF, m_F = (own_part(x, x.ndim - 1, self.sharded_out, self.mesh) for x in (b_rF, m_F))
        with jax.default_matmul_precision("highest"):
            squares_2F = column_squares(w_DF, a_Dr, b_rF, self.scale)
        if self.sums:
            squares_2F = jax.lax.psum(squares_2F, TENSOR)
        return m_F * norm_ratio(squares_2F)


def column_squares(w: Array, a: Array, b: Array, scale: float) -> Float[Array, "2 ... F"]:
    """Sums over the inputs of the squares of w [.., D, F] and of w + scale a @ b. Without a gradient."""
    w, a, b = (jax.lax.stop_gradient(x) for x in (w, a, b))
    return jnp.stack([jnp.square(x).sum(-2) for x in (w, w + scale * (a @ b))])


def norm_ratio(squares_2F: Float[Array, "2 ... F"]) -> Float[Array, "... F"]:
    """The norm of w's columns over that of the adapted ones; 1 where both are 0."""
    own, adapted = squares_2F
    return jnp.sqrt(jnp.where(adapted > 0, own, 1) / jnp.where(adapted > 0, adapted, 1))


class Linear(nnx.Module):
    """x @ w (+ bias), computed in x's dtype. w is [D, F].

    add_lora adds low-rank matrices beside w. If `fp8` is set, x @ w and its gradients are computed in FP8
    (ops/fp8.py).

    sharded_in: x and w hold this rank's input features; the caller sums the ranks' results, of which one has
        the bias.
    sharded_out: the result holds this rank's output features.
    projects: False for taps of a convolution. If it is True, x has the compute dtype, and w is used once in a
        step (Init.matrix).
    """

    def __init__(
        self,
        dim: int,
        out: int,
        init: Init,
        *,
        bias: bool = False,
        std: float | None = None,
        sharded_in: ShardedDim | None = None,
        sharded_out: ShardedDim | None = None,
        projects: bool = True,
    ) -> None:
        self.w = init.normal((dim, out), (sharded_in, sharded_out), std, projects=projects)
        self.bias = init.zeros((out,), (sharded_out,)) if bias else None
        self.lora: LoRA | None = None
        self.fp8 = False
        self.sharded_in, self.sharded_out = sharded_in, sharded_out
        self.mesh, self.fsdp = init.mesh, init.fsdp

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N F"]:
        own_DF = own_part(self.w[...], 1, self.sharded_out, self.mesh)
        y_NF = fp8_product(x_ND, narrowed(own_DF, x_ND.dtype)) if self.fp8 else product(x_ND, own_DF)
        if self.lora is not None:
            adapted_NF = y_NF + self.lora(x_ND)
            magnitude_F = self.lora.magnitude(own_DF)
            if magnitude_F is not None:
                adapted_NF = adapted_NF * magnitude_F.astype(x_ND.dtype)
            y_NF = where_adapted(adapted_NF, y_NF)
        if self.bias is None:
            return y_NF
        bias_F = own_part(self.bias[...], 0, self.sharded_out, self.mesh)
        return y_NF + once(bias_F, self.sharded_in, self.mesh).astype(x_ND.dtype)

    def matrix(self, dtype: Any) -> Float[Array, "D F"]:
        """The matrix that a call multiplies by, low-rank matrices included, but never in FP8: for callers
        that absorb it into another product. Not where they are on for some tokens alone
        (lora_tokens.adapting), for which there is no such matrix."""
        w_DF = own_part(self.w[...], 1, self.sharded_out, self.mesh)
        if self.lora is not None:
            if not is_on_everywhere():
                raise ValueError("low-rank matrices that are on for some tokens alone make no matrix for all")
            b_rF = own_part(self.lora.b[...], 1, self.sharded_out, self.mesh)
            magnitude_F = self.lora.magnitude(w_DF)
            w_DF = w_DF + self.lora.scale * (self.lora.a[...] @ b_rF)
            w_DF = w_DF if magnitude_F is None else w_DF * magnitude_F
        return narrowed(w_DF, dtype)

    def add_lora(self, rank: int, scale: float, key: Array, **options: Any) -> None:
        """Adds low-rank matrices beside w. This Linear may also be a stack of layers (parallel/params.py).

        options: dora, dropout and number, as in LoRA.
        """
        *repeats, dim, out = self.w.shape
        init = Init(key, self.w.dtype, self.mesh, self.fsdp)

        def make(init: Init) -> LoRA:
            """Low-rank matrices of this projection's shape."""
            return LoRA(dim, out, rank, scale, init, self.sharded_in, self.sharded_out, **options)

        axes = self.w.get_metadata("mesh_axes")[0]
        self.lora = nnx.data(stack(make, init, *repeats, axes=axes) if repeats else make(init))
        for weight in (self.w, self.lora.a, self.lora.b):
            weight.set_metadata(cast=False)  # magnitudes and `matrix` take them as they are
