"""Schedules, by brute force: each stage runs each microbatch once, in order, in the promised slots."""

import numpy as np
import pytest

from jaxthd.parallel.schedule import Schedule, make_schedule

CASES = [
    (m, p, v) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 2, 3, 4, 7, 16) if p > 1 or v == 1
]


def work(schedule: Schedule, backward: bool) -> dict[tuple[int, int], tuple[int, int]]:
    """(microbatch, stage) -> (tick, slot)."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    of = schedule.table.backward if backward else schedule.table.forward
    for tick, rank in np.argwhere(of.microbatch >= 0).tolist():
        key = (int(of.microbatch[tick, rank]), int(of.chunk[tick, rank]) * schedule.ranks + rank)
        assert key not in found
        found[key] = (tick, int(of.slot[tick, rank]))
    return found


@pytest.mark.parametrize(("microbatches", "ranks", "chunks"), CASES)
def test_all_work_is_done_once_and_when_its_input_has_just_come(microbatches: int, ranks: int, chunks: int):
    schedule = make_schedule(microbatches, ranks, chunks)
    stages = ranks * chunks
    forward, backward = work(schedule, False), work(schedule, True)
    everything = {(m, s) for m in range(microbatches) for s in range(stages)}
    assert set(forward) == set(backward) == everything
    for m, s in everything:
        tick = forward[m, s][0]
        if s:
            assert tick == forward[m, s - 1][0] + 1  # sent at the end of the previous tick
        else:
            assert schedule.table.embed[tick] == m
        back = backward[m, s][0]
        if s < stages - 1:
            assert back == backward[m, s + 1][0] + 1
        else:
            assert back == tick
            assert schedule.table.head[tick] == m
        if s == 0:
            assert schedule.table.back[back] == m
    for events in (schedule.table.embed, schedule.table.head, schedule.table.back):
        assert sorted(events[events >= 0].tolist()) == list(range(microbatches))


@pytest.mark.parametrize(("microbatches", "ranks", "chunks"), CASES)
def test_inputs_are_kept_until_their_backward(microbatches: int, ranks: int, chunks: int):
    schedule = make_schedule(microbatches, ranks, chunks)
    forward, backward = work(schedule, False), work(schedule, True)
    for rank in range(ranks):
        held: dict[int, tuple[int, int]] = {}
        for tick in range(schedule.ticks):
            for key, (at, slot) in forward.items():
                if at == tick and key[1] % ranks == rank:
                    assert slot not in held
                    held[slot] = key
            for key, (at, slot) in backward.items():
                if at == tick and key[1] % ranks == rank:
                    assert held.pop(slot) == key
        assert not held


def test_1f1b_keeps_inputs_by_ranks_and_not_by_microbatches():
    for ranks in (2, 4, 8):
        slots = {make_schedule(m, ranks).slots for m in (2 * ranks, 4 * ranks, 64)}
        assert slots == {2 * ranks - 1}
        several = {make_schedule(m, ranks, 2).slots for m in (4 * ranks, 8 * ranks)}
        assert len(several) == 1


@pytest.mark.parametrize(("microbatches", "ranks", "chunks"), [(4, 4, 1), (16, 4, 1), (16, 4, 2), (8, 2, 3)])
def test_the_bubble_is_the_formulas(microbatches: int, ranks: int, chunks: int):
    bubble = (ranks - 1) / (microbatches * chunks + ranks - 1)
    assert make_schedule(microbatches, ranks, chunks).bubble == pytest.approx(bubble)


def test_forward_only_has_no_backward():
    schedule = make_schedule(6, 4, backward=False)
    assert schedule.ticks == 6 + 3
    assert (schedule.table.backward.microbatch < 0).all()
    assert set(work(schedule, False)) == {(m, s) for m in range(6) for s in range(4)}
