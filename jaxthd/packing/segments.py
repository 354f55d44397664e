"""Segments: where documents begin and end, as one value that every mixer requires.

Derived once a step from segment ids and positions; attention, convolution and scan only read it.

Words. A row's *index* counts its tokens in document order. A *slot* counts them as the context layout has
them: the slots of a row on this rank.

Legend: R rows on this rank, T tokens of a row on it, N = R * T, C context ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.packing.intervals import Divided, KeyIntervals, SeenKeys, intervals_of_rows
from jaxthd.packing.layout import DualChunkSwap, LayoutKind
from jaxthd.packing.prefixes import Prefixes, make_prefixes
from jaxthd.packing.split_documents import SplitDocuments, keeping_documents


@dataclass(frozen=True)
class Segments:
    """The documents in this rank's tokens: rows one after the other, each in the context layout's order.

    ids: 0 in padding, else the document's number in its row.
    positions: the token's index in its document; 0 in padding. A token of position j or more may look j
        tokens back; that is all that convolution and scan need.
    remaining: tokens of the document after this one, on this rank.
    keys: the keys that each token's attention sees (causal).
    whole: the keys of the token's whole document on this rank (bidirectional; for the encoder).
    splits: None but under the layout "whole" on several ranks; there attention, convolution and scan read it
        in place of what else is here, which is about documents that stay on this rank.
    prefixes: which documents continue others; None where all stand alone.
    rows, axis, context, block: R, the context axis (None outside a mesh), its size, the attention block.
    layout: how rows are laid out over that axis.
    documents: the most documents in a row; None where that is not known. Fused attention needs it.
    uniform_program: all ranks of the mesh run this program at the same time. Where they do not, in pipeline
        stages, no collective may name ranks of other stages. ppermute names all ranks, so it is not used.
    windowed: the keys that attention in a window sees, of the document and of its prefix (None without
        prefixes). None for a model without such layers.
    adapted: the tokens that low-rank matrices are on for; None: all.
    """

    ids: Int32[Array, " N"]
    positions: Int32[Array, " N"]
    remaining: Int32[Array, " N"]
    keys: SeenKeys
    whole: KeyIntervals
    prefixes: Prefixes | None
    splits: SplitDocuments | None
    rows: int
    axis: str | None
    context: int
    block: int
    layout: LayoutKind
    documents: int | None
    uniform_program: bool
    windowed: tuple[SeenKeys, SeenKeys | None] | None = None
    adapted: Bool[Array, " N"] | None = None

    @property
    def valid(self) -> Bool[Array, " N"]:
        """True on tokens of documents, False in padding."""
        return self.ids > 0

    @property
    def sequence_positions(self) -> Int32[Array, " N"]:
        """positions, but counted from the start of the prefix where a segment continues one."""
        return self.positions if self.prefixes is None else self.positions + self.prefixes.tokens_before

    @property
    def in_window(self) -> "Segments":
        """These documents for attention in a window. Its keys are no runs of whole documents, so fused
        attention cannot use them.
        """
        assert self.windowed is not None
        (keys, of_prefix), prefixes = self.windowed, self.prefixes
        if prefixes is not None and of_prefix is not None:
            prefixes = prefixes._replace(keys=of_prefix)
        return replace(self, keys=keys, prefixes=prefixes, documents=None, windowed=None)

    @property
    def for_mixers(self) -> "Segments":
        """These; or the documents on this rank alone, where the program has no split ones."""
        return self if self.splits is None or self.splits.split_only else self.splits.on_rank

    @property
    def row_length(self) -> int:
        """Tokens of a row on this rank."""
        return len(self.ids) // self.rows

    @property
    def swap(self) -> DualChunkSwap:
        """The chunks of each context rank."""
        return DualChunkSwap(self.context)

    @property
    def context_chunks(self) -> int:
        """Context chunks of a row on this rank: two, or the whole row as one. Each is contiguous.

        Only under the whole-buffer layout: elsewhere every document that is split has two of its own.
        """
        if self.splits is not None:
            raise ValueError(
                'a layer asks for the context chunks of a row, and the layout is not "buffer"; expected one '
                "that is made for it: set compute.context_layout to buffer"
            )
        return 2 if self.context > 1 else 1

    def split(self, x: Array) -> Array:
        """[N, ...] -> [R, context chunks, tokens of a context chunk, ...]."""
        return x.reshape(self.rows, self.context_chunks, -1, *x.shape[1:])

    def local_index(self, index_RD: Int32[Array, "R D"]) -> Int32[Array, " R_D"]:
        """Positions among this rank's N tokens of the given indices in their rows, [R * D]; -1 for -1, and
        for tokens of other ranks.
        """
        tokens, rank = self.row_length, jax.lax.axis_index(self.axis) if self.axis else 0
        if self.splits is not None:
            rank_RD, local_RD = self.splits.slots.slot(self.swap, jnp.maximum(index_RD, 0), tokens)
            here_RD = rank_RD == rank
        else:
            below = partial(Divided.of_buffer(self.context, tokens).below, rank)
            local_RD = below(index_RD)
            here_RD = below(index_RD + 1) > local_RD
        local_RD = local_RD + tokens * jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        return jnp.where(here_RD & (index_RD >= 0), local_RD, -1).reshape(-1)


_STATIC = ("rows", "axis", "context", "block", "layout", "documents", "uniform_program")
_TRACED = tuple(f.name for f in fields(Segments) if f.name not in _STATIC)


def _flatten(segments: Segments) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(getattr(segments, n) for n in _TRACED), tuple(getattr(segments, n) for n in _STATIC)


def _unflatten(static: tuple[Any, ...], traced: Iterable[Any]) -> Segments:
    """Without __init__, which register_dataclass would call: its type checks refuse the placeholders that jax
    puts in the place of arrays.
    """
    segments = object.__new__(Segments)
    for name, value in (*zip(_TRACED, traced, strict=True), *zip(_STATIC, static, strict=True)):
        object.__setattr__(segments, name, value)
    return segments


jax.tree_util.register_pytree_node(Segments, _flatten, _unflatten)


def make_segments(
    ids_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    prefixes_RT: Int32[Array, "R T"] | None = None,
    *,
    block: int,
    axis: str | None,
    layout: LayoutKind = "buffer",
    documents: int | None = None,
    uniform_program: bool = True,
    window: int | None = None,
    splits_RK: Int32[Array, "R K"] | None = None,
    uniform_over: tuple[str, ...] = (),
) -> Segments:
    """Derives a step's Segments from this rank's share of the batch.

    prefixes: as in Batch; then `documents` must be known. splits: as in Batch, for the layout "whole"; None:
    no document is split, and the program has no exchange for such. uniform_over: further mesh axes whose
    ranks exchange split documents together, as a ring needs it.
    axis: name of the context mesh axis, inside shard_map; None when the rows are whole. layout: how they are
    laid out over that axis. block, documents, uniform_program: as in Segments. window: tokens that a token
    sees in a window, itself among them; None: no layer has one.
    Raises ValueError when the context axis has several ranks and T is odd, and for prefixes without
    `documents`.

    Under either layout the local order of tokens is their document order. So a document's tokens on one rank
    are one run, and what a token sees of a rank is an interval of the document's run there (intervals.py).
    """
    rows, tokens = ids_RT.shape
    ranks = jax.lax.axis_size(axis) if axis else 1
    rank = jax.lax.axis_index(axis) if axis else 0
    if ranks > 1 and layout == "whole" and axis is not None:
        make = partial(make_segments, block=block, documents=documents, uniform_program=uniform_program)
        given = ids_RT, positions_RT, prefixes_RT, splits_RK
        return keeping_documents(make, *given, axis=axis, uniform_over=uniform_over, window=window)
    if ranks > 1 and tokens % 2:
        raise ValueError("an odd number of tokens of a row on a rank; context > 1 needs two chunks of them")
    if prefixes_RT is not None and documents is None:
        raise ValueError("documents is None; expected the most segments of a row with prefixes: give it")
    slot_T = jnp.arange(tokens, dtype=jnp.int32)
    divided = Divided.of_buffer(ranks, tokens)
    index_T = slot_T if ranks == 1 else _row_index(divided.swap, rank, tokens // 2)
    index_RT = jnp.broadcast_to(index_T, ids_RT.shape)
    begin_RT, is_real_RT, stop_RT = index_RT - positions_RT, ids_RT > 0, _stops(ids_RT)
    seen = partial(divided.seen, rank, is_real_RT=is_real_RT, block=block)
    prefixes = None
    if prefixes_RT is not None and documents is not None:
        of_tokens, over = (ids_RT, positions_RT, prefixes_RT, index_RT), axis if ranks > 1 else None
        prefixes = make_prefixes(*of_tokens, divided, block=block, axis=over, documents=documents)
    windowed = None
    if window is not None:
        nearest_RT = jnp.maximum(begin_RT, index_RT - (window - 1))
        of_prefix = prefixes and prefixes.in_window(window, positions_RT, divided, rank, block)
        windowed = seen(nearest_RT, index_RT + 1), of_prefix
    return Segments(
        ids=ids_RT.reshape(-1),
        positions=positions_RT.reshape(-1),
        remaining=(stop_RT - 1 - slot_T).reshape(-1),
        keys=seen(begin_RT, index_RT + 1),
        whole=intervals_of_rows(divided.below(rank, begin_RT), stop_RT, is_real_RT, block),
        prefixes=prefixes,
        splits=None,
        rows=rows,
        axis=axis,
        context=ranks,
        block=block,
        layout=layout,
        documents=documents,
        uniform_program=uniform_program,
        windowed=windowed,
    )


def segments_of(
    lengths: Sequence[int], capacity: int | None = None, *, block: int = 128, window: int | None = None
) -> Segments:
    """Segments of one row on one device: documents of these lengths, one after the other, then padding.

    capacity: tokens of the row; None: as many as the documents have. block, window: see make_segments.
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
    return make_segments(
        ids_T[None], positions_T[None], block=block, axis=None, documents=len(lengths), window=window
    )


def _stops(ids_RT: Array) -> Int32[Array, "R T"]:
    """One past the last slot of each token's document on this rank; of padding, of its run."""
    tokens = ids_RT.shape[1]
    ends_RT = jnp.pad(ids_RT[:, 1:] != ids_RT[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    stop_RT = jnp.where(ends_RT, jnp.arange(1, tokens + 1, dtype=jnp.int32), tokens)
    return jax.lax.cummin(stop_RT, axis=1, reverse=True)


def _row_index(swap: DualChunkSwap, rank: Array | int, chunk: int) -> Array:
    """The index in the row of each slot of a rank under the whole-buffer layout, [T]."""
    slot_T = jnp.arange(2 * chunk, dtype=jnp.int32)
    first, second = swap.chunks(rank)
    return jnp.where(slot_T < chunk, first * chunk + slot_T, second * chunk + slot_T - chunk)


def gather_in_rows(x_RS: Array, index_RS: Array) -> Array:
    """x[r, index[r, s]]; 0 where the index is S. x may have more dims, [R, S, ...]."""
    index = index_RS.reshape(*index_RS.shape, *[1] * (x_RS.ndim - 2))
    return jnp.take_along_axis(x_RS, index, axis=1, mode="fill", fill_value=0)
