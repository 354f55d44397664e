"""Segments: where documents begin and end, as one value that every mixer requires.

Derived once a step from (segment ids, positions); attention, convolution and scan only read it.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, QB query blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32


class KeyIntervals(NamedTuple):
    """Query i sees keys lo[i] <= j < hi[i]; query block b touches the key blocks blocks[b]: first, end."""

    lo: Int32[Array, " N"]
    hi: Int32[Array, " N"]
    blocks: Int32[Array, "QB 2"]


def key_intervals(
    lo: Int32[Array, " N"], hi: Int32[Array, " N"], block: int, query_block: int | None = None
) -> KeyIntervals:
    """Adds the block ranges to the intervals. A query with hi <= lo sees nothing: output 0, lse -inf.

    block: of keys, and of queries where query_block says nothing else.

    A query block's range runs from its first to its last touched key block. The blocks between are touched
    too, because documents lie in order: nothing is executed that could be skipped.
    """
    some = hi > lo
    lo, hi = jnp.where(some, lo, 0), jnp.where(some, hi, 0)
    far, queries = jnp.iinfo(jnp.int32).max, query_block or block
    first = blocked(jnp.where(some, lo, far), queries, far).min(axis=1) // block
    last = -(-blocked(hi, queries, 0).max(axis=1) // block)
    return KeyIntervals(lo, hi, jnp.stack([jnp.minimum(first, last), last], axis=1))


def blocked(x: Array, block: int, fill: float | int) -> Array:
    """[N, ...] -> [ceil(N / block), block, ...], the last block filled up."""
    padded = jnp.pad(x, [(0, -len(x) % block)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return padded.reshape(-1, block, *x.shape[1:])


class InOrder(NamedTuple):
    """Under the per-document layout: this rank's rows as they are with all ranks' tokens in document order.

    slots: for each of a row's S places in document order, the slot of the rank-major row that holds its
    token, S in padding. places: for each of those slots its place, S in padding. segments: of the whole rows.
    """

    slots: Int32[Array, "R S"]
    places: Int32[Array, "R S"]
    segments: "Segments"


@dataclass(frozen=True)
class Segments:
    """Documents in this rank's tokens: rows one after the other, each in the context layout's order.

    ids: 0 in padding, else the document's number in its row.
    positions: index of the token in its document, 0 in padding. A token that is j or more tokens into its
        document may look j tokens back; that is all that convolution and scan need.
    local: keys on this rank that each token's attention sees (causal).
    remote: the same for the keys of context rank (this - 1 - t) % context, at index t.
    whole: keys of the token's whole document on this rank (bidirectional; for the encoder).
    remaining: tokens of the document after this one, on this rank.
    in_order: None under the whole-buffer layout, and where one rank has it all.
    rows, axis, context, block: R, the context axis (None outside a mesh), its size, the attention block.
    documents: most documents of a row; None where that is not known, which fused attention asks for.
    uniform_program: all ranks of the mesh run this program at the same time. Else, in pipeline stages that differ,
        no collective may name ranks of other stages: ppermute names all, and is not used.
    """

    ids: Int32[Array, " N"]
    positions: Int32[Array, " N"]
    remaining: Int32[Array, " N"]
    local: KeyIntervals
    remote: tuple[KeyIntervals, ...]
    whole: KeyIntervals
    in_order: InOrder | None
    rows: int
    axis: str | None
    context: int
    block: int
    documents: int | None
    uniform_program: bool

    @property
    def valid(self) -> Bool[Array, " N"]:
        return self.ids > 0

    @property
    def stretches(self) -> int:
        """Contiguous stretches of a row on one rank: its two context chunks, or the whole row.

        Not under the per-document layout, where every document brings two of its own.
        """
        assert self.in_order is None
        return 2 if self.context > 1 else 1

    def split(self, x: Array) -> Array:
        """[N, ...] -> [R, stretches, tokens of a stretch, ...]."""
        return x.reshape(self.rows, self.stretches, -1, *x.shape[1:])

    def local_index(self, index_RD: Int32[Array, "R D"]) -> Int32[Array, " places"]:
        """Where this rank holds tokens given by their row and place in document order; -1 for -1 and where
        another rank does.
        """
        tokens = len(self.ids) // self.rows
        local_RD, here_RD = index_RD, index_RD >= 0
        if self.in_order is not None:
            slot_RD = jnp.take_along_axis(self.in_order.slots, jnp.maximum(index_RD, 0), axis=1)
            here_RD = slot_RD // tokens == jax.lax.axis_index(self.axis)
            local_RD = slot_RD % tokens
        elif self.axis is not None and self.context > 1:
            chunk, rank = tokens // 2, jax.lax.axis_index(self.axis)
            number_RD = index_RD // chunk
            here_RD = (number_RD == rank) | (number_RD == 2 * self.context - 1 - rank)
            local_RD = index_RD % chunk + jnp.where(number_RD == rank, 0, chunk)
        local_RD = local_RD + tokens * jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        return jnp.where(here_RD & (index_RD >= 0), local_RD, -1).reshape(-1)


_STATIC = ("rows", "axis", "context", "block", "documents", "uniform_program")
_TRACED = tuple(f.name for f in fields(Segments) if f.name not in _STATIC)


def _flatten(segments: Segments) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(getattr(segments, n) for n in _TRACED), tuple(getattr(segments, n) for n in _STATIC)


def _unflatten(static: tuple[Any, ...], traced: Iterable[Any]) -> Segments:
    """Without __init__: jax rebuilds pytrees around placeholders that are no arrays."""
    segments = object.__new__(Segments)
    for name, value in (*zip(_TRACED, traced, strict=True), *zip(_STATIC, static, strict=True)):
        object.__setattr__(segments, name, value)
    return segments


jax.tree_util.register_pytree_node(Segments, _flatten, _unflatten)


def make_segments(
    ids_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    *,
    block: int,
    axis: str | None,
    layout: Literal["buffer", "document"] = "buffer",
    documents: int | None = None,
    uniform_program: bool = True,
) -> Segments:
    """Derives a step's Segments from this rank's share of the batch.

    axis: name of the context mesh axis, inside shard_map; None when the rows are whole.
    layout: over that axis, of the whole buffer or of each document. documents, uniform_program: as there.

    Every key interval follows from one fact: under DualChunkSwap the local order of tokens is their global
    order, so a query's global interval [first token of its document, itself] is also an interval of any
    rank's keys, found by counting that rank's tokens below either end. Under the whole-buffer layout the
    intervals between two ranks are equal over a prefix of the queries' document: one dense rectangle, or
    nothing. Under the per-document one all ranks hold a document at the same slots, and what a query sees of
    another rank is a prefix of it there.
    """
    rows, tokens = ids_RT.shape
    context = jax.lax.axis_size(axis) if axis else 1
    rank = jax.lax.axis_index(axis) if axis else 0
    if context > 1 and tokens % 2:
        raise ValueError(f"{tokens} tokens of a row on a rank; context > 1 needs an even number (two chunks)")
    in_order, index_T = None, jnp.arange(tokens)

    def below(source: Array | int, x: Array, chunk: Array | int) -> Array:
        """How many of rank `source`'s tokens come before index x of what is cut into such chunks."""
        first, second = source * chunk, (2 * context - 1 - source) * chunk
        return jnp.clip(x - first, 0, chunk) + jnp.clip(x - second, 0, chunk)

    if context > 1 and layout == "document":
        start_RT, chunk_RT, in_order = _by_document(ids_RT, positions_RT, axis, block)
        begin_RT = context * start_RT

        def tokens_below(source: Array | int, x: Array) -> Array:
            """How many of rank `source`'s slots of the row come before place x of the token's document."""
            return start_RT + below(source, x - begin_RT, chunk_RT)

    else:
        if context > 1:
            chunk = tokens // 2
            second_T = (2 * context - 1 - rank) * chunk + index_T - chunk
            index_T = jnp.where(index_T < chunk, rank * chunk + index_T, second_T)
        begin_RT = index_T - positions_RT

        def tokens_below(source: Array | int, x: Array) -> Array:
            """How many of rank `source`'s tokens of the row come before global index x."""
            return x if context == 1 else below(source, x, tokens // 2)

    end_RT = begin_RT + positions_RT + 1
    row_R1 = jnp.arange(rows)[:, None]
    real_N = (ids_RT > 0).reshape(-1)

    def intervals(lo_RT: Array, hi_RT: Array) -> KeyIntervals:
        lo_N, hi_N = (jnp.where(real_N, x.reshape(-1), 0).astype(jnp.int32) for x in (lo_RT, hi_RT))
        return key_intervals(lo_N, hi_N, block)

    def of_rank(source: Array | int) -> KeyIntervals:
        return intervals(*(row_R1 * tokens + tokens_below(source, x) for x in (begin_RT, end_RT)))

    # One past the last local token of the document: the nearest change of id at or after the next token.
    change_RT = jnp.pad(ids_RT[:, 1:] != ids_RT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    stop_RT = jnp.where(change_RT, jnp.arange(1, tokens + 1), tokens)
    stop_RT = jax.lax.cummin(stop_RT, axis=1, reverse=True)
    whole_lo_RT = row_R1 * tokens + tokens_below(rank, begin_RT)
    return Segments(
        ids=ids_RT.reshape(-1),
        positions=positions_RT.reshape(-1),
        remaining=(stop_RT - 1 - jnp.arange(tokens)).reshape(-1).astype(jnp.int32),
        local=of_rank(rank),
        remote=tuple(of_rank((rank - 1 - t) % context) for t in range(context - 1)),
        whole=intervals(whole_lo_RT, row_R1 * tokens + stop_RT),
        in_order=in_order,
        rows=rows,
        axis=axis,
        context=context,
        block=block,
        documents=documents,
        uniform_program=uniform_program,
    )


def segments_of(lengths: Sequence[int], capacity: int | None = None, *, block: int = 128) -> Segments:
    """Segments of one row on one device: documents of these lengths, one after the other, then padding.

    capacity: tokens of the row; None: as many as the documents have. block: see make_segments.
    Raises ValueError for an empty document, and where the capacity is less than the documents' tokens.
    """
    tokens = sum(lengths)
    capacity = tokens if capacity is None else capacity
    if min(lengths, default=1) < 1 or tokens > capacity:
        raise ValueError(
            f"documents of {list(lengths)} tokens for a row of {capacity}; expected at least one token in "
            f"each, and at most {capacity} in all: change the lengths, or raise capacity"
        )
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths] or [ids])
    ids_T, positions_T = (jnp.asarray(np.pad(x, (0, capacity - tokens)), jnp.int32) for x in (ids, positions))
    return make_segments(ids_T[None], positions_T[None], block=block, axis=None, documents=len(lengths))


def _by_document(
    ids_RT: Array, positions_RT: Array, axis: str | None, block: int
) -> tuple[Array, Array, InOrder]:
    """Under the per-document layout, for each token of this rank: the slot where its document starts on every
    rank, and the length of the document's chunks; and all ranks' rows in document order.

    Where a document starts is where rank 0 has its first token. Rank 1 starts with its second chunk, hence at
    a position that is the chunk's length; if it has nothing, the first chunk holds all: any length will do.
    """
    rows, tokens = ids_RT.shape
    ids, positions = (jax.lax.all_gather(x, axis, axis=0) for x in (ids_RT, positions_RT))
    starts_RT = jnp.where((ids[0] > 0) & (positions[0] == 0), jnp.arange(tokens), 0)
    start_RT = jax.lax.cummax(starts_RT, axis=1)
    chunk_RT = jnp.take_along_axis(jnp.where(ids[1] > 0, positions[1], tokens), start_RT, axis=1)

    def whole_rows(x_rRT: Array) -> Array:
        return x_rRT.swapaxes(0, 1).reshape(rows, -1)

    size = len(ids) * tokens
    places_RS = whole_rows(jnp.where(ids > 0, len(ids) * start_RT + positions, size)).astype(jnp.int32)
    slots_RS = jnp.full((rows, size), size, jnp.int32)
    slots_RS = slots_RS.at[jnp.arange(rows)[:, None], places_RS].set(
        jnp.arange(size, dtype=jnp.int32), mode="drop"
    )
    ids_RS, positions_RS = (gather_places(whole_rows(x), slots_RS) for x in (ids, positions))
    segments = make_segments(ids_RS, positions_RS, block=block, axis=None)
    return start_RT, chunk_RT, InOrder(slots_RS, places_RS, segments)


def gather_places(x_RS: Array, index_RS: Array) -> Array:
    """x[r, index[r, s]], 0 where the index is S; x may have dims more, [R, S, ...]."""
    index = index_RS.reshape(*index_RS.shape, *[1] * (x_RS.ndim - 2))
    return jnp.take_along_axis(x_RS, index, axis=1, mode="fill", fill_value=0)
