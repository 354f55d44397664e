"""Where tokens live over the context axis: DualChunkSwap, of the whole buffer or of a few documents.

What is laid out is split into 2 * ranks equal context chunks; rank r holds the chunks r and
2 * ranks - 1 - r:

    chunk   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0

Under causal attention an early chunk is cheap and a late one dear, so each rank gets one of both. The default
is the whole-buffer layout, which asks nothing of document lengths.

The layout "whole" keeps documents on one rank where they fit. It splits only a few, and those by themselves:

    rank 0   [ split documents' chunks | whole documents | padding ]
    rank 1   [ split documents' chunks | whole documents | padding ]

Split documents come first, and every rank holds each of them in the same slots: its two chunks of the first
one, side by side, then those of the second. So what may have to be exchanged is a prefix of each rank's
slots. The row in document order is all split documents, then the whole ones and the padding of rank 0, then
those of rank 1; on each rank, too, tokens lie in document order. `splits`, the length of each split
document's chunks, tells all of this; packing/assignment.py chooses it.

The attention work of a token is position + 1, the number of keys it attends to. Under the whole-buffer layout
the documents may have any order in the buffer, and the order decides how even the work is (order_documents).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Shaped

from jaxthd.config import Config

LayoutKind = Literal["buffer", "whole"]
Splits = Int[np.ndarray, " K"]
"""Slots of a context chunk of each document that is split, one after the other; 0 for none."""
ROUNDS = 12
"""Rounds of 32 candidate orders that order_documents tries."""


@dataclass(frozen=True)
class DualChunkSwap:
    """Ownership of 2 * ranks equal chunks by ranks: the arithmetic, for NumPy and for jax.

    Ranks and chunks may be ints or arrays of either, traced ones too. Every rank's first chunk is in the
    first half of the chunks, in the order of the ranks; every rank's second chunk is in the second half, in
    the reverse order. So the chunk before a rank's first one is the first chunk of rank - 1, and the chunk
    before its second one is the second chunk of rank + 1. The last rank holds the two in the middle: its
    second follows its first.
    """

    ranks: int

    def chunks(self, rank: Any) -> tuple[Any, Any]:
        """A rank's first and second chunk."""
        return rank, 2 * self.ranks - 1 - rank

    def before(self, rank: Any, distance: int = 1) -> tuple[Any, Any]:
        """The ranks whose first chunk lies `distance` before this one's first, and whose second before its
        second; outside 0 .. ranks - 1 where that half of the chunks has none.
        """
        return rank - distance, rank + distance

    def moves(self, half: int, distance: int = 1) -> list[tuple[int, int]]:
        """(from, to) for ppermute: every rank receives from before(rank, distance)[half], if there is one."""
        sources = ((self.before(rank, distance)[half], rank) for rank in range(self.ranks))
        return sorted((source, rank) for source, rank in sources if 0 <= source < self.ranks)

    def permutation(self, length: int) -> Int32[np.ndarray, " length"]:
        """A buffer of `length` tokens in rank-major order: permuted[i] = original[perm[i]], int32 [length].

        Rank r's tokens are permuted[r * length / ranks : (r + 1) * length / ranks], so a plain PartitionSpec
        over "context" hands them out. ranks 1 is the identity.
        Raises ValueError when length is not a multiple of 2 * ranks (ranks 1: any length), or ranks is 0.
        """
        if self.ranks < 1:
            raise ValueError(f"context must be at least 1, got {self.ranks}")
        if self.ranks == 1:
            return np.arange(length, dtype=np.int32)
        if length % (2 * self.ranks):
            raise ValueError(
                f"a buffer of {length} tokens cannot be split into 2 * context = {2 * self.ranks} equal "
                f"chunks; make the capacity a multiple of {2 * self.ranks}"
            )
        tokens = np.arange(length, dtype=np.int32).reshape(2 * self.ranks, -1)
        return tokens[[chunk for rank in range(self.ranks) for chunk in self.chunks(rank)]].ravel()

    def tokens_of_rank(
        self, cu_seqlens: Int[np.ndarray, " documents_plus_1"], rank: int
    ) -> Int32[np.ndarray, " tokens_of_rank"]:
        """The tokens that a rank holds if each document is split by itself, document by document. This is the
        order of Transformer Engine's THD ring (its `thd_get_partitioned_indices`).

        cu_seqlens: offsets of the documents in the buffer, from 0, padding included.
        Returns int32 [cu_seqlens[-1] / ranks]. cu_seqlens [0, 8, 12], ranks 2: rank 0 holds
        [0, 1, 6, 7, 8, 11], rank 1 [2, 3, 4, 5, 9, 10]. ranks 1 returns every index, whatever the lengths.
        Raises ValueError when a document's length is not a multiple of 2 * ranks, or rank is not below ranks.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must lie in 0..{self.ranks - 1} (context {self.ranks}), got {rank}")
        lengths = np.diff(cu_seqlens)
        if len(cu_seqlens) == 0 or cu_seqlens[0] != 0 or (lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, got {list(map(int, cu_seqlens))}")
        if self.ranks == 1:
            return np.arange(cu_seqlens[-1], dtype=np.int32)
        unit = 2 * self.ranks
        if (lengths % unit).any():
            bad = int(np.flatnonzero(lengths % unit)[0])
            raise ValueError(
                f"document {bad} takes {int(lengths[bad])} tokens, not a multiple of 2 * context = {unit}; "
                "round every document up (thd_view, thd_batch)"
            )
        held = [np.empty(0, np.int32)]
        for start, tokens in zip(cu_seqlens[:-1], lengths // unit, strict=True):
            for chunk in self.chunks(rank):
                held.append(np.arange(start + chunk * tokens, start + (chunk + 1) * tokens, dtype=np.int32))
        return np.concatenate(held)


@dataclass(frozen=True)
class ContextLayout:
    """Layout of a row of a batch over the context axis.

    kind: "buffer" splits the whole buffer, "whole" the documents that the row's `splits` names. ranks: of the
        context axis; 1 splits nothing.
    round_to: each document's slots in the row are rounded up to a multiple of this, under both kinds.
    """

    kind: LayoutKind = "buffer"
    ranks: int = 1
    round_to: int = 1

    @classmethod
    def of(cls, config: Config) -> "ContextLayout":
        """The layout of a config."""
        return cls(config.compute.layout, config.mesh.context, config.data.round_to)

    @property
    def swap(self) -> DualChunkSwap:
        """The chunks of each context rank."""
        return DualChunkSwap(self.ranks)

    def slots(self, length: Any) -> Any:
        """The token slots that a document takes, or documents: an int, or an array of ints."""
        return -(-length // self.round_to) * self.round_to

    @property
    def keeps_documents(self) -> bool:
        """Documents stay whole on one rank, but for a few."""
        return self.kind == "whole" and self.ranks > 1

    def permutation(
        self, segment_ids: Int[np.ndarray, " T"], splits: Splits | None = None
    ) -> Int32[np.ndarray, " T"]:
        """Document order to rank-major order: permuted[i] = original[perm[i]], int32 [T].

        segment_ids: the row's, in any order. splits: the row's (Batch.splits), for the layout "whole"; None:
        no document is split.
        Raises ValueError when the buffer cannot be split into 2 * ranks equal chunks, and when splits take
        more than a rank's slots.
        """
        if self.keeps_documents:
            return self._permutation_of_whole(
                len(segment_ids), np.zeros(0, int) if splits is None else splits
            )
        return self.swap.permutation(len(segment_ids))

    def _permutation_of_whole(self, length: int, splits: Splits) -> Int32[np.ndarray, " T"]:
        share, taken = length // self.ranks, 2 * int(splits.sum())
        if length % (2 * self.ranks) or taken > share:
            raise ValueError(
                f"context chunks of {splits.tolist()} slots in a buffer of {length} on {self.ranks} ranks; "
                f"expected a buffer of a multiple of {2 * self.ranks} slots, and chunks of which a rank's "
                f"{share} hold two of each: split fewer documents, or change the capacity"
            )
        ends = np.cumsum(np.concatenate([[0], 2 * self.ranks * splits]))
        found = []
        for rank in range(self.ranks):
            first = self.ranks * taken + rank * (share - taken)
            found += [self.swap.tokens_of_rank(ends, rank), np.arange(first, first + share - taken)]
        return np.concatenate(found).astype(np.int32)

    def inverse(
        self, segment_ids: Int[np.ndarray, " T"], splits: Splits | None = None
    ) -> Int32[np.ndarray, " T"]:
        """Rank-major order back to document order: original = permuted[inverse]. Otherwise as permutation."""
        return inverse_permutation(self.permutation(segment_ids, splits))

    def document_slots(
        self,
        segment_ids: Int[np.ndarray, " T"],
        document_ids: Int[np.ndarray, " T"] | None = None,
        splits: Splits | None = None,
    ) -> list[Int[np.ndarray, " _"]]:
        """Where the tokens of each document lie in a laid-out row, in their order; of a document with several
        answers, segment by segment.

        segment_ids, document_ids: of the laid-out row; None: every document is one segment. splits: the
        row's. Raises ValueError as permutation.
        """
        order = self.inverse(segment_ids, splits)
        ids = (segment_ids if document_ids is None else document_ids)[order]
        return [order[ids == document] for document in range(1, ids.max() + 1)]


def inverse_permutation(perm: Int[np.ndarray, " length"]) -> Int32[np.ndarray, " length"]:
    """The permutation that undoes `perm`: original = permuted[inverse], int32 [length]."""
    inverse = np.empty(len(perm), np.int32)
    inverse[perm] = np.arange(len(perm), dtype=np.int32)
    return inverse


def attention_work(
    positions: Int[np.ndarray, " T"], segment_ids: Int[np.ndarray, " T"], context: int
) -> Int[np.ndarray, " context"]:
    """Attention work of each context rank: the sum over its document tokens of position + 1, int64 [context].

    positions, segment_ids: in context-layout order (rank-major); segment 0 is padding and costs nothing. The
    position of a token in a segment that continues a prompt counts from the prompt's beginning.
    """
    work = np.where(segment_ids > 0, positions.astype(np.int64) + 1, 0)
    return work.reshape(context, -1).sum(1)


def imbalance(work: Shaped[np.ndarray, " ranks"]) -> float:
    """Work of the busiest rank / mean, at least 1.0; 1.0 if there is no work."""
    return float(work.max() * len(work) / work.sum()) if work.sum() else 1.0


def order_documents(
    lengths: Sequence[int],
    capacity: int,
    context: int,
    seed: int,
    slots: Sequence[int] | None = None,
    work: Sequence[Int[np.ndarray, " _"]] | None = None,
) -> tuple[list[int], float]:
    """Finds an order of the documents in a buffer that balances attention work over context ranks.

    lengths: tokens of each document. slots: slots that each takes in the buffer, if more than its length.
    work: attention work of each document's slots, where it is not 1, 2, 3, ... as of one sequence.
    capacity: token slots of the buffer, a multiple of 2 * context. seed: seeds the random candidates;
        the same arguments give the same order.
    Returns (order, imbalance): order[i] is the i-th document of the buffer. The result is never worse
    than the given order; context 1 keeps that. Candidates are the given order, longest first, longest dealt
    to 2, context and 2 * context piles, and random shuffles; then pairs of the best are swapped, until ROUNDS
    x 32 candidates are compared.
    Raises ValueError if the documents do not fit the capacity.
    """
    n = np.asarray(lengths, np.int64)
    taken = n if slots is None else np.asarray(slots, np.int64)
    if taken.sum() > capacity:
        raise ValueError(f"documents take {int(taken.sum())} slots, the buffer has {capacity}")
    given = np.arange(len(n))
    if context == 1 or not len(n):
        return given.tolist(), 1.0
    rng = np.random.default_rng(seed)
    falling = np.argsort(-n, kind="stable")
    dealt = [falling[np.argsort(given % piles, kind="stable")] for piles in (2, context, 2 * context)]
    shuffled = rng.permuted(np.tile(given, (27, 1)), axis=1)
    candidates = np.concatenate([np.stack([given, falling, *dealt]), shuffled])
    best, best_cost = given, np.inf
    of_slots = [np.arange(1, length + 1) for length in n] if work is None else work
    below = _WorkBelow.of(of_slots, taken)
    for _ in range(ROUNDS):
        of_ranks = _rank_work(candidates, below, taken, capacity, context)
        cost = of_ranks.max(1) * context / max(int(of_ranks[0].sum()), 1)
        if cost.min() < best_cost:
            best, best_cost = candidates[np.argmin(cost)], cost.min()
        candidates = np.tile(best, (len(candidates), 1))
        pairs = rng.integers(len(n), size=(len(candidates), 2))
        each = np.arange(len(candidates))[:, None]
        candidates[each, pairs] = candidates[each, pairs[:, ::-1]]
    return best.tolist(), float(best_cost) if below.whole.sum() else 1.0


class _WorkBelow(NamedTuple):
    """The work of each document's first slots. table: by the number of slots, document after document.

    first: where each document begins in the table. whole: the work of each document.
    """

    table: Int[np.ndarray, " _"]
    first: Int[np.ndarray, " D"]
    whole: Int[np.ndarray, " D"]

    @classmethod
    def of(cls, work: Sequence[Int[np.ndarray, " _"]], slots: Int[np.ndarray, " D"]) -> "_WorkBelow":
        """Sums the work of each document; slots: that each takes in the buffer."""
        first = np.cumsum(slots + 1) - (slots + 1)
        table = np.zeros(int((slots + 1).sum()), np.int64)
        for start, of_document in zip(first, work, strict=True):
            table[start + 1 : start + 1 + len(of_document)] = of_document
        # Summed over all documents; a document's own sums begin at the table's value at its start.
        table = np.cumsum(table)
        return cls(table, first, table[first + slots] - table[first])


def _rank_work(
    orders: np.ndarray, work: _WorkBelow, slots: np.ndarray, capacity: int, context: int
) -> np.ndarray:
    """Attention work per rank of each candidate order [C, D], int64 [C, context], by prefix sums.

    The work before the boundary of a context chunk is that of the documents before the one that the boundary
    divides, plus that of this document's slots before the boundary.
    """
    whole, taken = work.whole[orders], slots[orders]
    starts = np.cumsum(taken, 1) - taken
    before = np.cumsum(whole, 1) - whole
    bounds = np.arange(2 * context + 1) * (capacity // (2 * context))
    row = np.arange(len(orders))[:, None] * (capacity + 1)  # one search over all candidates
    split = np.searchsorted((starts + row).ravel(), (bounds + row).ravel(), side="right") - 1
    inside = np.clip(np.tile(bounds, len(orders)) - starts.ravel()[split], 0, taken.ravel()[split])
    first = work.first[orders].ravel()[split]
    within = work.table[first + inside] - work.table[first]
    below = (before.ravel()[split] + within).reshape(len(orders), -1)
    chunk = np.diff(below, axis=1)
    first, second = DualChunkSwap(context).chunks(np.arange(context))
    return chunk[:, first] + chunk[:, second]
