"""Packed causal attention over the context axis: by a ring of rectangles, or over gathered keys.

Under whole-buffer DualChunkSwap a rank's queries see one dense rectangle of another rank's keys, or nothing;
under the per-document layout, a prefix of each document (packing/segments.py). The ring sends keys and values
on first, then computes the step, skipped when empty; parts are merged by their log-sum-exp in float32 (Liu et
al., Ring Attention, 2023). The backward pass sends (k, v) around again, (dk, dv) of other ranks after them
and home, with the log-sum-exp over all ranks' keys.

Legend: N queries and keys of a rank, H query heads, K key/value heads, D query/key dim, V value dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.attention import attention_backward, attention_forward, interval_attention
from jaxthd.packing.layout import context_permutation, inverse_permutation
from jaxthd.packing.segments import KeyIntervals, Segments, gather_places


def packed_attention(
    q_NHD: Float[Array, "N H D"],
    k_NKD: Float[Array, "N K D"],
    v_NKV: Float[Array, "N K V"],
    segments: Segments,
    *,
    scale: float,
    exchange: str,
) -> Float[Array, "N H V"]:
    """Causal attention inside each document, wherever on the context axis its tokens lie; q's dtype.

    exchange: "ring" or "all_gather"; the same result, up to rounding.
    Padding gives 0 and receives no gradient.
    """
    if exchange == "ring" or segments.context == 1:
        return _ring_attention(q_NHD, k_NKD, v_NKV, segments, scale)
    k_SKD, v_SKV = (gather_in_order(x, segments) for x in (k_NKD, v_NKV))
    return interval_attention(q_NHD, k_SKD, v_SKV, segments.gathered, scale, segments.block)


def gather_in_order(x_NKD: Float[Array, "N K D"], segments: Segments) -> Float[Array, "S K D"]:
    """Every rank's tokens, rows one after the other, each in document order: S = N * context."""
    if segments.context == 1:
        return x_NKD
    x_RTKD = x_NKD.reshape(segments.rows, -1, *x_NKD.shape[1:])
    x_RTKD = jax.lax.all_gather(x_RTKD, segments.axis, axis=1, tiled=True)
    if segments.in_order is not None:
        x_RTKD = gather_places(x_RTKD, segments.in_order.slots)
    else:
        x_RTKD = x_RTKD[:, inverse_permutation(context_permutation(x_RTKD.shape[1], segments.context))]
    return x_RTKD.reshape(-1, *x_NKD.shape[1:])


def _send(pair: tuple[Array, Array], segments: Segments) -> tuple[Array, Array]:
    """To the next rank of the ring; with a single rank nothing moves."""
    if segments.context == 1:
        return pair
    ring = [(r, (r + 1) % segments.context) for r in range(segments.context)]
    first, second = (jax.lax.ppermute(x, segments.axis, ring) for x in pair)
    return first, second


def _is_empty(intervals: KeyIntervals) -> Array:
    return jnp.all(intervals.blocks[:, 0] >= intervals.blocks[:, 1])


def merge(
    out_NHV: Float[Array, "N H V"],
    lse_NH: Float[Array, "N H"],
    part_NHV: Float[Array, "N H V"],
    part_lse_NH: Float[Array, "N H"],
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """Attention over the union of two disjoint sets of keys."""
    total_NH = jnp.logaddexp(lse_NH, part_lse_NH)
    finite_NH = jnp.where(jnp.isfinite(total_NH), total_NH, 0)
    keep_NH1, take_NH1 = (jnp.exp(x - finite_NH)[..., None] for x in (lse_NH, part_lse_NH))
    return keep_NH1 * out_NHV + take_NH1 * part_NHV, total_NH


def _ring_forward_parts(
    q: Array, k: Array, v: Array, segments: Segments, scale: float
) -> tuple[Array, Array]:
    arrived = _send((k, v), segments)
    out, lse = attention_forward(q, k, v, segments.local, scale, segments.block)
    for step, intervals in enumerate(segments.remote):
        (k, v), more = arrived, step + 1 < len(segments.remote)
        arrived = _send(arrived, segments) if more else arrived

        def visit(
            out: Array, lse: Array, k: Array = k, v: Array = v, intervals: KeyIntervals = intervals
        ) -> Any:
            return merge(out, lse, *attention_forward(q, k, v, intervals, scale, segments.block))

        out, lse = jax.lax.cond(_is_empty(intervals), lambda out, lse: (out, lse), visit, out, lse)
    return out, lse


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring_attention(q, k, v, segments: Segments, scale: float):
    return _ring_forward_parts(q, k, v, segments, scale)[0].astype(q.dtype)


def _ring_forward(q, k, v, segments, scale):
    out, lse = _ring_forward_parts(q, k, v, segments, scale)
    return out.astype(q.dtype), (q, k, v, segments, out, lse)


def _ring_backward(scale, residuals, dout):
    q, k, v, segments, out, lse = residuals
    dot_NH = (dout.astype(out.dtype) * out).sum(-1)

    def part(k: Array, v: Array, intervals: KeyIntervals) -> tuple[Array, Array, Array]:
        return attention_backward(q, k, v, lse, dot_NH, dout, intervals, scale, segments.block)

    arrived = _send((k, v), segments)
    dq, dk, dv = part(k, v, segments.local)
    # Gradients of keys and values travel with them, one hop behind, and home at the end.
    away = (jnp.zeros_like(dk), jnp.zeros_like(dv))
    for step, intervals in enumerate(segments.remote):
        here, away = arrived, _send(away, segments) if step else away
        arrived = _send(arrived, segments) if step + 1 < len(segments.remote) else arrived

        def visit(*sums: Array, here: Any = here, intervals: KeyIntervals = intervals) -> tuple[Array, ...]:
            return tuple(a + b for a, b in zip(sums, part(here[0], here[1], intervals), strict=True))

        dq, *grown = jax.lax.cond(_is_empty(intervals), lambda *sums: sums, visit, dq, *away)
        away = (grown[0], grown[1])
    if segments.remote:
        away = _send(away, segments)
    dk, dv = dk + away[0], dv + away[1]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring_attention.defvjp(_ring_forward, _ring_backward)
