"""Attention inside short documents as a band along the diagonal, for devices that want few large kernels.

A document has at most `longest` tokens, so a query sees keys at most longest - 1 slots away: a block of
queries meets the blocks around it, always as many. That is a few large matrix products and no loop, at a cost
linear in the tokens, unlike dense.py; unlike blockwise.py, pairs are computed that could be skipped.

Legend: as in dense.py; N tokens, b blocks, Q queries of a block, W keys of a window, the block and those
around it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.intervals import blocked


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def banded_attention(
    q_NHd: Float[Array, "N H d"],
    k_NHd: Float[Array, "N H d"],
    position_NHX: Float[Array, "N H X"],
    waves_NX: Float[Array, "N X"],
    v_NHV: Float[Array, "N H V"],
    lo_N: Int32[Array, " N"],
    hi_N: Int32[Array, " N"],
    scale: float,
    block: int,
    longest: int,
) -> Float[Array, "N H V"]:
    """softmax(scale * (q . k + position . waves)) v over the tokens lo <= j < hi, the query's own among them,
    in v's dtype; 0 for a query with hi <= lo, NaN for one that sees more than `longest` tokens.

    waves: what all heads share of the keys. Differentiable in all but waves, lo and hi. The weights are
    computed again in the backward pass.
    """
    return _forward(q_NHd, k_NHd, position_NHX, waves_NX, v_NHV, lo_N, hi_N, scale, block, longest)[0]


def _around(block: int, longest: int) -> int:
    """Blocks of a window before the own block, and after it."""
    return -(-(longest - 1) // block)


def _windows(x_N: Array, block: int, longest: int) -> Array:
    """[N, ...] -> [b, W, ...]; 0 beyond both ends."""
    around = _around(block, longest)
    x_bQ = blocked(x_N, block, 0)
    padded = jnp.pad(x_bQ, [(around, around)] + [(0, 0)] * (x_bQ.ndim - 1))
    return jnp.concatenate([padded[i : i + len(x_bQ)] for i in range(2 * around + 1)], axis=1)


def _summed(x_bW: Array, n: int, block: int, longest: int) -> Array:
    """The transpose of _windows: [b, W, ...] -> [N, ...], the sum over the windows that hold a token."""
    around, blocks = _around(block, longest), len(x_bW)
    parts = x_bW.reshape(blocks, 2 * around + 1, block, *x_bW.shape[2:])
    total = jnp.zeros((blocks + 2 * around, *parts.shape[2:]), x_bW.dtype)
    for i in range(2 * around + 1):
        total += jnp.pad(parts[:, i], [(i, 2 * around - i)] + [(0, 0)] * (parts.ndim - 2))
    return total[around : around + blocks].reshape(-1, *parts.shape[3:])[:n]


def _weights(q, k, position, waves, lo_N, hi_N, scale, block, longest) -> Array:
    """Softmax over the window, [b, H, Q, W], in the accumulation dtype; 0 where a query sees nothing."""
    dot = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q))
    q, position = (blocked(x, block, 0) for x in (q, position))
    k, waves = (_windows(x, block, longest) for x in (k, waves))
    scores_bHQW = scale * (dot("bqhd,bwhd->bhqw", q, k) + dot("bqhx,bwx->bhqw", position, waves))
    first_b = block * (jnp.arange(len(q)) - _around(block, longest))
    j_bW = first_b[:, None] + jnp.arange(k.shape[1])
    lo_bQ, hi_bQ = (blocked(x, block, 0) for x in (lo_N, hi_N))
    seen_bQW = (j_bW[:, None] >= lo_bQ[..., None]) & (j_bW[:, None] < hi_bQ[..., None])
    scores_bHQW = jnp.where(seen_bQW[:, None], scores_bHQW, -jnp.inf)
    most_bHQ1 = scores_bHQW.max(-1, keepdims=True)
    p_bHQW = jnp.exp(scores_bHQW - jnp.where(jnp.isfinite(most_bHQ1), most_bHQ1, 0))
    total_bHQ1 = p_bHQW.sum(-1, keepdims=True)
    return p_bHQW / jnp.where(total_bHQ1 > 0, total_bHQ1, 1)


def _forward(q, k, position, waves, v, lo_N, hi_N, scale, block, longest):
    weights_bHQW = _weights(q, k, position, waves, lo_N, hi_N, scale, block, longest).astype(v.dtype)
    v_bWHV, acc = _windows(v, block, longest), accumulation_dtype(v)
    out_bQHV = jnp.einsum("bhqw,bwhv->bqhv", weights_bHQW, v_bWHV, preferred_element_type=acc)
    fits_N11 = (hi_N - lo_N <= longest)[:, None, None]
    out_NHV = jnp.where(fits_N11, out_bQHV.reshape(-1, *v.shape[1:])[: len(v)], jnp.nan).astype(v.dtype)
    return out_NHV, (q, k, position, waves, v, lo_N, hi_N, out_NHV)


def _backward(scale, block, longest, residuals, dout_NHV):
    q, k, position, waves, v, lo_N, hi_N, out_NHV = residuals
    (n, acc), fold = (len(q), accumulation_dtype(q)), partial(_summed, n=len(q), block=block, longest=longest)
    dot = partial(jnp.einsum, preferred_element_type=acc)
    weights_bHQW = _weights(q, k, position, waves, lo_N, hi_N, scale, block, longest)
    k_bWHd, waves_bWX, v_bWHV = (_windows(x, block, longest) for x in (k, waves, v))
    q_bQHd, dout_bQHV = (blocked(x, block, 0) for x in (q, dout_NHV))
    product_bQH = blocked((dout_NHV.astype(acc) * out_NHV).sum(-1), block, 0)
    dweights_bHQW = dot("bqhv,bwhv->bhqw", dout_bQHV, v_bWHV)
    dscores = weights_bHQW * (dweights_bHQW - product_bQH.swapaxes(1, 2)[..., None]) * scale
    dscores_bHQW, weights_bHQW = dscores.astype(q.dtype), weights_bHQW.astype(v.dtype)
    dq = dot("bhqw,bwhd->bqhd", dscores_bHQW, k_bWHd).reshape(-1, *q.shape[1:])[:n]
    dposition = dot("bhqw,bwx->bqhx", dscores_bHQW, waves_bWX).reshape(-1, *position.shape[1:])[:n]
    dk = fold(dot("bhqw,bqhd->bwhd", dscores_bHQW, q_bQHd))
    dv = fold(dot("bhqw,bqhv->bwhv", weights_bHQW, dout_bQHV))
    dq, dk, dposition, dv = (g.astype(q.dtype) for g in (dq, dk, dposition, dv))
    return dq, dk, dposition, None, dv, None, None


banded_attention.defvjp(_forward, _backward)
