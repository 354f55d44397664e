"""Packed causal attention over the context axis: a ring of rectangles, or gathered keys.

Under whole-buffer DualChunkSwap a rank's queries see one dense rectangle of another rank's keys, or nothing;
of a document that is split by itself, a prefix (packing/segments.py). So all attention is the two calls of
ops/attention/contract.py: one local, and one for the keys of each other rank, skipped when empty; where
segments continue others, one more for the keys of every rank.
Their parts are merged by log-sum-exp in float32 (Liu et al., Ring Attention, 2023). The ring first sends keys
and values on, then computes the step. Its backward pass sends (k, v) around again, followed by (dk, dv),
which end on the rank of their keys. With all-gather every rank has all keys and values from the start; so it
is among pipeline stages, where not all ranks run the same program and no ring can be sent.
Backward calls take the output and the log-sum-exp over all ranks' keys. A sink, one more score with a value
of zeros (GPT-OSS, 2025), enters the softmax after the last merge; backward calls then see it in both.

Legend: N queries and keys of a rank, H query heads, K key/value heads, D query/key dim, V value dim, C
context ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.attention.backends import BACKENDS, for_any_intervals
from jaxthd.ops.attention.exchange import Pair, Part, around, local_parts, over_ranks, send
from jaxthd.ops.backend import find_backend
from jaxthd.ops.numerics import kept
from jaxthd.packing.layout import inverse_permutation
from jaxthd.packing.segments import Segments, gather_in_rows


def packed_attention(
    q_NHD: Float[Array, "N H D"],
    k_NKD: Float[Array, "N K D"],
    v_NKV: Float[Array, "N K V"],
    segments: Segments,
    *,
    scale: float,
    exchange: str,
    backend: str,
    sink_H: Float[Array, " H"] | None = None,
    in_window: bool = False,
) -> Float[Array, "N H V"]:
    """Causal attention inside each document, and to all of its prefix (segments.prefixes), wherever on the
    context axis their tokens lie; q's dtype.

    exchange: "ring" or "all_gather"; the same result, up to rounding. Where segments.uniform_program is
    False, keys are gathered. backend: of BACKENDS. sink: a score of
    each head that stands beside a query's keys in the softmax; differentiable. in_window: only keys of the
    window (segments.windowed), by the blockwise back-end if the other does not take any intervals.
    Padding gives 0 and receives no gradient. Raises ValueError for another back-end.
    """
    find_backend(BACKENDS, "attention", backend)
    segments = segments.for_mixers
    if segments.splits is not None:
        how: dict[str, Any] = {
            "scale": scale,
            "exchange": exchange,
            "backend": backend,
            "in_window": in_window,
        }
        return _attention_of_whole(q_NHD, k_NKD, v_NKV, sink_H, segments, **how)
    if in_window:
        segments, backend = segments.in_window, for_any_intervals(backend).name
    if segments.context == 1 or (exchange == "ring" and segments.uniform_program):
        return _attention(q_NHD, k_NKD, v_NKV, sink_H, segments, scale, backend, False)
    k_CNKD, v_CNKV = (jax.lax.all_gather(x, segments.axis) for x in (k_NKD, v_NKV))
    return _attention(q_NHD, k_CNKD, v_CNKV, sink_H, segments, scale, backend, True)


def gathered_attention(
    q_NHD: Float[Array, "N H D"],
    k_CNKD: Float[Array, "C N K D"],
    v_CNKV: Float[Array, "C N K V"],
    segments: Segments,
    *,
    scale: float,
    backend: str,
) -> Float[Array, "N H V"]:
    """packed_attention by "all_gather", to the keys and values of all context ranks: for callers that make
    them of something smaller, which they have gathered."""
    find_backend(BACKENDS, "attention", backend)
    return _attention(q_NHD, k_CNKD, v_CNKV, None, segments, scale, backend, True)


def _attention_of_whole(
    q_NHD: Array, k_NKD: Array, v_NKV: Array, sink_H: Array | None, segments: Segments, **how: Any
) -> Array:
    """Under the layout "whole": documents that are whole on this rank; and, if there are split ones, these,
    by the first slots of each row. Only these slots' keys and values travel.

    how: further arguments of packed_attention.
    """
    split, rows = segments.splits, segments.rows
    assert split is not None
    out_NHV = packed_attention(q_NHD, k_NKD, v_NKV, split.on_rank, sink_H=sink_H, **how)

    def with_split(split_only: Segments, out_NHV: Array, sink_H: Array | None, *given: Array) -> Array:
        """Adds the attention of the split documents, which lie in the first slots of each row."""
        width = split_only.row_length
        q, k, v = (x.reshape(rows, -1, *x.shape[1:])[:, :width] for x in given)
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        more = packed_attention(q, k, v, split_only, sink_H=sink_H, **how)
        more_RSHV, out_RTHV = (x.reshape(rows, -1, *x.shape[1:]) for x in (more, out_NHV))
        return out_RTHV.at[:, :width].add(more_RSHV).reshape(out_NHV.shape)

    def without(out_NHV: Array, *_: Array | None) -> Array:
        """Leaves the output as it is."""
        return out_NHV

    branches: list[Any] = [without, *(partial(with_split, each) for each in split.split_only)]
    both_NHV: Array = jax.lax.switch(split.width, branches, out_NHV, sink_H, q_NHD, k_NKD, v_NKV)
    return both_NHV


def gather_in_order(x_NKD: Float[Array, "N K D"], segments: Segments) -> Float[Array, "S K D"]:
    """Every rank's tokens, rows one after the other, each in document order: S = N * context."""
    if segments.context == 1:
        return x_NKD
    x_RTKD = x_NKD.reshape(segments.rows, -1, *x_NKD.shape[1:])
    x_RTKD = jax.lax.all_gather(x_RTKD, segments.axis, axis=1, tiled=True)
    if segments.splits is not None:
        x_RTKD = gather_in_rows(x_RTKD, _slots_in_order(segments))
    else:
        x_RTKD = x_RTKD[:, inverse_permutation(segments.swap.permutation(x_RTKD.shape[1]))]
    return x_RTKD.reshape(-1, *x_NKD.shape[1:])


def _slots_in_order(segments: Segments) -> Array:
    """Under the layout "whole": the rank-major slot of each index of a row, [R, S]."""
    assert segments.splits is not None
    tokens = segments.row_length
    index_S = jnp.arange(segments.context * tokens, dtype=jnp.int32)
    index_RS = jnp.broadcast_to(index_S, (segments.rows, len(index_S)))
    rank_RS, slot_RS = segments.splits.slots.slot(segments.swap, index_RS, tokens)
    return rank_RS * tokens + slot_RS


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


def with_sink(
    out_NHV: Float[Array, "N H V"], lse_NH: Float[Array, "N H"], sink_H: Float[Array, " H"] | None
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """Attention over the same keys and one more, whose score is the sink and whose value is zeros. A query
    that sees no key keeps its output, 0.
    """
    if sink_H is None:
        return out_NHV, lse_NH
    total_NH = jnp.logaddexp(lse_NH, sink_H.astype(lse_NH.dtype))
    return out_NHV * jnp.exp(lse_NH - total_NH)[..., None], total_NH


def _sink_gradient(out: Array, lse: Array, dout: Array, sink_H: Array | None) -> Array | None:
    """out, lse: with the sink. As its value is 0: the sum of -probability * (dout . out) over the queries."""
    if sink_H is None:
        return None
    dot_NH = (dout.astype(out.dtype) * out).sum(-1)
    return -(jnp.exp(sink_H.astype(lse.dtype) - lse) * dot_NH).sum(0).astype(sink_H.dtype)


Sums = tuple[Array, ...]
"""Of the forward pass an output and its log-sum-exp; of the backward pass gradients."""


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(q, k, v, sink, segments: Segments, scale: float, backend: str, is_gathered: bool):
    """k, v: this rank's; of all ranks [C, N, ...] if is_gathered."""
    return _output(q, k, v, sink, segments, scale, backend, is_gathered)[0].astype(q.dtype)


def _output(q, k, v, sink_H, segments: Segments, scale: float, backend: str, is_gathered: bool) -> Sums:
    """The output and its log-sum-exp, with the sink."""

    def added(sums: Sums, pair: Pair, parts: list[Part]) -> Sums:
        """Merges the attention to this pair into the output and its log-sum-exp."""

        def visit(part: Part, out: Array, lse: Array) -> Sums:
            """Merges one call's part of the softmax."""
            return merge(out, lse, *part.backend.forward(q, *pair, part.call, scale))

        for part in parts:
            sums = jax.lax.cond(part.call.is_empty, lambda *sums: sums, partial(visit, part), *sums)
        return sums

    def gathered(sums: Sums, source: Array, parts: list[Part]) -> Sums:
        """Merges the attention to the keys of the rank `source`."""
        return added(sums, (k[source], v[source]), parts)

    local, *more = local_parts(segments, backend)
    arriving = own = k, v
    if is_gathered:
        rank = jax.lax.axis_index(segments.axis)
        own = k[rank], v[rank]
    elif segments.context > 1:
        arriving = send(own, segments)
    sums = added(local.backend.forward(q, *own, local.call, scale), own, more)
    if is_gathered:
        sums = over_ranks(gathered, sums, segments, backend)
    elif segments.context > 1:
        sums = around(added, sums, arriving, segments, backend)
    return with_sink(sums[0], sums[1], sink_H)


def _forward(q, k, v, sink, segments, scale, backend, is_gathered):
    out, lse = _output(q, k, v, sink, segments, scale, backend, is_gathered)
    out, lse = kept(out.astype(q.dtype)), kept(lse)
    return out, (q, k, v, sink, segments, out, lse)


def _backward(scale, backend, is_gathered, residuals, dout):
    q, k, v, sink, segments, out, lse = residuals
    out = out.astype(lse.dtype)

    def gradients(pair: Pair, part: Part) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v that one call gives."""
        return part.backend.backward(q, *pair, out, lse, dout, part.call, scale)

    of_keys = _gathered_gradients if is_gathered else _ring_gradients
    dq, dk, dv = of_keys(gradients, out, q, k, v, segments, backend)
    d_sink = _sink_gradient(out, lse, dout, sink)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sink, None


_attention.defvjp(_forward, _backward)

Gradients = Callable[[Pair, Part], tuple[Array, Array, Array]]
"""(keys and values, what to compute of them) -> gradients of queries, keys and values."""


def _ring_gradients(
    gradients: Gradients, out: Array, q: Array, k: Array, v: Array, segments: Segments, backend: str
) -> Sums:
    """Gradients of keys and values follow them one hop behind, and end on the rank of their keys."""

    def added(sums: Sums, pair: Pair, parts: list[Part]) -> Sums:
        """Adds the gradients that the calls with this pair give."""

        def visit(part: Part, *sums: Array) -> Sums:
            """Adds one call's gradients."""
            return tuple(a + b for a, b in zip(sums, gradients(pair, part), strict=True))

        for part in parts:
            sums = jax.lax.cond(part.call.is_empty, lambda *sums: sums, partial(visit, part), *sums)
        return sums

    def visit(sums: Sums, pair: Pair, parts: list[Part]) -> Sums:
        """Adds the gradients of a step; those of keys and values go on with them."""
        dq, *away = added(sums, pair, parts)
        return dq, *send((away[0], away[1]), segments)

    arriving = send((k, v), segments) if segments.context > 1 else (k, v)
    local, *more = local_parts(segments, backend)
    dq, dk, dv = added(gradients((k, v), local), (k, v), more)
    if segments.context == 1:
        return dq, dk, dv
    dq, *home = around(visit, (dq, jnp.zeros_like(dk), jnp.zeros_like(dv)), arriving, segments, backend)
    return dq, dk + home[0], dv + home[1]


def _gathered_gradients(
    gradients: Gradients, out: Array, q: Array, k: Array, v: Array, segments: Segments, backend: str
) -> Sums:
    """Gradients of keys and values are written in the places of their ranks."""

    def visit(sums: Sums, source: Array, parts: list[Part]) -> Sums:
        """Adds the gradients that the keys of the rank `source` get and give."""

        def grown(part: Part, is_first: bool, dq: Array, dk: Array, dv: Array) -> Sums:
            """Sets the rank's gradients by its first call, and adds those of others."""
            more, *of_pair = gradients((k[source], v[source]), part)
            put = [(x.at[source], y.astype(x.dtype)) for x, y in zip((dk, dv), of_pair, strict=True)]
            return (dq + more, *(at.set(y) if is_first else at.add(y) for at, y in put))

        for part in parts:
            visited = partial(grown, part, part is parts[0])
            sums = jax.lax.cond(part.call.is_empty, lambda *sums: sums, visited, *sums)
        return sums

    sums: Sums = jnp.zeros_like(out, shape=q.shape), jnp.zeros_like(k), jnp.zeros_like(v)
    sums = visit(sums, jax.lax.axis_index(segments.axis), local_parts(segments, backend))
    return over_ranks(visit, sums, segments, backend)
