"""Under the layout "whole": which slots of a rank hold chunks of split documents, and where their tokens are.

The picture is in packing/layout.py. All of it follows from `splits`, which all context ranks have: nothing is
exchanged to find it.

Legend: R rows on this rank, T slots of a row on it, N = R * T, K most split documents of a row, E = R * K * 2
their context chunks on this rank: first and second chunk of each, also where there is none.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.packing.intervals import Divided
from jaxthd.packing.layout import DualChunkSwap

Segments = Any
"""packing/segments.py's, which imports this file."""


class SplitSlots(NamedTuple):
    """The slots that rows of a rank use for split documents, equal on all ranks.

    chunk: slots of a context chunk of each document; 0 for none. start: the first slot of its first chunk.
    """

    chunk: Int32[Array, "R K"]
    start: Int32[Array, "R K"]

    @classmethod
    def of(cls, splits_RK: Int32[Array, "R K"]) -> "SplitSlots":
        """The slots of rows with these Batch.splits."""
        return cls(splits_RK, jnp.cumsum(2 * splits_RK, axis=1, dtype=jnp.int32) - 2 * splits_RK)

    @property
    def taken(self) -> Int32[Array, "R 1"]:
        """Slots of a rank that split documents take."""
        return 2 * self.chunk.sum(axis=1, keepdims=True, dtype=jnp.int32)

    def at(self, slot_RS: Int32[Array, "R S"]) -> "SplitSlot":
        """The documents of these slots of a rank. A slot of a whole document belongs to no split one."""
        ends_RK1 = (self.start + 2 * self.chunk)[..., None]
        number_RS = (slot_RS[:, None] >= ends_RK1).sum(axis=1, dtype=jnp.int32)
        is_split_RS = slot_RS < self.taken
        number_RS = jnp.minimum(number_RS, self.chunk.shape[1] - 1)
        start_RS, chunk_RS = (jnp.take_along_axis(x, number_RS, axis=1) for x in (self.start, self.chunk))
        start_RS, chunk_RS = (jnp.where(is_split_RS, x, 0) for x in (start_RS, chunk_RS))
        within_RS = jnp.where(is_split_RS, slot_RS - start_RS, 0)
        is_second_RS = is_split_RS & (within_RS >= chunk_RS)
        offset_RS = within_RS - jnp.where(is_second_RS, chunk_RS, 0)
        return SplitSlot(is_split_RS, number_RS, start_RS, chunk_RS, is_second_RS, offset_RS)

    def slot(
        self, swap: DualChunkSwap, index_RS: Int32[Array, "R S"], tokens: int
    ) -> tuple[Int32[Array, "R S"], Int32[Array, "R S"]]:
        """(rank, slot on it) of indices in the row."""
        ranks = swap.ranks
        # Where 2 * ranks chunks of a document lie in the row, each rank has two in its slots.
        at = self.at(index_RS // ranks)
        within_RS = index_RS - ranks * at.start
        chunk_number_RS = within_RS // jnp.maximum(at.chunk, 1)
        last = 2 * ranks - 1
        rank_of_split_RS = jnp.minimum(chunk_number_RS, last - chunk_number_RS)
        slot_of_split_RS = at.start + within_RS - at.chunk * (chunk_number_RS - (chunk_number_RS >= ranks))
        beyond_RS, room_R1 = index_RS - ranks * self.taken, jnp.maximum(tokens - self.taken, 1)
        return (
            jnp.where(at.is_split, rank_of_split_RS, beyond_RS // room_R1),
            jnp.where(at.is_split, slot_of_split_RS, self.taken + beyond_RS % room_R1),
        )


class SplitSlot(NamedTuple):
    """The split document of a slot of a rank; all but is_split only mean something where that is True.

    number: of the split document in its row. start, chunk: see SplitSlots. offset: from the start of its
    chunk.
    """

    is_split: Bool[Array, "R S"]
    number: Int32[Array, "R S"]
    start: Int32[Array, "R S"]
    chunk: Int32[Array, "R S"]
    is_second: Bool[Array, "R S"]
    offset: Int32[Array, "R S"]


class SplitDocuments(NamedTuple):
    """The layout "whole" as mixers see it: what stays on this rank, and what does not.

    on_rank: this rank's rows as if they were all there is. Split documents are not among them: their tokens
        see no keys. But the positions of their tokens count from the start of their context chunk, so
        convolution and scan treat each such chunk as a document of its own.
    split_only: the first slots of the rows, so many that they hold all split documents, and nothing but
        these. Several widths, the widest last: T. Empty if no row may have a split document.
    width: 0 where no row has a split document, else 1 + which of `split_only` is wide enough. It is the same
        on all ranks that take part in exchanges for split documents, so these may depend on it.
    slots: see SplitSlots. chunk_of_token: which of the E chunks holds each token; -1 for none.
    begin, end: of each chunk, its first and its last slot on this rank; -1 where there is none.
    """

    on_rank: Segments
    split_only: tuple[Segments, ...]
    width: Int32[Array, ""]
    slots: SplitSlots
    chunk_of_token: Int32[Array, " N"]
    begin: Int32[Array, "R K_2"]
    end: Int32[Array, "R K_2"]


def keeping_documents(
    make: Callable[..., Segments],
    ids_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    prefixes_RT: Int32[Array, "R T"] | None,
    splits_RK: Int32[Array, "R K"] | None,
    *,
    axis: str,
    uniform_over: tuple[str, ...],
    window: int | None,
) -> Segments:
    """Segments under the layout "whole". Segments that continue others lie whole on one rank with these.

    make: make_segments, with the arguments that are the same here. splits: None if no row may have a split
    document. Others as make_segments takes them.
    """
    rows, tokens = ids_RT.shape
    may_split = splits_RK is not None
    if splits_RK is None:
        splits_RK = jnp.zeros((rows, 1), jnp.int32)
    slots, most_split = SplitSlots.of(splits_RK), splits_RK.shape[1]
    slot_T = jnp.arange(tokens, dtype=jnp.int32)
    at = slots.at(jnp.broadcast_to(slot_T, ids_RT.shape))
    own_ids_RT = jnp.where(at.is_split, 0, ids_RT)
    own_positions_RT = jnp.where(at.is_split, jnp.where(ids_RT > 0, at.offset, 0), positions_RT)
    on_rank = make(own_ids_RT, own_positions_RT, prefixes_RT, axis=None, window=window)
    given = make, jnp.where(at.is_split, ids_RT, 0), positions_RT, at
    widths, taken = split_widths(tokens) if may_split else [], slots.taken.max()
    width = sum(((taken > least).astype(jnp.int32) for least in (0, *widths[:-1])), jnp.int32(0))
    begin, end = _chunk_ends(slots)
    row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    chunk_RT = 2 * (row_R1 * most_split + at.number) + at.is_second
    split = SplitDocuments(
        on_rank=on_rank,
        split_only=tuple(_split_only(*given, width, axis, window, most_split) for width in widths),
        width=jax.lax.pmax(width, uniform_over) if uniform_over and may_split else width,
        slots=slots,
        chunk_of_token=jnp.where(at.is_split, chunk_RT, -1).reshape(-1),
        begin=begin,
        end=end,
    )
    return replace(
        on_rank,
        ids=ids_RT.reshape(-1),
        positions=positions_RT.reshape(-1),
        splits=split,
        axis=axis,
        context=jax.lax.axis_size(axis),
        layout="whole",
    )


def split_widths(tokens: int) -> list[int]:
    """Widths of SplitDocuments.split_only, in slots of a rank's row: few long documents mostly take few
    slots."""
    return sorted({-(-tokens // 4), tokens})


def _split_only(
    make: Callable[..., Segments],
    ids_RT: Array,
    positions_RT: Array,
    at: SplitSlot,
    width: int,
    axis: str,
    window: int | None,
    most_split: int,
) -> Segments:
    """One of SplitDocuments.split_only. ids: 0 but in split documents."""
    rank, ranks = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    at = SplitSlot(*(x[:, :width] for x in at))
    ids_RS, positions_RS = ids_RT[:, :width], positions_RT[:, :width]
    divided = Divided(DualChunkSwap(ranks), at.start, at.chunk)
    first, second = divided.swap.chunks(rank)
    begin_RS = ranks * at.start
    index_RS = begin_RS + jnp.where(at.is_second, second, first) * at.chunk + at.offset
    of_split = make(ids_RS, positions_RS, axis=None)
    seen = partial(divided.seen, rank, end_RT=index_RS + 1, is_real_RT=ids_RS > 0, block=of_split.block)
    windowed = None
    if window is not None:
        windowed = seen(jnp.maximum(begin_RS, index_RS - (window - 1))), None
    return replace(
        of_split,
        keys=seen(begin_RS),
        axis=axis,
        context=ranks,
        layout="whole",
        documents=most_split,
        windowed=windowed,
    )


def _chunk_ends(slots: SplitSlots) -> tuple[Int32[Array, "R K_2"], Int32[Array, "R K_2"]]:
    """SplitDocuments.begin and end."""
    begin_RK2 = slots.start[..., None] + slots.chunk[..., None] * jnp.arange(2, dtype=jnp.int32)
    end_RK2 = begin_RK2 + slots.chunk[..., None] - 1
    rows, exists = len(begin_RK2), slots.chunk[..., None] > 0
    begin, end = (jnp.where(exists, x, -1).reshape(rows, -1) for x in (begin_RK2, end_RK2))
    return begin, end
