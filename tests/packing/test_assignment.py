"""Documents assigned to context ranks: what fits stays whole, few are split, work is even."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from jaxthd.config import ComputeConfig, Config, MeshConfig
from jaxthd.packing.assignment import EVEN_ENOUGH, FULL, Placement, Shares, Size
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout, attention_work
from jaxthd.packing.pack import pack_row


def sizes_of(lengths: list[int]) -> list[Size]:
    return [Size(n, n * (n + 1) // 2) for n in lengths]


def filled(shares: Shares, sizes: list[Size], chosen: Sequence[int], others: Sequence[int] = ()) -> Placement:
    placed = shares.best(sizes, shares.rows(sizes, chosen, others, range(shares.most_split + 1)))
    assert placed is not None
    return placed


def slots_used(shares: Shares, placed, sizes: list[Size]) -> list[int]:
    split = sum(2 * shares.chunk(sizes[i].slots) for i in placed.split)
    return [split + sum(sizes[i].slots for i in of_rank) for of_rank in placed.whole]


@pytest.mark.parametrize("context", [2, 4, 8])
def test_rows_are_full_and_even_and_split_no_more_than_they_must(context: int):
    """Short documents, as of speech: split only if attention alone has to be even."""
    rng, capacity = np.random.default_rng(context), 8192
    sizes = sizes_of(rng.integers(10, 400, 80).tolist())
    chosen = list(range(int((np.cumsum([s.slots for s in sizes]) <= capacity).sum())))
    others = list(range(len(chosen), len(sizes)))
    for pairs_per_slot in (10_000.0, 0.0):
        shares = Shares(context, capacity, 8, pairs_per_slot)
        placed = filled(shares, sizes, chosen, others)
        assert len(set(placed.order)) == len(placed.order)
        assert max(slots_used(shares, placed, sizes)) <= capacity // context
        assert sum(sizes[i].slots for i in placed.order) >= FULL * capacity
        assert shares.imbalance(placed, sizes) <= EVEN_ENOUGH
        if pairs_per_slot:
            assert not placed.split


def test_a_long_document_is_split_and_the_first_is_always_placed():
    shares = Shares(4, 64, 2)
    sizes = sizes_of([16, 40, 30, 64, 3])
    for first in range(len(sizes)):
        order = [first, *(i for i in range(len(sizes)) if i != first)]
        placed = filled(shares, sizes, order)
        assert first in placed.order
        assert max(slots_used(shares, placed, sizes)) <= 16
        assert {i for i in placed.order if sizes[i].slots > 16} <= set(placed.split)
    assert shares.fits(sizes[3])
    assert not shares.fits(sizes[3]._replace(segments=2))
    two = sizes_of([32, 30])
    assert Shares(4, 64, 1).assign(two) is None
    assert shares.assign(two) is not None


def test_limits_of_documents_and_audio_hold():
    shares = Shares(2, 100, 2, segments=3, frames=16)
    sizes = [Size(10, 55, 1, 8) for _ in range(5)]
    assert len(filled(shares, sizes, range(5)).order) == 2
    assert len(filled(shares, [s._replace(frames=0) for s in sizes], range(5)).order) == 3


def test_exchanges_lower_the_most_work():
    """Against all ways to deal out the documents, for few of them."""
    rng, shares = np.random.default_rng(0), Shares(2, 400, 0)
    for _ in range(20):
        sizes = sizes_of(rng.integers(1, 60, 6).tolist())
        placed = shares.assign(sizes)
        assert placed is not None
        best = min(
            max(sum(s.work for s, at in zip(sizes, ranks, strict=True) if at == r) for r in (0, 1))
            for ranks in itertools.product((0, 1), repeat=6)
        )
        assert shares.rank_work(placed, sizes).max() <= 1.25 * best


@pytest.mark.parametrize("context", [2, 3, 4])
def test_the_permutation_gives_every_rank_its_documents_in_order(context: int):
    """Each whole document on one rank, of each split one two chunks; local order is document order."""
    rng, shares = np.random.default_rng(1), Shares(context, 24 * context, 2)
    for _ in range(20):
        lengths = rng.integers(1, 48, 6).tolist()
        placed = filled(shares, sizes_of(lengths), range(6))
        documents = [
            Document(str(i), np.full(n, i + 1, np.int32), np.zeros(n, bool), np.ones(n, bool))
            for i, n in enumerate(lengths)
        ]
        row = [documents[i] for i in placed.order]
        sizes = {"audio_capacity": 0, "max_documents": 6, "capacity": 24 * context}
        batch, report = pack_row(
            row, context=context, layout="whole", shares=shares, placement=placed.renumbered(), **sizes
        )
        ids, positions, splits = batch.segment_ids[0], batch.positions[0], batch.splits[0]
        layout = ContextLayout("whole", context)
        assert report.keys == tuple(d.key for d in row)
        work = shares.rank_work(placed, sizes_of(lengths))
        np.testing.assert_array_equal(attention_work(positions, ids, context), work)
        for number, slots in enumerate(layout.document_slots(ids, splits=splits), 1):
            np.testing.assert_array_equal(batch.tokens[0, slots], int(report.keys[number - 1]) + 1)
            np.testing.assert_array_equal(positions[slots], np.arange(len(slots)))
        for rank in range(context):
            mine = slice(rank * 24, (rank + 1) * 24)
            real = ids[mine] > 0
            assert (np.diff(ids[mine][real]) >= 0).all()
            of_rank = {int(report.keys[i - 1]) for i in ids[mine][real]}
            assert {placed.order.index(i) for i in of_rank} <= {
                placed.order.index(i) for i in (*placed.split, *placed.whole[rank])
            }


def test_documents_that_no_rank_can_hold_are_told():
    config = Config(mesh=MeshConfig(context=2), compute=ComputeConfig(context_layout="whole"))
    limits = BufferLimits.of(config)
    n = config.data.capacity // 2 + 10
    flags = np.ones(n, bool)
    document = Document("a", np.zeros(n, np.int32), ~flags, flags)
    assert not limits.fit(document).reject_reason
    is_answer = np.arange(n) >= n - 10
    shared = Document("b", np.zeros(n, np.int32), ~flags, is_answer, answers=(5, 5))
    assert "share" in limits.fit(shared).unassignable
