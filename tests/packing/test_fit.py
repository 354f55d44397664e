"""Whether encoder chunks fit the audio ranks: whole where they can, else split as few as possible."""

import numpy as np

from jaxthd.packing.fit import assign_pieces, place_pieces


def test_chunks_stay_whole_within_capacity_and_even():
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks = int(rng.integers(1, 9))
        frames = (8 * rng.integers(1, 40, size=rng.integers(0, 20))).tolist()
        capacity = sum(frames) // ranks + max(frames, default=0)
        ranks_of = assign_pieces(frames, ranks, capacity)
        assert ranks_of is not None
        load = np.bincount(ranks_of, weights=frames, minlength=ranks)
        assert len(load) == ranks
        assert load.max() <= capacity
        assert load.max() - load.min() <= max(frames, default=0)
    assert assign_pieces([8, 8, 8, 8], 2, 16) in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0])
    assert assign_pieces([], 3, 0) == []


def test_best_fit_finds_what_evening_out_misses():
    ranks_of = assign_pieces([24, 24, 16, 16, 16], 2, 48)
    assert ranks_of == [0, 0, 1, 1, 1]


def test_no_assignment_is_none_whatever_the_order():
    assert assign_pieces([32, 32, 32], 2, 48) is None
    assert assign_pieces([56], 2, 48) is None
    rng = np.random.default_rng(4)
    outcomes = set()
    for _ in range(200):
        frames = 8 * rng.integers(1, 8, size=6)
        found = {assign_pieces(rng.permutation(frames).tolist(), 3, 72) is None for _ in range(4)}
        assert len(found) == 1
        outcomes |= found
    assert outcomes == {True, False}


def placed(frames: list[int], ranks: int, rank_frames: int) -> list[int]:
    """Where pieces begin that each may be divided."""
    return place_pieces(frames, [[i] for i in range(len(frames))], ranks, rank_frames)


def test_chunks_are_split_over_ranks_only_where_they_must_be():
    assert placed([24, 24, 24], 2, 48) == [0, 48, 24]
    assert placed([24, 24, 24], 2, 40) == [0, 24, 48], "the second one is split"
    assert placed([16, 40, 24], 2, 40) == [40, 0, 56]
    assert placed([8, 72], 4, 24) == [0, 8], "the second one spans all ranks"
    assert placed([], 3, 0) == []
