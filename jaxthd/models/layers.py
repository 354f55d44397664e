"""The small layers that every model shares.

Legend: N tokens, D features in, F features out.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.parallel.params import Init


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over groups of the last dim; statistics in promote(float32, x)."""

    def __init__(self, dim: int, eps: float, init: Init, groups: int = 1) -> None:
        self.weight = init.ones((dim,))
        self.eps = eps
        self.groups = groups

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N D"]:
        grouped = x_ND.astype(accumulation_dtype(x_ND)).reshape(len(x_ND), self.groups, -1)
        grouped = grouped * jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + self.eps)
        return (grouped.reshape(x_ND.shape) * self.weight[...]).astype(x_ND.dtype)


class Linear(nnx.Module):
    """x @ w (+ bias), computed in x's dtype. w is [D, F]."""

    def __init__(
        self, dim: int, out: int, init: Init, *, bias: bool = False, std: float | None = None
    ) -> None:
        self.w = init.normal((dim, out), std=std)
        self.bias = init.zeros((out,)) if bias else None

    def __call__(self, x_ND: Float[Array, "N D"]) -> Float[Array, "N F"]:
        y_NF = x_ND @ self.w[...].astype(x_ND.dtype)
        return y_NF if self.bias is None else y_NF + self.bias[...].astype(x_ND.dtype)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0)^2 (So et al., Primer, 2021)."""
    return jnp.square(jax.nn.relu(x))
