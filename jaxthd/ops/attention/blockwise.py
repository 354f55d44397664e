"""Blockwise attention in which every query sees one contiguous interval of the keys: the back-end "xla".

That one form covers packed causal attention, bidirectional attention inside a document, and what a rank sees
of another rank's keys (packing/segments.py derives the intervals). Memory is linear in the number of tokens,
forward and backward, and blocks outside every interval are never touched. It runs everywhere and is right
everywhere: other back-ends are compared with it.

Legend: N queries, S keys, H query heads, K key/value heads, G = H / K, D query/key dim, V value dim,
Q query block, B key block, X dim of Shared.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.attention.contract import AttentionBackend, Call
from jaxthd.ops.backend import RAN_ON_CPU, RAN_ON_GPU
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.intervals import KeyIntervals, blocked, usual_queries


class Shared(NamedTuple):
    """A second part of the scores: products with keys that all heads share and that have no gradient."""

    q: Float[Array, "N H X"]
    keys: Float[Array, "S X"]


def head_blocks(x_NHD: Array, kv_heads: int, block: int, fill: float | int = 0.0) -> Array:
    """[N, H, D] -> [blocks, K, G, block, D]."""
    x = blocked(x_NHD, block, fill)
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def tokens_of(x_bKGQD: Array, n: int) -> Array:
    """The inverse of head_blocks: [blocks, K, G, block, D] -> [N, H, D]."""
    b, k, g, q, d = x_bKGQD.shape
    return x_bKGQD.transpose(0, 3, 1, 2, 4).reshape(b * q, k * g, d)[:n]


def _keys_last(x: Array, block: int) -> Array:
    """[S, ..., D] -> [..., S + block, D], zeros at the end: a block may begin at any key."""
    return jnp.moveaxis(_keys_padded(x, block), 0, -2)


def _keys_padded(x: Array, block: int) -> Array:
    """[S, ...] -> [S + block, ...]."""
    return jnp.pad(x, [(0, block)] + [(0, 0)] * (x.ndim - 1))


def _block_of(x: Array, start: Array, block: int) -> Array:
    """[..., S, D] -> [..., block, D]."""
    return jax.lax.dynamic_slice_in_dim(x, start, block, axis=-2)


def _added(x: Array, more: Array, start: Array) -> Array:
    """x [..., S] with a block's values added."""
    found = jax.lax.dynamic_slice_in_dim(x, start, more.shape[-1], axis=-1) + more
    return jax.lax.dynamic_update_slice_in_dim(x, found, start, axis=-1)


class _Queries(NamedTuple):
    """Queries and their intervals, in blocks (first dim). shared: their part of Shared."""

    q_KGQD: Array
    shared_KGQX: Array | None
    lo_Q: Array
    hi_Q: Array
    first: Array
    blocks: Array

    @classmethod
    def of(
        cls, q_NHD: Array, shared: Shared | None, intervals: KeyIntervals, kv_heads: int, block: int
    ) -> "_Queries":
        """Cuts the arrays into blocks."""
        return cls(
            head_blocks(q_NHD, kv_heads, block),
            shared and head_blocks(shared.q, kv_heads, block),
            blocked(intervals.lo, block, 0),
            blocked(intervals.hi, block, 0),
            intervals.first,
            intervals.blocks,
        )

    def scores(self, k_KBD: Array, shared_BX: Array | None, start: Array, scale: float) -> Array:
        """Scaled scores [K, G, Q, B] of a block of keys, -inf outside the intervals. start: the first key."""
        dot = partial(jnp.einsum, preferred_element_type=accumulation_dtype(self.q_KGQD))
        s_KGQB = dot("kgqd,kbd->kgqb", self.q_KGQD, k_KBD)
        if self.shared_KGQX is not None:
            s_KGQB += dot("kgqx,bx->kgqb", self.shared_KGQX, shared_BX)
        j_B = start + jnp.arange(k_KBD.shape[1])
        seen_QB = (j_B >= self.lo_Q[:, None]) & (j_B < self.hi_Q[:, None])
        return jnp.where(seen_QB, scale * s_KGQB, -jnp.inf)


def attention_forward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
    query_block: int | None = None,
    shared: Shared | None = None,
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """Attention output and log-sum-exp of the scaled scores, both in promote(float32, input dtype).

    Online softmax over key blocks (Dao et al., FlashAttention, 2022). Callers own the VJP.
    block, query_block: as given to key_intervals. shared: added to q k^T before the scale.
    """
    n, kv_heads, acc = len(q_NHD), k_SKD.shape[1], accumulation_dtype(q_NHD)
    # A decoding step has few queries, which would not repay a copy of all keys with the heads first.
    are_few = 8 * n < len(k_SKD)
    keys, values = (_keys_padded(x, block) if are_few else _keys_last(x, block) for x in (k_SKD, v_SKV))
    shared_SX = None if shared is None else _keys_last(shared.keys, block)

    def taken(x: Array, start: Array) -> Array:
        """[K, block, D] of keys or values."""
        if are_few:
            return jnp.moveaxis(jax.lax.dynamic_slice_in_dim(x, start, block), 0, 1)
        return _block_of(x, start, block)

    def one_block(_: None, queries: _Queries) -> tuple[None, tuple[Array, Array]]:
        """Output [K, G, Q, V] and log-sum-exp [K, G, Q] of a block of queries."""

        def key_block(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """One step of the online softmax, with the b-th block of keys."""
            out_KGQV, max_KGQ, sum_KGQ = carry
            start = queries.first + b * block
            k_KBD, v_KBV = (taken(x, start) for x in (keys, values))
            shared_BX = None if shared_SX is None else _block_of(shared_SX, start, block)
            s_KGQB = queries.scores(k_KBD, shared_BX, start, scale)
            new_max_KGQ = jnp.maximum(max_KGQ, s_KGQB.max(-1))
            finite_KGQ = jnp.where(jnp.isfinite(new_max_KGQ), new_max_KGQ, 0)
            p_KGQB = jnp.exp(s_KGQB - finite_KGQ[..., None])
            shrink_KGQ = jnp.exp(max_KGQ - finite_KGQ)
            pv_KGQV = jnp.einsum(
                "kgqb,kbv->kgqv", p_KGQB.astype(v_KBV.dtype), v_KBV, preferred_element_type=acc
            )
            return (
                out_KGQV * shrink_KGQ[..., None] + pv_KGQV,
                new_max_KGQ,
                sum_KGQ * shrink_KGQ + p_KGQB.sum(-1),
            )

        empty_KGQ = jnp.zeros(queries.q_KGQD.shape[:-1], acc)
        zero = jnp.zeros((*empty_KGQ.shape, v_SKV.shape[-1]), acc), empty_KGQ - jnp.inf, empty_KGQ
        out_KGQV, max_KGQ, sum_KGQ = jax.lax.fori_loop(0, queries.blocks, key_block, zero)
        out_KGQV = out_KGQV / jnp.where(sum_KGQ > 0, sum_KGQ, 1)[..., None]
        return None, (out_KGQV, jnp.where(sum_KGQ > 0, max_KGQ + jnp.log(sum_KGQ), -jnp.inf))

    queries = _Queries.of(q_NHD, shared, intervals, kv_heads, query_block or usual_queries(block))
    _, (out, lse) = jax.lax.scan(one_block, None, queries)
    return tokens_of(out, n), tokens_of(lse[..., None], n)[..., 0]


def attention_backward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    out_NHV: Float[Array, "N H V"],
    lse_NH: Float[Array, "N H"],
    dout_NHV: Float[Array, "N H V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
    shared: Shared | None = None,
) -> tuple[Float[Array, "N H D"], Float[Array, "S K D"], Float[Array, "S K V"], Float[Array, "N H X"] | None]:
    """Gradients of queries, keys, values and shared.q in promote(float32, input dtype).

    out_NHV, lse_NH: output and log-sum-exp over all keys that a query sees, in other calls too; so the
    gradients of all calls add up. block: as given to key_intervals, without a query_block. shared: as in the
    forward pass.
    """
    (n, s), kv_heads, acc = (len(q_NHD), len(k_SKD)), k_SKD.shape[1], accumulation_dtype(q_NHD)
    k_KSD, v_KSV = (_keys_last(x, block) for x in (k_SKD, v_SKV))
    shared_SX = None if shared is None else _keys_last(shared.keys, block)
    dot_NH = (dout_NHV.astype(out_NHV.dtype) * out_NHV).sum(-1)
    finite_lse_NH = jnp.where(jnp.isfinite(lse_NH), lse_NH, 0)

    def query_block(
        carry: tuple[Array, Array], xs: tuple[_Queries, Array, Array, Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array | None]]:
        """Adds a block of queries' gradients of keys and values; gives its own."""
        queries, lse_KGQ1, dot_KGQ1, dout_KGQV, q_KDGQ, dout_KVGQ = xs

        def key_block(b: Array, carry: tuple[Array, Array | None, Array, Array]) -> tuple:
            """Adds the gradients of the pairs with the b-th block of keys."""
            dq_KGQD, dshared_KGQX, dk_KDS, dv_KVS = carry
            start = queries.first + b * block
            k_KBD, v_KBV = (_block_of(x, start, block) for x in (k_KSD, v_KSV))
            shared_BX = None if shared_SX is None else _block_of(shared_SX, start, block)
            p_KGQB = jnp.exp(queries.scores(k_KBD, shared_BX, start, scale) - lse_KGQ1)
            dp_KGQB = jnp.einsum("kgqv,kbv->kgqb", dout_KGQV, v_KBV, preferred_element_type=acc)
            ds_KGQB = (p_KGQB * (dp_KGQB - dot_KGQ1) * scale).astype(queries.q_KGQD.dtype)
            p_KGQB = p_KGQB.astype(dout_KGQV.dtype)
            dot = partial(jnp.einsum, preferred_element_type=acc)
            if dshared_KGQX is not None:
                dshared_KGQX += dot("kgqb,bx->kgqx", ds_KGQB, shared_BX)
            return (
                dq_KGQD + dot("kgqb,kbd->kgqd", ds_KGQB, k_KBD),
                dshared_KGQX,
                _added(dk_KDS, dot("kdgq,kgqb->kdb", q_KDGQ, ds_KGQB), start),
                _added(dv_KVS, dot("kvgq,kgqb->kvb", dout_KVGQ, p_KGQB), start),
            )

        zero = [None if x is None else jnp.zeros(x.shape, acc) for x in queries[:2]]
        *own, dk_KDS, dv_KVS = jax.lax.fori_loop(0, queries.blocks, key_block, (*zero, *carry))
        return (dk_KDS, dv_KVS), tuple(own)

    in_block = usual_queries(block)
    queries = _Queries.of(q_NHD, shared, intervals, kv_heads, in_block)
    lse, dot, dout = (
        head_blocks(x, kv_heads, in_block) for x in (finite_lse_NH[..., None], dot_NH[..., None], dout_NHV)
    )
    (dk, dv), (dq, dshared) = jax.lax.scan(
        query_block,
        (jnp.zeros(k_KSD.mT.shape, acc), jnp.zeros(v_KSV.mT.shape, acc)),
        (queries, lse, dot, dout, jnp.moveaxis(queries.q_KGQD, -1, 2), jnp.moveaxis(dout, -1, 2)),
    )
    dk_SKD, dv_SKV = (jnp.moveaxis(x, -1, 0)[:s] for x in (dk, dv))
    return tokens_of(dq, n), dk_SKD, dv_SKV, None if dshared is None else tokens_of(dshared, n)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def interval_attention(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    shared: Shared | None,
    intervals: KeyIntervals,
    scale: float,
    block: int,
) -> Float[Array, "N H V"]:
    """softmax(scale * (q k^T + shared.q shared.keys^T)) v over each query's interval of keys, in q's dtype;
    differentiable in q, k, v and shared.q.

    Query head h uses key/value head h // G. A query that sees no key gives 0.
    block: as given to key_intervals.
    """
    return _interval_forward(q_NHD, k_SKD, v_SKV, shared, intervals, scale, block)[0]


def _interval_forward(q, k, v, shared, intervals, scale, block):
    out, lse = attention_forward(q, k, v, intervals, scale, block, shared=shared)
    return out.astype(q.dtype), (q, k, v, shared, intervals, out, lse)


def _interval_backward(scale, block, residuals, dout):
    q, k, v, shared, intervals, out, lse = residuals
    dq, dk, dv, dshared = attention_backward(q, k, v, out, lse, dout, intervals, scale, block, shared)
    of_shared = None if dshared is None else Shared(dshared.astype(q.dtype), None)  # type: ignore[arg-type]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), of_shared, None


interval_attention.defvjp(_interval_forward, _interval_backward)


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    return attention_forward(q, k, v, call.intervals, scale, call.block)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    return attention_backward(q, k, v, out, lse, dout, call.intervals, scale, call.block)[:3]


BACKEND = AttentionBackend(
    "xla",
    lambda shape, machine: None,
    _forward,
    _backward,
    f"{RAN_ON_CPU}; {RAN_ON_GPU}",
    takes_any_intervals=True,
)
