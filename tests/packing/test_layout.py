"""DualChunkSwap: every token on exactly one rank, each rank an early and a late chunk."""

import numpy as np
import pytest

from jaxthd.packing.layout import (
    ContextLayout,
    DualChunkSwap,
    attention_work,
    imbalance,
    inverse_permutation,
    order_documents,
)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
def test_rank_holds_chunk_r_and_its_mirror(context):
    length = 48 * context
    perm = DualChunkSwap(context).permutation(length)
    assert perm.dtype == np.int32
    original = np.random.default_rng(0).permutation(length)
    chunks = original.reshape(2 * context, -1)
    for r, shard in enumerate(original[perm].reshape(context, -1)):
        np.testing.assert_array_equal(shard, np.concatenate([chunks[r], chunks[2 * context - 1 - r]]))
    np.testing.assert_array_equal(original[perm][inverse_permutation(perm)], original)


def test_context_1_takes_any_length_and_others_refuse():
    np.testing.assert_array_equal(DualChunkSwap(1).permutation(7), np.arange(7))
    with pytest.raises(ValueError, match="multiple of 4"):
        DualChunkSwap(2).permutation(10)
    with pytest.raises(ValueError, match="at least 1"):
        DualChunkSwap(0).permutation(10)


@pytest.mark.parametrize(
    ("cu", "context", "ranks"),
    [
        ([0, 8, 12], 2, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]),
        ([0, 12], 3, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ([0, 3, 8], 1, [list(range(8))]),
        ([0], 2, [[], []]),
    ],
)
def test_document_chunks_of_the_examples(cu, context, ranks):
    for rank, expected in enumerate(ranks):
        found = DualChunkSwap(context).tokens_of_rank(np.array(cu), rank)
        assert found.dtype == np.int32
        assert found.tolist() == expected


def test_document_chunks_split_the_buffer_evenly():
    rng = np.random.default_rng(1)
    for context in (2, 3, 4):
        cu = np.concatenate([[0], np.cumsum(2 * context * rng.integers(0, 6, size=9))])
        shards = [DualChunkSwap(context).tokens_of_rank(cu, rank) for rank in range(context)]
        assert len({len(s) for s in shards}) == 1
        np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(cu[-1]))


def test_document_chunks_refuse_what_they_cannot_split():
    with pytest.raises(ValueError, match=r"document 1 takes 6 tokens.*multiple of 2 \* context = 4"):
        DualChunkSwap(2).tokens_of_rank(np.array([0, 8, 14]), 0)
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.1"):
        DualChunkSwap(2).tokens_of_rank(np.array([0, 8]), 2)
    with pytest.raises(ValueError, match="start at 0 and never fall"):
        DualChunkSwap(2).tokens_of_rank(np.array([0, 8, -1000]), 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_chunk_before_is_where_the_arithmetic_says(ranks: int):
    """For every chunk of every rank, at every distance, against the list of chunks."""
    swap = DualChunkSwap(ranks)
    held = {chunk: (rank, half) for rank in range(ranks) for half, chunk in enumerate(swap.chunks(rank))}
    assert sorted(held) == list(range(2 * ranks))
    for half in range(2):
        for distance in range(1, ranks):
            moves = []
            for chunk, (rank, its_half) in held.items():
                source, half_before = held.get(chunk - distance, (None, None))
                if its_half == half == half_before:
                    assert swap.before(rank, distance)[half] == source
                    moves.append((source, rank))
            assert swap.moves(half, distance) == sorted(moves)
    assert [second - first for first, second in map(swap.chunks, range(ranks))].index(1) == ranks - 1


def test_slots_agree_with_what_each_rank_is_given():
    layout = ContextLayout("buffer", 3, 6)
    ids = np.repeat([1, 0, 2, 3, 0], [7, 5, 12, 2, 10])
    laid_out = ids[layout.permutation(ids)]
    tokens = np.arange(36)[layout.permutation(ids)]
    for document, slots in enumerate(layout.document_slots(laid_out), 1):
        assert tokens[slots].tolist() == np.flatnonzero(ids == document).tolist()
    assert layout.slots(np.array([1, 6, 7])).tolist() == [6, 6, 12]


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
