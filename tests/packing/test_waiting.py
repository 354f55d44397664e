"""Documents that must be split wait for one another, a bounded time; an interrupted stream goes on
exactly."""

import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple
from weakref import ref

import grain
import numpy as np
import pytest

from jaxthd.data.packer import PackDocuments, PackedRow
from jaxthd.packing.assignment import EVEN_ENOUGH, FULL, Placement, Shares, Size
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.packing.waiting import HELD, PATIENCE, WINDOW, next_row

PACK = PackDocuments(
    capacity=256,
    audio_capacity=0,
    max_documents=64,
    packing_bins=2,
    context=4,
    layout="whole",
    splits=4,
    pairs_per_slot=10_000.0,
)
SHARE = 64


def documents(lengths: Sequence[int]) -> list[Document]:
    return [
        Document(str(i), np.zeros(n, np.int32), np.zeros(n, bool), np.ones(n, bool))
        for i, n in enumerate(lengths)
    ]


def rows_of(lengths: Sequence[int]) -> list[PackedRow]:
    return list(grain.MapDataset.source(documents(lengths)).pipe(PACK))


def mixed_lengths(count: int, every: int) -> list[int]:
    """Short documents; one in `every` exceeds a rank's share."""
    rng = np.random.default_rng(every)
    lengths = rng.integers(2, 16, count)
    lengths[every // 2 :: every] = rng.integers(SHARE + 1, 2 * SHARE, len(lengths[every // 2 :: every]))
    return lengths.tolist()


def split_documents(row: PackedRow) -> int:
    return int((np.asarray(row.batch.splits) > 0).sum())


def test_documents_that_must_be_split_share_rows():
    lengths = mixed_lengths(1200, 120)
    must = sum(n > SHARE for n in lengths)
    split = [split_documents(row) for row in rows_of(lengths)]
    assert must == 10
    assert sum(split) >= must
    assert sum(x > 0 for x in split) <= 7, "two or three of them fill a row"
    assert Counter(key for row in rows_of(lengths) for key in row.report.keys) == Counter(
        map(str, range(len(lengths)))
    )


def test_a_document_is_held_back_for_so_many_buffers_and_no_more():
    """A single one among short documents, counted in what is packed before it."""
    lengths = [100] + [16] * (16 * (PATIENCE + 40))
    rows = rows_of(lengths)
    at = next(i for i, row in enumerate(rows) if "0" in row.report.keys)
    assert PATIENCE - WINDOW - PACK.packing_bins <= at <= PATIENCE
    assert [i for i, row in enumerate(rows) if split_documents(row)] == [at]


def test_nothing_waits_for_whole_documents_where_there_are_none():
    rows = rows_of([200] * 12)
    assert sum(len(row.report.keys) for row in rows) == 12
    assert all(split_documents(row) for row in rows)


@pytest.mark.parametrize("every", [12, 60])
def test_a_stream_that_is_interrupted_goes_on_with_the_rows_it_would_have_made(every: int):
    stream = grain.MapDataset.source(documents(mixed_lengths(300, every))).pipe(PACK)
    want = [row.report.keys for row in stream]
    for count in range(2, len(want), len(want) // 3):
        first = iter(stream)
        for _ in range(count):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        again = iter(stream)
        again.set_state(state)
        assert again.get_state() == state
        assert [row.report.keys for row in again] == want[count:]


def test_the_state_is_short():
    stream = grain.MapDataset.source(documents(mixed_lengths(1200, 200))).pipe(PACK)
    rows = iter(stream)
    sizes = [len(json.dumps(rows.get_state())) for _ in islice(rows, 35)]
    assert max(sizes) < 2000


class Chosen(NamedTuple):
    """A row, with the sizes of all documents that waited and the buffers read after each."""

    placed: Placement
    sizes: list[Size]
    ages: list[int]


def chosen_rows(shares: Shares, buffers: Iterable[Sequence[Fit]]) -> Iterator[Chosen]:
    """The rows that are made as the packer's buffers come."""
    limits = BufferLimits(shares.capacity, 0, shares.capacity, shares=shares)
    waiting: list[tuple[int, Fit]] = []
    for read, buffer in enumerate(buffers):
        waiting += [(read, fit) for fit in buffer]
        while True:
            fits, ages = [fit for _, fit in waiting], [read - at for at, _ in waiting]
            placed = next_row(limits, fits, ages)
            if placed is None:
                break
            yield Chosen(placed, [fit.size for fit in fits], ages)
            waiting = [x for i, x in enumerate(waiting) if i not in placed.order]
        held = sum(fit.slots for _, fit in waiting if fit.slots > shares.share)
        assert held < HELD * shares.capacity
        assert max((read - at for at, _ in waiting), default=0) < PATIENCE


def fit_of(slots: int, frames: int = 0) -> Fit:
    return Fit(slots, 1, (frames,) * (frames > 0), "", "", slots * (slots + 1) // 2)


@pytest.mark.parametrize("what", ["segments", "frames"])
def test_where_slots_are_not_what_is_full_none_is_left_behind_or_split_for_them(what: str):
    """Rows take the oldest up to the limit, and not the longest of all that wait in place of shorter ones."""
    rng = np.random.default_rng(0)
    if what == "segments":
        shares = Shares(4, 16_384, 8, 10_000.0, 64, 0)
        of_buffers = rng.lognormal(np.log(120), 1, (40, 64)).clip(2, 2000).astype(int)
        buffers = [[fit_of(n) for n in of_buffer] for of_buffer in of_buffers.tolist()]
    else:
        shares = Shares(4, 16_384, 8, 10_000.0, 16_384, 81_920)
        seconds = rng.lognormal(np.log(6), 0.8, (40, 100)).clip(0.5, 35).tolist()
        buffers = [[fit_of(int(15 * s) + 5, 8 * int(12.5 * s)) for s in of_buffer] for of_buffer in seconds]
    found = list(chosen_rows(shares, buffers))
    assert len(found) >= 25
    assert not any(row.placed.split for row in found)
    assert max(row.ages[i] for row in found for i in row.placed.order) <= 4
    takes = [sum(getattr(row.sizes[i], what) for i in row.placed.order) for row in found]
    assert min(takes) >= FULL * getattr(shares, what)


def test_a_whole_document_that_waited_long_begins_a_row():
    """Short ones that find no room beside long ones wait until they fill rows, and that may be never."""
    shares, rng = Shares(8, 4096, 8, 10_000.0, 64, 0), np.random.default_rng(0)
    lengths = [410 if i % 50 == 1 else int(n * 4096) for i, n in enumerate(rng.uniform(0.9, 0.98, 90))]
    found = list(chosen_rows(shares, ([fit_of(n)] for n in lengths)))
    short = [row.ages[i] for row in found for i in row.placed.order if row.sizes[i].slots == 410]
    assert short == [PATIENCE] * 2


def test_documents_that_are_taken_leave_memory():
    """An old document that is held back keeps no later ones that were trained on."""
    made: list[ref[Document]] = []

    def alive() -> int:
        gc.collect()
        return sum(document() is not None for document in made)

    def document(number: int) -> Document:
        (found,) = documents([100 if number == 0 else 16])
        made.append(ref(found))
        return found

    stream = grain.MapDataset.source(range(16 * (PATIENCE + 20))).map(document).pipe(PACK)
    rows, most = iter(stream), 16 * (WINDOW + 2 * PACK.packing_bins)
    for _ in range(PATIENCE - 6):
        next(rows)
    assert alive() <= most
    state = rows.get_state()
    del rows
    again = iter(stream)
    again.set_state(state)
    next(again)
    assert alive() <= most, "nor those that a restored stream reads again"
    assert len(made) > 3 * most


@pytest.mark.parametrize("context", [2, 4, 8])
def test_long_documents_leave_no_rank_much_busier(context: int):
    """As for Nemotron-3-Nano's shape in buffers of 128k tokens."""
    capacity, rng = 131_072, np.random.default_rng(context)
    lengths = rng.lognormal(np.log(8000), 1.2, 400).astype(int).clip(1, capacity).tolist()
    shares = Shares(context, capacity, 8, 70_000, capacity)
    buffers = ([fit_of(n) for n in lengths[i : i + 8]] for i in range(0, len(lengths), 8))
    found = list(chosen_rows(shares, buffers))
    padding = [1 - sum(row.sizes[i].slots for i in row.placed.order) / capacity for row in found]
    assert len(found) > 20
    assert max(shares.imbalance(row.placed, row.sizes) for row in found) <= EVEN_ENOUGH
    assert np.mean(padding) <= 1 - FULL


def test_without_splits_a_document_that_is_longer_than_a_share_is_skipped_and_named():
    skipped: dict[str, str] = {}
    pack = replace(PACK, splits=0, on_skip=skipped.__setitem__)
    rows = list(grain.MapDataset.source(documents([60, 70, 64, 5, 65])).pipe(pack))
    assert sorted(key for row in rows for key in row.report.keys) == ["0", "2", "3"]
    assert all(row.batch.splits is None for row in rows)
    assert Shares(4, 256, most_split=0).starts(Placement((), ((0,), (), (), ())), [60]) == ([0], None)
    assert sorted(skipped) == ["1", "4"]
    assert "70" in skipped["1"]
    assert "raise capacity or context_splits" in skipped["1"]
