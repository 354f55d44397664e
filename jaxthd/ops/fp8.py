"""Matrix products in FP8 (Micikevicius et al., FP8 Formats for Deep Learning, 2022), by qwix.

Operands are rounded to 8 bits for each of the three products of a projection: activations and weights to
e4m3 (3 bits of mantissa), gradients of the output to e5m2 (2 bits, more range). Each row or column that a
product sums over is scaled by its own largest element, in this step ("dynamic" scaling: no state, nothing
to restore). Where a mesh divides a sum over ranks (tensor ranks, or the tokens of a weight's gradient), each
part is scaled by itself. So results differ between meshes by the rounding to 8 bits.

Routed experts ("experts" in compute.fp8) are multiplied by einsum8, which rounds in the same way, without
qwix.

Legend: N tokens, D features in, F features out.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

ACTIVATIONS, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.custom_vjp
def fp8_product(x_ND: Float[Array, "N D"], w_DF: Float[Array, "D F"]) -> Float[Array, "N F"]:
    """x @ w in x's dtype. The two products of its gradient are computed in the same way."""
    return _product(x_ND, 1, ACTIVATIONS, w_DF, 0, ACTIVATIONS)


def _forward(x_ND: Array, w_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return fp8_product(x_ND, w_DF), (x_ND, w_DF)


def _backward(saved: tuple[Array, Array], dy_NF: Array) -> tuple[Array, Array]:
    x_ND, w_DF = saved
    dx_ND = _product(dy_NF, 1, GRADIENTS, w_DF, 1, ACTIVATIONS)
    dw_DF = _product(x_ND, 0, ACTIVATIONS, dy_NF, 0, GRADIENTS)
    return dx_ND, dw_DF


fp8_product.defvjp(_forward, _backward)


def _product(a: Array, a_sum: int, a_dtype: Any, b: Array, b_sum: int, b_dtype: Any) -> Array:
    """The product of two matrices, summed over dim a_sum of a and b_sum of b."""
    import qwix

    if not a.size or not b.size:  # no tokens: qwix would divide by their number
        return jnp.zeros((a.shape[1 - a_sum], b.shape[1 - b_sum]), a.dtype)
    # qwix does not scale a row of zeros by 0.
    a8 = qwix.quantize(a, a_dtype, channelwise_axes=(1 - a_sum,), scale_dtype=jnp.float32)
    b8 = qwix.quantize(b, b_dtype, channelwise_axes=(1 - b_sum,), scale_dtype=jnp.float32)
    summed = (((a_sum,), (b_sum,)), ((), ()))
    return qwix.dot_general(a8, b8, summed, preferred_element_type=jnp.float32).astype(a.dtype)


def einsum8(product: str, a: Array, a_dtype: Any, b: Array, b_dtype: Any) -> Array:
    """The einsum of two arrays that are rounded to 8 bits, each scaled along the dim that is summed over, by
    its largest element; float32. product: with one such dim."""
    left, right = product.split("->")[0].split(",")
    (summed,) = (set(left) & set(right)) - set(product.split("->")[1])
    a8, a_scale = _rounded(a, left.index(summed), a_dtype)
    b8, b_scale = _rounded(b, right.index(summed), b_dtype)
    scales = jnp.einsum(product, a_scale, b_scale, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum(product, a8, b8, preferred_element_type=jnp.float32) * scales


def _rounded(x: Array, summed: int, dtype: Any) -> tuple[Array, Array]:
    """(x / scale in 8 bits, the scales); a row of zeros has scale 1."""
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(summed, keepdims=True)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), 1)
    return (wide / scale).astype(dtype), scale
