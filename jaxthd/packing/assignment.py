"""Assigns a buffer's documents to context ranks: whole where they fit, a few of the longest split.

This is the layout "whole" (packing/layout.py). A document that fits a rank's share of the buffer stays on one
rank, where nothing of it needs to be exchanged. A longer one is split into 2 * context equal context chunks,
two for each rank, as DualChunkSwap does. So are the longest others where whole documents alone would leave
much of the ranks' shares empty, up to a number that is fixed.

All ranks compute on as many slots, whatever is in them. So what differs between ranks is attention's work;
documents are placed by their slots, longest first, and exchanged between ranks until the work is even.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jaxthd.config import Config
from jaxthd.packing.layout import DualChunkSwap

LEAST_CHUNK = 4
"""Fewest slots of a split document's context chunk: a convolution's taps then reach only the chunk before."""
FULL = 0.97
"""A row is full enough if documents take this much of its slots, of max_documents, or of audio_capacity: then
no more of them are split."""
EVEN_ENOUGH = 1.03
"""The busiest rank's work over the mean at which no more documents are split for it."""
EVEN = 1.005
"""The busiest rank's attention over the mean at which the exchange of documents between ranks ends."""
PARTS = 1, 2, 4, 8
"""Rows are tried with whole documents of up to a share, then of up to a half of it, and so on: these are more
even."""
EXCHANGES = 100
"""Most exchanges of documents between ranks."""


def pairs_per_slot(config: Config) -> float:
    """Cost of a slot besides attention, in query-key pairs, roughly.

    A layer's matrices have about 6 dim^2 numbers, and a pair costs about 2 dim in each attention layer.
    """
    llm = config.model.llm
    attention = sum(llm.blocks[x].attention(1) is not None for x in llm.letters)
    return 3.0 * llm.dim * len(llm.letters) / max(attention, 1)


class Placement(NamedTuple):
    """Where a row's documents lie. split: those that are split, in the order of their slots. whole: by rank,
    its whole documents in the order of theirs. Numbers of documents in a given sequence.
    """

    split: tuple[int, ...]
    whole: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> list[int]:
        """All of the row's documents, in the order of their segment ids."""
        return [*self.split, *(document for of_rank in self.whole for document in of_rank)]

    def renumbered(self) -> "Placement":
        """The placement of the documents `order`, given in this order."""
        number = {document: i for i, document in enumerate(self.order)}
        whole = tuple(tuple(number[i] for i in of_rank) for of_rank in self.whole)
        return Placement(tuple(number[i] for i in self.split), whole)


class Size(NamedTuple):
    """A document's demand. slots: if it stays whole. work: of its attention, in query-key pairs.

    segments, frames: of the row's max_documents and audio_capacity. Only one segment can be split.
    """

    slots: int
    work: int
    segments: int = 1
    frames: int = 0

    @property
    def can_be_split(self) -> bool:
        """Whether context ranks may divide the document: it is one segment."""
        return self.segments == 1


@dataclass(frozen=True)
class Shares:
    """The context ranks' shares of a buffer. capacity: token slots of all ranks, a multiple of 2 * ranks.

    most_split: documents that may be split. pairs_per_slot: what a slot costs besides attention, in query-key
    pairs. segments, frames: the most of a row.
    """

    ranks: int
    capacity: int
    most_split: int
    pairs_per_slot: int | float = 0
    segments: int | float = math.inf
    frames: int | float = math.inf

    @classmethod
    def of(cls, config: Config) -> "Shares | None":
        """Limits of a config; None under other layouts, and on one rank."""
        ranks, data = config.mesh.context, config.data
        if config.compute.layout != "whole" or ranks == 1:
            return None
        frames = data.audio_capacity if config.model.encoder else 0
        most_split = config.compute.context_splits
        return cls(ranks, data.capacity, most_split, pairs_per_slot(config), data.max_documents, frames)

    @property
    def share(self) -> int:
        """Token slots of a rank."""
        return self.capacity // self.ranks

    def chunk(self, slots: int) -> int:
        """Slots of each context chunk of a document, if it is split."""
        return max(-(-slots // (2 * self.ranks)), LEAST_CHUNK)

    def fits(self, size: Size) -> bool:
        """Whether a row can hold the document, alone."""
        if size.slots <= self.share:
            return True
        return size.can_be_split and self.most_split > 0 and 2 * self.chunk(size.slots) <= self.share

    def assign(self, sizes: Sequence[Size]) -> Placement | None:
        """Places all of these documents in one row, as few as possible split; None if that was not found."""
        for number in range(self.most_split + 1):
            placed = self._place(sizes, range(len(sizes)), [], number, self.share)
            if placed is not None and len(placed.order) == len(sizes):
                return placed
        return None

    def best(self, sizes: Sequence[Size], placements: Iterable[Placement]) -> Placement | None:
        """The first good placement; if there is none, that with the most filled slots for the busiest rank's
        work.
        """
        best, highest = None, -1.0
        for placed in placements:
            if self.is_good(placed, sizes):
                return placed
            filled = sum(sizes[i].slots for i in placed.order) / self.imbalance(placed, sizes)
            if filled > highest:
                best, highest = placed, filled
        return best

    def is_good(self, placement: Placement, sizes: Sequence[Size]) -> bool:
        """Whether the row is full, or holds all documents, and is even."""
        is_full = len(placement.order) == len(sizes) or any(
            0 < FULL * most <= sum(getattr(sizes[i], name) for i in placement.order)
            for name, most in (("slots", self.capacity), ("segments", self.segments), ("frames", self.frames))
        )
        return is_full and self.imbalance(placement, sizes) <= EVEN_ENOUGH

    def starts(
        self, placement: Placement, slots: Sequence[int]
    ) -> tuple[list[int], Int32[np.ndarray, " C"] | None]:
        """The index in the row at which each document begins, and the row's Batch.splits (packing/layout.py):
        None if no document may be split.

        slots: of the documents, in the placement's order.
        """
        splits, count = np.zeros(self.most_split, np.int32), len(placement.split)
        splits[:count] = [self.chunk(n) for n in slots[:count]]
        ends = np.cumsum(2 * self.ranks * splits)
        starts, taken = [0, *ends[: count - 1].tolist()][:count], 2 * int(splits.sum())
        for rank, of_rank in enumerate(placement.whole):
            start = self.ranks * taken + rank * (self.share - taken)
            for _ in of_rank:
                starts.append(start)
                start += slots[len(starts) - 1]
        return starts, splits if self.most_split else None

    def imbalance(self, placement: Placement, sizes: Sequence[Size]) -> float:
        """Work of the busiest rank over the mean, that of the slots included."""
        work = self.pairs_per_slot * self.share + self.rank_work(placement, sizes)
        return float(work.max() / work.mean()) if work.any() else 1.0

    def rank_work(self, placement: Placement, sizes: Sequence[Size]) -> Int[np.ndarray, " ranks"]:
        """Attention work of each rank."""
        work = np.array([sum(sizes[i].work for i in of_rank) for of_rank in placement.whole], np.int64)
        first, second = DualChunkSwap(self.ranks).chunks(np.arange(self.ranks))
        for i in placement.split:
            # One segment of n tokens has n (n + 1) / 2 pairs.
            tokens = round(math.sqrt(2 * sizes[i].work + 0.25) - 0.5)
            below = np.minimum(np.arange(2 * self.ranks + 1) * self.chunk(sizes[i].slots), tokens)
            of_chunks = np.diff(below * (below + 1) // 2)
            work += of_chunks[first] + of_chunks[second]
        return work

    def rows(
        self, sizes: Sequence[Size], chosen: Sequence[int], others: Sequence[int], numbers: Iterable[int]
    ) -> Iterator[Placement]:
        """Placements with such numbers of split documents, the first document among them; see PARTS."""
        for number in numbers:
            for part in PARTS:
                if (placed := self._place(sizes, chosen, others, number, self.share // part)) is not None:
                    yield placed

    def _place(
        self, sizes: Sequence[Size], chosen: Sequence[int], others: Sequence[int], number: int, limit: int
    ) -> Placement | None:
        """Places as many of the chosen documents as possible in a row, then others where there is room.

        chosen: numbers of documents, the most urgent first. number: how many are split: the first one if it
        has more than `limit` slots, and the longest. Of whole documents, only the first may have more. None
        if there are not so many to split, or not all of these fit, or the first document does not.
        """
        falling = sorted(chosen, key=lambda i: (-sizes[i].slots, i))
        too_long = [i for i in chosen[:1] if sizes[i].slots > limit]
        split = [i for i in dict.fromkeys([*too_long, *falling]) if sizes[i].can_be_split][:number]
        room = self.share - sum(2 * self.chunk(sizes[i].slots) for i in split)
        free = [room] * self.ranks
        whole: list[list[int]] = [[] for _ in free]
        segments, frames = (sum(getattr(sizes[i], name) for i in split) for name in ("segments", "frames"))
        if len(split) < number or room < 0 or segments > self.segments or frames > self.frames:
            return None
        urgent = [i for i in chosen[:1] if i not in split]
        later = sorted(others, key=lambda i: (-sizes[i].slots, i))
        for i in [*urgent, *(i for i in falling if i not in split and i not in urgent), *later]:
            rank, size = max(range(self.ranks), key=free.__getitem__), sizes[i]
            has_room = segments + size.segments <= self.segments and frames + size.frames <= self.frames
            if has_room and size.slots <= free[rank] and (size.slots <= limit or i in urgent):
                free[rank] -= size.slots
                segments, frames = segments + size.segments, frames + size.frames
                whole[rank].append(i)
        if chosen and chosen[0] not in split and not any(chosen[0] in of_rank for of_rank in whole):
            return None
        return Placement(tuple(split), _evened_out(sizes, whole, free))


def _evened_out(
    sizes: Sequence[Size], whole: Sequence[Sequence[int]], free: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Exchanges documents of the busiest rank for others, or moves them, while that lowers the most work."""
    ranks, documents = len(whole), [i for of_rank in whole for i in of_rank]
    at = np.repeat(np.arange(ranks), [len(of_rank) for of_rank in whole])
    # Behind the documents, one that is nothing for each rank: an exchange for it is a move.
    columns = [sizes[i].slots for i in documents], [sizes[i].work for i in documents]
    slots, work = (np.array([*x, *[0] * ranks], np.int64) for x in columns)
    at, room = np.append(at, np.arange(ranks)), np.array(free)
    load = np.bincount(at, work, ranks).astype(np.int64)
    for _ in range(EXCHANGES):
        busiest = int(load.argmax())
        if load[busiest] <= EVEN * load.mean():
            break
        mine = np.flatnonzero((at == busiest) & (work > 0))
        theirs = np.flatnonzero(at != busiest)
        less, shorter = (x[mine][:, None] - x[theirs] for x in (work, slots))
        target = at[theirs]
        fits = (less > 0) & (shorter <= room[target]) & (-shorter <= room[busiest])
        most = np.where(fits, np.maximum(load[busiest] - less, load[target] + less), load[busiest])
        i, j = np.unravel_index(most.argmin(), most.shape)
        if most[i, j] >= load[busiest]:
            break
        change, moved = np.array([-1, 1]), np.array([busiest, target[j]])
        load[moved] += change * less[i, j]
        room[moved] -= change * shorter[i, j]
        at[mine[i]] = target[j]
        if theirs[j] < len(documents):
            at[theirs[j]] = busiest
    by_rank = (np.flatnonzero(at[: len(documents)] == rank) for rank in range(ranks))
    return tuple(tuple(documents[n] for n in of_rank) for of_rank in by_rank)
