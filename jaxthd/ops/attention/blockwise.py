"""Blockwise attention in which every query sees one contiguous interval of the keys: the back-end "xla".

That one form covers packed causal attention, bidirectional attention inside a document, and what a rank sees
of another rank's keys (packing/segments.py derives the intervals). Memory is linear in the number of tokens,
forward and backward, and blocks outside every interval are never touched. It runs everywhere and is right
everywhere: other back-ends are compared with it.

Legend: N queries, S keys, H query heads, K key/value heads, G = H / K, D query/key dim, V value dim,
Q query block, B key block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.attention.contract import AttentionBackend, Call
from jaxthd.ops.backend import RAN_ON_CPU, RAN_ON_GPU
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.intervals import KeyIntervals, blocked


def head_blocks(x_NHD: Array, kv_heads: int, block: int, fill: float | int = 0.0) -> Array:
    """[N, H, D] -> [blocks, K, G, block, D]."""
    x = blocked(x_NHD, block, fill)
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def tokens_of(x_bKGQD: Array, n: int) -> Array:
    """The inverse of head_blocks: [blocks, K, G, block, D] -> [N, H, D]."""
    b, k, g, q, d = x_bKGQD.shape
    return x_bKGQD.transpose(0, 3, 1, 2, 4).reshape(b * q, k * g, d)[:n]


def _scores(q_KGQD: Array, k_KBD: Array, lo_Q: Array, hi_Q: Array, start: Array, scale: float) -> Array:
    """Scaled scores of a block, -inf outside the intervals; `start` is the first key's index."""
    s_KGQB = scale * jnp.einsum(
        "kgqd,kbd->kgqb", q_KGQD, k_KBD, preferred_element_type=accumulation_dtype(q_KGQD)
    )
    j_B = start + jnp.arange(k_KBD.shape[1])
    seen_QB = (j_B >= lo_Q[:, None]) & (j_B < hi_Q[:, None])
    return jnp.where(seen_QB, s_KGQB, -jnp.inf)


def attention_forward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
    query_block: int | None = None,
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """Attention output and log-sum-exp of the scaled scores, both in promote(float32, input dtype).

    Online softmax over key blocks (Dao et al., FlashAttention, 2022). Callers own the VJP.
    block, query_block: as given to key_intervals.
    """
    queries = query_block or block
    n, kv_heads, acc = len(q_NHD), k_SKD.shape[1], accumulation_dtype(q_NHD)
    k_bKBD, v_bKBV = (blocked(x, block, 0).swapaxes(1, 2) for x in (k_SKD, v_SKV))

    def one_block(_: None, xs: tuple) -> tuple[None, tuple[Array, Array]]:
        """Output [K, G, Q, V] and log-sum-exp [K, G, Q] of a block of queries."""
        q_KGQD, lo_Q, hi_Q, key_range = xs

        def key_block(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """One step of the online softmax, with the keys of block b."""
            out_KGQV, max_KGQ, sum_KGQ = carry
            s_KGQB = _scores(q_KGQD, k_bKBD[b], lo_Q, hi_Q, b * block, scale)
            new_max_KGQ = jnp.maximum(max_KGQ, s_KGQB.max(-1))
            finite_KGQ = jnp.where(jnp.isfinite(new_max_KGQ), new_max_KGQ, 0)
            p_KGQB = jnp.exp(s_KGQB - finite_KGQ[..., None])
            shrink_KGQ = jnp.exp(max_KGQ - finite_KGQ)
            pv_KGQV = jnp.einsum(
                "kgqb,kbv->kgqv", p_KGQB.astype(v_bKBV.dtype), v_bKBV[b], preferred_element_type=acc
            )
            return (
                out_KGQV * shrink_KGQ[..., None] + pv_KGQV,
                new_max_KGQ,
                sum_KGQ * shrink_KGQ + p_KGQB.sum(-1),
            )

        empty_KGQ = jnp.zeros(q_KGQD.shape[:-1], acc)
        out_KGQV, max_KGQ, sum_KGQ = jax.lax.fori_loop(
            key_range[0],
            key_range[1],
            key_block,
            (jnp.zeros((*empty_KGQ.shape, v_SKV.shape[-1]), acc), empty_KGQ - jnp.inf, empty_KGQ),
        )
        out_KGQV = out_KGQV / jnp.where(sum_KGQ > 0, sum_KGQ, 1)[..., None]
        return None, (out_KGQV, jnp.where(sum_KGQ > 0, max_KGQ + jnp.log(sum_KGQ), -jnp.inf))

    _, (out, lse) = jax.lax.scan(
        one_block,
        None,
        (
            head_blocks(q_NHD, kv_heads, queries),
            blocked(intervals.lo, queries, 0),
            blocked(intervals.hi, queries, 0),
            intervals.blocks,
        ),
    )
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
) -> tuple[Float[Array, "N H D"], Float[Array, "S K D"], Float[Array, "S K V"]]:
    """Gradients of queries, keys and values in promote(float32, input dtype).

    out_NHV, lse_NH: output and log-sum-exp over all keys that a query sees, in other calls too; so the
    gradients of all calls add up.
    """
    (n, s), kv_heads, acc = (len(q_NHD), len(k_SKD)), k_SKD.shape[1], accumulation_dtype(q_NHD)
    k_bKBD, v_bKBV = (blocked(x, block, 0).swapaxes(1, 2) for x in (k_SKD, v_SKV))
    dot_NH = (dout_NHV.astype(out_NHV.dtype) * out_NHV).sum(-1)
    finite_lse_NH = jnp.where(jnp.isfinite(lse_NH), lse_NH, 0)

    def query_block(carry: tuple[Array, Array], xs: tuple) -> tuple[tuple[Array, Array], Array]:
        """Adds a block of queries' gradients of keys and values; gives its own."""
        q_KGQD, lse_KGQ1, dot_KGQ1, dout_KGQV, lo_Q, hi_Q, key_range = xs

        def key_block(b: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """Adds the gradients of the pairs with the keys of block b."""
            dq_KGQD, dk_bKBD, dv_bKBV = carry
            k_KBD, v_KBV = k_bKBD[b], v_bKBV[b]
            p_KGQB = jnp.exp(_scores(q_KGQD, k_KBD, lo_Q, hi_Q, b * block, scale) - lse_KGQ1)
            dp_KGQB = jnp.einsum("kgqv,kbv->kgqb", dout_KGQV, v_KBV, preferred_element_type=acc)
            ds_KGQB = (p_KGQB * (dp_KGQB - dot_KGQ1) * scale).astype(q_KGQD.dtype)
            p_KGQB = p_KGQB.astype(dout_KGQV.dtype)
            dot = partial(jnp.einsum, preferred_element_type=acc)
            return (
                dq_KGQD + dot("kgqb,kbd->kgqd", ds_KGQB, k_KBD),
                dk_bKBD.at[b].add(dot("kgqb,kgqd->kbd", ds_KGQB, q_KGQD)),
                dv_bKBV.at[b].add(dot("kgqb,kgqv->kbv", p_KGQB, dout_KGQV)),
            )

        dq_KGQD, *carry_out = jax.lax.fori_loop(
            key_range[0], key_range[1], key_block, (jnp.zeros(q_KGQD.shape, acc), *carry)
        )
        return tuple(carry_out), dq_KGQD

    (dk, dv), dq = jax.lax.scan(
        query_block,
        (jnp.zeros(k_bKBD.shape, acc), jnp.zeros(v_bKBV.shape, acc)),
        (
            head_blocks(q_NHD, kv_heads, block),
            head_blocks(finite_lse_NH[..., None], kv_heads, block),
            head_blocks(dot_NH[..., None], kv_heads, block),
            head_blocks(dout_NHV, kv_heads, block),
            blocked(intervals.lo, block, 0),
            blocked(intervals.hi, block, 0),
            intervals.blocks,
        ),
    )
    dk_SKD, dv_SKV = (x.swapaxes(1, 2).reshape(-1, kv_heads, x.shape[-1])[:s] for x in (dk, dv))
    return tokens_of(dq, n), dk_SKD, dv_SKV


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def interval_attention(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
) -> Float[Array, "N H V"]:
    """softmax(scale * q k^T) v over each query's interval of keys, in q's dtype; differentiable in q, k, v.

    Query head h uses key/value head h // G. A query that sees no key gives 0.
    block: as given to key_intervals.
    """
    return attention_forward(q_NHD, k_SKD, v_SKV, intervals, scale, block)[0].astype(q_NHD.dtype)


def _interval_forward(q, k, v, intervals, scale, block):
    out, lse = attention_forward(q, k, v, intervals, scale, block)
    return out.astype(q.dtype), (q, k, v, intervals, out, lse)


def _interval_backward(scale, block, residuals, dout):
    q, k, v, intervals, out, lse = residuals
    dq, dk, dv = attention_backward(q, k, v, out, lse, dout, intervals, scale, block)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


interval_attention.defvjp(_interval_forward, _interval_backward)


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    return attention_forward(q, k, v, call.intervals, scale, call.block)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    return attention_backward(q, k, v, out, lse, dout, call.intervals, scale, call.block)


BACKEND = AttentionBackend(
    "xla",
    lambda shape, machine: None,
    _forward,
    _backward,
    f"{RAN_ON_CPU}; {RAN_ON_GPU}",
    takes_any_intervals=True,
)
