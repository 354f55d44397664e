"""Documents that must be cut wait for one another, a bounded time; an interrupted stream goes on exactly."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import grain
import numpy as np
import pytest

from jaxthd.data.packer import PackDocuments, PackedRow
from jaxthd.packing.assignment import EVEN_ENOUGH, FULL, Shares
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
    cuts=4,
    slot_work=10_000.0,
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


def cut_documents(row: PackedRow) -> int:
    return int((np.asarray(row.batch.cuts) > 0).sum())


def test_documents_that_must_be_cut_share_rows():
    lengths = mixed_lengths(1200, 120)
    must = sum(n > SHARE for n in lengths)
    cut = [cut_documents(row) for row in rows_of(lengths)]
    assert must == 10
    assert sum(cut) >= must
    assert sum(x > 0 for x in cut) <= 7, "two or three of them fill a row"
    assert Counter(key for row in rows_of(lengths) for key in row.report.keys) == Counter(
        map(str, range(len(lengths)))
    )


def test_a_document_is_held_back_for_so_many_buffers_and_no_more():
    """A single one among short documents, counted in what is packed before it."""
    lengths = [100] + [16] * (16 * (PATIENCE + 40))
    rows = rows_of(lengths)
    at = next(i for i, row in enumerate(rows) if "0" in row.report.keys)
    assert PATIENCE - WINDOW - PACK.packing_bins <= at <= PATIENCE
    assert [i for i, row in enumerate(rows) if cut_documents(row)] == [at]


def test_nothing_waits_for_whole_documents_where_there_are_none():
    rows = rows_of([200] * 12)
    assert sum(len(row.report.keys) for row in rows) == 12
    assert all(cut_documents(row) for row in rows)


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


@pytest.mark.parametrize("context", [2, 4, 8])
def test_long_documents_leave_no_rank_much_busier(context: int):
    """As for Nemotron-3-Nano's shape in buffers of 128k tokens."""
    capacity, rng = 131_072, np.random.default_rng(context)
    lengths = rng.lognormal(np.log(8000), 1.2, 400).astype(int).clip(1, capacity).tolist()
    shares = Shares(context, capacity, 8, 70_000, capacity)
    limits = BufferLimits(capacity, 0, capacity, shares=shares)
    waiting: list[tuple[int, int]] = []
    uneven, padding = [], []
    for read in range(0, len(lengths), 8):
        waiting += [(read, n) for n in lengths[read : read + 8]]
        while True:
            fits = [Fit(n, 1, (), "", "", n * (n + 1) // 2) for _, n in waiting]
            placed = next_row(limits, fits, [(read - at) // 8 for at, _ in waiting])
            if placed is None:
                break
            sizes = [fit.size for fit in fits]
            uneven.append(shares.imbalance(placed, sizes))
            padding.append(1 - sum(sizes[i].slots for i in placed.order) / capacity)
            waiting = [x for i, x in enumerate(waiting) if i not in placed.order]
        held = sum(n for _, n in waiting if n > shares.share)
        assert held < HELD * capacity
    assert len(uneven) > 20
    assert max(uneven) <= EVEN_ENOUGH
    assert np.mean(padding) <= 1 - FULL
