"""DualChunkSwap: every token on exactly one rank, each rank an early and a late chunk."""

import numpy as np
import pytest

from jaxthd.packing.layout import (
    context_permutation,
    document_chunk_indices,
    inverse_permutation,
    padded_lengths,
    row_permutation,
)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
def test_rank_holds_chunk_r_and_its_mirror(context):
    length = 48 * context
    perm = context_permutation(length, context)
    assert perm.dtype == np.int32
    original = np.random.default_rng(0).permutation(length)
    chunks = original.reshape(2 * context, -1)
    for r, shard in enumerate(original[perm].reshape(context, -1)):
        np.testing.assert_array_equal(shard, np.concatenate([chunks[r], chunks[2 * context - 1 - r]]))
    np.testing.assert_array_equal(original[perm][inverse_permutation(perm)], original)


def test_context_1_takes_any_length_and_others_refuse():
    np.testing.assert_array_equal(context_permutation(7, 1), np.arange(7))
    with pytest.raises(ValueError, match="multiple of 4"):
        context_permutation(10, 2)
    with pytest.raises(ValueError, match="at least 1"):
        context_permutation(10, 0)


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
        found = document_chunk_indices(np.array(cu), context, rank)
        assert found.dtype == np.int32
        assert found.tolist() == expected


def test_document_chunks_cut_the_buffer_evenly():
    rng = np.random.default_rng(1)
    for context in (2, 3, 4):
        cu = np.concatenate([[0], np.cumsum(2 * context * rng.integers(0, 6, size=9))])
        shards = [document_chunk_indices(cu, context, rank) for rank in range(context)]
        assert len({len(s) for s in shards}) == 1
        np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(cu[-1]))


def test_document_chunks_refuse_what_they_cannot_cut():
    with pytest.raises(ValueError, match=r"document 1 takes 6 tokens.*multiple of 2 \* context = 4"):
        document_chunk_indices(np.array([0, 8, 14]), 2, 0)
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.1"):
        document_chunk_indices(np.array([0, 8]), 2, 2)
    with pytest.raises(ValueError, match="start at 0 and never fall"):
        document_chunk_indices(np.array([0, 8, -1000]), 2, 0)


def test_a_row_is_laid_out_as_a_whole_or_document_by_document():
    ids = np.array([1] * 7 + [0] + [2] * 3 + [0] * 5)
    whole, cut = (row_permutation(ids, 2, layout, 4) for layout in ("buffer", "document"))
    np.testing.assert_array_equal(whole, context_permutation(16, 2))
    assert cut.dtype == np.int32
    assert cut.tolist() == [0, 1, 6, 7, 8, 11, 12, 15, 2, 3, 4, 5, 9, 10, 13, 14]
    np.testing.assert_array_equal(row_permutation(ids[cut], 2, "document", 4), cut)
    assert row_permutation(ids, 1, "document", 4).tolist() == list(range(16))
    assert row_permutation(0 * ids, 4, "document", 1).tolist() == context_permutation(16, 4).tolist()
    with pytest.raises(ValueError, match=r"document 0 takes 7 tokens.*multiple of 2 \* context = 4"):
        row_permutation(ids, 2, "document", 1)


@pytest.mark.parametrize(
    ("lengths", "context", "tensor", "expected"),
    [
        ([11, 5], 1, 1, [11, 5]),
        ([11, 5], 2, 1, [12, 8]),
        ([11, 5], 1, 3, [11, 7]),
        ([5, 5], 2, 6, [8, 16]),
        ([], 2, 6, []),
    ],
)
def test_padded_lengths_of_the_examples(lengths, context, tensor, expected):
    assert padded_lengths(lengths, context, tensor) == expected
    if lengths == [11, 5] and context == tensor == 1:
        assert np.cumsum([0, *expected]).tolist() == [0, 11, 16]


def test_padded_lengths_divide_and_only_the_last_grows():
    rng = np.random.default_rng(2)
    for _ in range(200):
        lengths = rng.integers(1, 50, size=rng.integers(1, 6)).tolist()
        context, tensor = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        unit = 2 * context if context > 1 else 1
        padded = padded_lengths(lengths, context, tensor)
        assert sum(padded) % tensor == 0
        assert all(p % unit == 0 for p in padded)
        assert all(0 <= p - n < unit for p, n in zip(padded[:-1], lengths[:-1], strict=True))
        assert lengths[-1] <= padded[-1] < lengths[-1] + unit + unit * tensor
    with pytest.raises(ValueError, match="at least 1"):
        padded_lengths([3], 1, 0)
