"""Groups take places whole and in order, and a page only when nobody needs what it holds."""

import numpy as np
import pytest

from jaxthd.inference.scheduler import Page, Running, Scheduler
from jaxthd.packing.fit import BufferLimits, Fit

PAGES = 4


@pytest.mark.parametrize(
    ("ranks", "places", "group_size", "prompts"), [(1, 8, 3, 7), (2, 8, 4, 20), (4, 3, 3, 9), (2, 5, 1, 30)]
)
def test_every_answer_has_one_place_and_its_page_stays_until_it_ends(
    ranks: int, places: int, group_size: int, prompts: int
) -> None:
    """In random runs; what the devices hold is written down as they would hold it."""
    rng = np.random.default_rng(0)
    fits = [
        Fit(int(slots), 1, (8 * int(frames),), "", "") for slots, frames in rng.integers(1, 40, (prompts, 2))
    ]
    limits = BufferLimits(64, 400, max(places // group_size, 1))
    scheduler = Scheduler(fits, limits, ranks=ranks, places=places, group_size=group_size, pages=PAGES)
    pages: list[list[list[int]]] = [[[] for _ in range(PAGES)] for _ in range(ranks)]
    ended: set[tuple[int, int]] = set()
    refills = 0
    while not scheduler.is_done:
        for rank, (page, new, taken) in enumerate(scheduler.admit() or []):
            refills += bool(new and ended)
            if not new:
                assert (page, taken) == (PAGES, {})
                continue
            assert sum(fits[number].slots for number in new) <= limits.capacity
            assert sum(sum(fits[number].piece_frames) for number in new) <= limits.audio_capacity
            assert new == sorted(new)
            pages[rank][page] = new
            assert {(held.prompt, held.sample) for held in taken.values()} == {
                (number, sample) for number in new for sample in range(group_size)
            }
        held = list(scheduler)
        assert held, "somebody is always at work"
        for rank, place, answer in held:
            assert answer.prompt in pages[rank][answer.page], "its prompt is still there"
            assert 0 <= place < places
            if rng.random() < 0.3:
                scheduler.release(rank, place)
                assert (answer.prompt, answer.sample) not in ended
                ended.add((answer.prompt, answer.sample))
    assert ended == {(number, sample) for number in range(prompts) for sample in range(group_size)}
    assert refills > 0


def test_few_prompts_are_spread_over_the_data_ranks() -> None:
    fits = [Fit(10, 1, (), "", "")] * 5
    scheduler = Scheduler(fits, BufferLimits(100, 0, 4), ranks=2, places=8, group_size=2, pages=PAGES)
    assert [page.prompts for page in scheduler.admit() or []] == [[0, 2, 4], [1, 3]]
    assert scheduler.admit() is None
    assert not list(Scheduler([], BufferLimits(100, 0, 4), ranks=2, places=8, group_size=2, pages=PAGES))


def test_new_prompts_wait_until_there_is_room_for_many() -> None:
    fits = [Fit(10, 1, (), "", "")] * 20
    scheduler = Scheduler(fits, BufferLimits(100, 0, 4), ranks=1, places=8, group_size=2, pages=PAGES)
    assert scheduler.admit() == [
        Page(0, [0, 1, 2, 3], {place: Running(place // 2, place % 2, 0) for place in range(8)})
    ]
    for place in (1, 2, 5):
        scheduler.release(0, place)
        assert scheduler.admit() is None
    scheduler.release(0, 7)
    half = scheduler.admit()
    assert half == [
        Page(
            1,
            [4, 5],
            {
                1: Running(4, 0, 1),
                2: Running(4, 1, 1),
                5: Running(5, 0, 1),
                7: Running(5, 1, 1),
            },
        )
    ]
