"""Work over ranks: counted right, evened out, never made worse."""

import numpy as np
import pytest

from jaxthd.packing.balance import assign_chunks, attention_work, imbalance, order_documents, place_chunks
from jaxthd.packing.layout import DualChunkSwap


def work_by_hand(lengths, slots, capacity, context):
    work = np.zeros(context, int)
    rank_of = np.empty(capacity, int)
    rank_of[DualChunkSwap(context).permutation(capacity)] = np.repeat(np.arange(context), capacity // context)
    start = 0
    for length, taken in zip(lengths, slots, strict=True):
        for position in range(length):
            work[rank_of[start + position]] += position + 1
        start += taken
    return work


def ragged(rng, capacity):
    lengths = rng.integers(1, 1 + capacity // 6, size=rng.integers(1, 12))
    while lengths.sum() > capacity * 0.8:
        lengths = lengths[:-1]
    return lengths.tolist()


@pytest.mark.parametrize("context", [2, 3, 4])
def test_chosen_order_has_the_imbalance_it_claims_and_is_never_worse(context):
    rng = np.random.default_rng(context)
    gained = 0
    for _ in range(25):
        capacity = 2 * context * int(rng.integers(8, 40))
        lengths = ragged(rng, capacity)
        slots = [-(-n // 4) * 4 for n in lengths] if rng.random() < 0.5 and len(lengths) < 4 else lengths
        order, claimed = order_documents(lengths, capacity, context, 0, slots)
        assert sorted(order) == list(range(len(lengths)))
        found = imbalance(
            work_by_hand([lengths[i] for i in order], [slots[i] for i in order], capacity, context)
        )
        given = imbalance(work_by_hand(lengths, slots, capacity, context))
        assert found == pytest.approx(claimed, rel=1e-12)
        assert found <= given + 1e-12
        gained += found < given - 1e-3
        assert order_documents(lengths, capacity, context, 0, slots) == (order, claimed)
    assert gained > 10


def test_an_order_that_is_already_good_stays_as_good():
    lengths = np.random.default_rng(0).integers(10, 60, size=60).tolist()
    last = np.inf
    for seed in range(6):
        order, found = order_documents(lengths, 2560, 8, seed)
        assert found <= last
        lengths, last = [lengths[i] for i in order], found


def test_attention_work_counts_documents_only():
    rng = np.random.default_rng(0)
    for context in (1, 2, 4):
        lengths, capacity = [7, 1, 20, 9], 48
        ids = np.repeat([1, 2, 3, 4, 0], [*lengths, capacity - sum(lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in [*lengths, capacity - sum(lengths)]]).astype(
            np.int32
        )
        positions[ids == 0] = rng.integers(0, 100)
        perm = DualChunkSwap(context).permutation(capacity)
        np.testing.assert_array_equal(
            attention_work(positions[perm], ids[perm], context),
            work_by_hand(lengths, lengths, capacity, context),
        )


def test_imbalance_is_worst_over_mean():
    assert imbalance(np.array([3, 1])) == 1.5
    assert imbalance(np.array([0, 0])) == 1.0


def test_order_of_trivial_buffers():
    assert order_documents([3, 9, 1], 64, 1, 0) == ([0, 1, 2], 1.0)
    assert order_documents([], 64, 4, 0) == ([], 1.0)
    assert order_documents([0, 0], 64, 4, 0)[1] == 1.0
    with pytest.raises(ValueError, match="70 slots, the buffer has 64"):
        order_documents([35, 35], 64, 2, 0)


def test_chunks_stay_whole_within_capacity_and_even():
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks = int(rng.integers(1, 9))
        frames = (8 * rng.integers(1, 40, size=rng.integers(0, 20))).tolist()
        capacity = sum(frames) // ranks + max(frames, default=0)
        ranks_of = assign_chunks(frames, ranks, capacity)
        assert ranks_of is not None
        load = np.bincount(ranks_of, weights=frames, minlength=ranks)
        assert len(load) == ranks
        assert load.max() <= capacity
        assert load.max() - load.min() <= max(frames, default=0)
    assert assign_chunks([8, 8, 8, 8], 2, 16) in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0])
    assert assign_chunks([], 3, 0) == []


def test_best_fit_finds_what_evening_out_misses():
    ranks_of = assign_chunks([24, 24, 16, 16, 16], 2, 48)
    assert ranks_of == [0, 0, 1, 1, 1]


def test_no_assignment_is_none_whatever_the_order():
    assert assign_chunks([32, 32, 32], 2, 48) is None
    assert assign_chunks([56], 2, 48) is None
    rng = np.random.default_rng(4)
    outcomes = set()
    for _ in range(200):
        frames = 8 * rng.integers(1, 8, size=6)
        found = {assign_chunks(rng.permutation(frames).tolist(), 3, 72) is None for _ in range(4)}
        assert len(found) == 1
        outcomes |= found
    assert outcomes == {True, False}


def test_chunks_are_cut_over_ranks_only_where_they_must_be():
    assert place_chunks([24, 24, 24], 2, 48) == [0, 48, 24]
    assert place_chunks([24, 24, 24], 2, 40) == [0, 24, 48], "the second one is cut"
    assert place_chunks([16, 40, 24], 2, 40) == [40, 0, 56]
    assert place_chunks([8, 72], 4, 24) == [0, 8], "the second one spans all ranks"
    assert place_chunks([], 3, 0) == []
