"""Attention inside clips with relative positions, by the Pallas kernels of pallas.py: the encoder's.

The position term of a score depends on the query and on the distance of the two tokens. In a clip of at most
L tokens there are 2 L - 1 distances. So its values for all distances are one matrix product, a bias [N, H,
W], of which the kernels read what pairs need; the heads stay as narrow as their content.

Legend: N tokens, H heads, d head dim, V value dim, L tokens of the longest clip, W >= 2 L - 1 distances.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.attention import pallas
from jaxthd.ops.attention.pallas_kernels import DISTANCES
from jaxthd.ops.backend import Machine
from jaxthd.ops.numerics import accumulation_dtype, kept


@dataclass(frozen=True)
class RelativeShape:
    """Facts that decide whether the kernels can compute an encoder's attention. longest: frames of a clip."""

    dtype: str
    heads: int
    head_dim: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.dtype}, {self.heads} heads of dim {self.head_dim}, clips of up to {self.longest} frames"
        )


def unfit(shape: RelativeShape, machine: Machine) -> str | None:
    """The requirement (ops/backend.py)."""
    return pallas.why_unfit(shape.head_dim, shape.dtype, machine)


def width(longest: int) -> int:
    """W, the entries of a bias for each frame and head."""
    return -(-2 * longest // DISTANCES) * DISTANCES


def distances(longest: int) -> Int32[Array, " W"]:
    """Distance of the query behind the key, for each entry of a bias: W // 2 down to -(W // 2) + 1."""
    entries = width(longest)
    return entries // 2 - jnp.arange(entries, dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def relative_attention(
    q_NHd: Float[Array, "N H d"],
    k_NHd: Float[Array, "N H d"],
    position_NHd: Float[Array, "N H d"],
    far_WHd: Float[Array, "W H d"],
    v_NHV: Float[Array, "N H V"],
    lo_N: Int32[Array, " N"],
    hi_N: Int32[Array, " N"],
    scale: float,
    longest: int,
) -> Float[Array, "N H V"]:
    """softmax(scale * (q . k + position . far[w])) v over the tokens lo <= j < hi, the query's own among
    them, in v's dtype, where distances(longest)[w] is query minus key; 0 for a query with hi <= lo, NaN for
    one that sees more than `longest` tokens.

    Differentiable in all but lo and hi. Weights and bias are computed again in the backward pass.
    """
    return _forward(q_NHd, k_NHd, position_NHd, far_WHd, v_NHV, lo_N, hi_N, scale, longest)[0]


def _bias(position_NHd: Array, far_WHd: Array) -> Array:
    """In the compute dtype: there are W / d times as many values as queries have."""
    found: Array = jnp.einsum("nhd,whd->nhw", position_NHd, far_WHd)
    return found


def _forward(q, k, position, far, v, lo, hi, scale: float, longest: int) -> tuple[Array, Any]:
    hi_there = jnp.where(hi - lo <= longest, hi, lo)
    out, lse = pallas.forward(q, k, v, lo, hi_there, scale, _bias(position, far), dtype=v.dtype)
    out = kept(jnp.where((hi - lo <= longest)[:, None, None], out, jnp.nan))
    lse = kept(lse)
    return out, (q, k, position, far, v, lo, hi_there, out, lse)


def _backward(scale: float, longest: int, residuals: Any, dout: Array) -> tuple[Array | None, ...]:
    q, k, position, far, v, lo, hi, out, lse = residuals
    given = q, k, v, out, lse, dout, lo, hi, scale, _bias(position, far)
    dq, dk, dv, dbias = pallas.backward(*given, dtype=q.dtype)
    dot = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q))
    dposition, dfar = dot("nhw,whd->nhd", dbias, far), dot("nhw,nhd->whd", dbias, position)
    return dq, dk, dposition.astype(q.dtype), dfar.astype(far.dtype), dv, None, None


relative_attention.defvjp(_forward, _backward)
