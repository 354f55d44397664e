"""Divides work evenly: attention over the context ranks, encoder chunks over the audio ranks.

The attention work of a token is position + 1, the number of keys it attends to. Under whole-buffer
DualChunkSwap the documents may have any order in the buffer, and the order decides how even the work is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jaxthd.packing.layout import DualChunkSwap

ROUNDS = 12
"""Rounds of 32 candidate orders that order_documents tries."""


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
    cut = np.searchsorted((starts + row).ravel(), (bounds + row).ravel(), side="right") - 1
    inside = np.clip(np.tile(bounds, len(orders)) - starts.ravel()[cut], 0, taken.ravel()[cut])
    first = work.first[orders].ravel()[cut]
    within = work.table[first + inside] - work.table[first]
    below = (before.ravel()[cut] + within).reshape(len(orders), -1)
    chunk = np.diff(below, axis=1)
    first, second = DualChunkSwap(context).chunks(np.arange(context))
    return chunk[:, first] + chunk[:, second]


def place_chunks(frames: Sequence[int], ranks: int, rank_frames: int) -> list[int]:
    """The mel frame, of those of all audio ranks, at which each encoder chunk begins.

    frames: mel frames of each chunk, multiples of 8; all ranks together hold them. rank_frames: mel frames
    that a rank holds, a multiple of 8. Rank r holds the frames from r * rank_frames on.
    No chunk is cut over ranks if assign_chunks finds such an assignment. Otherwise they lie one after the
    other, and each boundary between two ranks cuts at most one.
    """
    whole = assign_chunks(frames, ranks, rank_frames)
    free = [rank * rank_frames for rank in range(ranks)]
    starts = []
    for i, length in enumerate(frames):
        rank = 0 if whole is None else whole[i]
        starts.append(free[rank])
        free[rank] += length
    return starts


def assign_chunks(frames: Sequence[int], ranks: int, capacity_per_rank: int) -> list[int] | None:
    """Assigns whole encoder chunks to ranks, evenly by mel frames. Returns each chunk's rank, or None.

    frames: mel frames of each chunk, multiples of 8. capacity_per_rank: mel frames a rank holds.
    The longest chunk goes first, to the least loaded rank. If that overflows, the longest goes first to the
    fullest rank that has room for it.
    Whether it succeeds does not depend on the order of `frames`.
    """
    longest_first = sorted(range(len(frames)), key=lambda i: -frames[i])
    for even in (True, False):
        load, out = [0] * ranks, [0] * len(frames)
        for i in longest_first:
            fitting = [r for r in range(ranks) if load[r] + frames[i] <= capacity_per_rank]
            if not fitting:
                break
            out[i] = min(fitting, key=lambda r: load[r] if even else -load[r])
            load[out[i]] += frames[i]
        else:
            return out
    return None
