"""Under the per-document layout: key intervals, places and whole rows, against the mask by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.packing.layout import ContextLayout, inverse_permutation
from jaxthd.packing.segments import make_segments, segments_of
from tests.helpers import row_arrays


@pytest.mark.parametrize(("context", "round_to"), [(2, 4), (2, 12), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_documents_cut_by_themselves_see_exactly_what_the_mask_allows(context: int, round_to: int):
    """Every rank's keys, bidirectional ones; each token found by its place."""
    rng = np.random.default_rng(context)
    capacity = 10 * round_to
    derive = jax.jit(_on_all_ranks, static_argnums=2)
    for _ in range(10):
        lengths: list[int] = []
        while (room := capacity - sum(-(-n // round_to) * round_to for n in lengths)) >= round_to:
            if lengths and rng.random() < 0.2:
                break
            lengths.append(int(rng.integers(1, min(room, 3 * round_to) + 1)))
        ids, positions = row_arrays(lengths, capacity, round_to)
        order = ContextLayout("document", context, round_to).permutation(ids)
        place_of = inverse_permutation(order)
        order = order.reshape(context, -1)
        same = (ids[:, None] == ids) & (ids > 0)
        allowed = same & np.tril(np.ones((capacity, capacity), bool))
        segments, found = derive(ids[order], positions[order], context)
        for rank in range(context):
            of_rank = jax.tree.map(lambda x, rank=rank: np.asarray(x)[rank], segments)
            mine = order[rank]
            np.testing.assert_array_equal(_seen(of_rank.local, len(mine)), allowed[np.ix_(mine, mine)])
            for t, intervals in enumerate(of_rank.keys_by_step[1:]):
                keys = order[(rank - 1 - t) % context]
                np.testing.assert_array_equal(_seen(intervals, len(keys)), allowed[np.ix_(mine, keys)])
            np.testing.assert_array_equal(_seen(of_rank.whole, len(mine)), same[np.ix_(mine, mine)])
            whole = of_rank.in_order.segments
            np.testing.assert_array_equal(whole.ids, ids)
            np.testing.assert_array_equal(whole.positions, positions)
            want = np.where(place_of // len(mine) == rank, place_of % len(mine), -1)
            np.testing.assert_array_equal(np.where(ids > 0, found[rank][1:], -1), np.where(ids > 0, want, -1))
            assert found[rank][0] == -1


def _seen(intervals, keys: int) -> np.ndarray:
    """[queries, keys], by the intervals; each of them must lie in the blocks that its query block visits."""
    j = np.arange(keys)
    seen = (j >= intervals.lo[:, None]) & (j < intervals.hi[:, None])
    blocks = np.repeat(intervals.blocks, 4, axis=0)[: len(seen)]
    assert not (seen & ~((j >= 4 * blocks[:, :1]) & (j < 4 * blocks[:, 1:]))).any()
    return seen


def _on_all_ranks(ids, positions, context: int):
    """Every rank's Segments and where it holds each place of the row, by vmap, without devices."""

    def one(ids, positions):
        segments = make_segments(ids[None], positions[None], block=4, axis="context", layout="document")
        places = jnp.arange(-1, context * len(ids), dtype=jnp.int32)
        return segments, segments.local_index(places[None])

    return jax.vmap(one, axis_name="context", axis_size=context)(ids, positions)


@pytest.mark.parametrize(("lengths", "capacity"), [([5, 1, 3], None), ([5, 1, 3], 12), ([], 4)])
def test_segments_of_lengths_are_those_of_the_row(lengths: list[int], capacity: int | None):
    ids, positions = row_arrays(lengths, sum(lengths) if capacity is None else capacity)
    want = make_segments(
        jnp.asarray(ids)[None], jnp.asarray(positions)[None], block=4, axis=None, documents=len(lengths)
    )
    jax.tree.map(np.testing.assert_array_equal, segments_of(lengths, capacity, block=4), want)


@pytest.mark.parametrize(("lengths", "capacity"), [([5, 0], None), ([5, 3], 7)])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], capacity: int | None):
    with pytest.raises(ValueError, match="capacity"):
        segments_of(lengths, capacity)
