"""Packing lengths alone gives the buffers, and the figures, of packing documents."""

import grain
import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig
from jaxthd.data.packer import PackDocuments
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.planning.lengths import Lengths
from jaxthd.planning.simulate import balance, pack_lengths, padded, simulate
from tests.packing.test_pack import MELS, random_documents

WORK = (3.0, 0.5)


def taken(document: Document) -> int:
    """Mel frames that a document takes in an audio buffer."""
    return FastConformer().taken(document.pieces)


def lengths_of(documents: list[Document]) -> Lengths:
    chunks = [[-(-len(x.features) // 8) * 8 for x in d.pieces] for d in documents]
    seconds = [sum(len(x.features) for x in d.pieces) / 100 for d in documents]
    tokens, frames = [len(d) for d in documents], [taken(d) for d in documents]
    return Lengths(np.array(tokens), np.array(frames), np.array(seconds), chunks)


def config(context: int = 1, tensor: int = 1, **data) -> Config:
    sizes = {"capacity": 160, "audio_capacity": 640, "max_documents": 7, "packing_bins": 3}
    return Config(
        mesh=MeshConfig(context=context, tensor=tensor),
        data=DataConfig(**{**sizes, **data}),
        model=ModelConfig(encoder=EncoderConfig(chunk_seconds=1.0)),
    )


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "best_fit_decreasing", "padded"])
@pytest.mark.parametrize(("context", "ranks"), [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("changes", [{}, {"packing_bins": 1}, {"max_documents": 3, "round_to": 8}])
def test_buffers_are_those_of_the_grain_plugin(packing, context, ranks, changes):
    """Scarce tokens, scarce audio, scarce places."""
    documents = random_documents(0, 120, chunk_frames=170)
    settings = config(context, packing=packing, audio_capacity=624, **changes).data
    pack = PackDocuments(
        **{
            name: getattr(settings, name)
            for name in ("capacity", "audio_capacity", "max_documents", "packing")
        },
        packing_bins=settings.packing_bins,
        round_to=settings.round_to,
        front_end=FastConformer(num_mels=MELS),
        context=context,
        audio_ranks=ranks,
        on_skip=lambda key, reason: None,
    )
    fitting = [d for d in documents if len(d) <= 152 and taken(d) <= 624]
    rows = [sorted(row.report.keys) for row in grain.MapDataset.source(fitting).pipe(pack)]
    lengths = lengths_of(fitting)
    groups = pack_lengths(
        (-(-lengths.tokens // settings.round_to) * settings.round_to).tolist(),
        lengths.frames.tolist(),
        **{name: getattr(settings, name) for name in ("capacity", "audio_capacity", "max_documents")},
        packing=packing,
        packing_bins=settings.packing_bins,
    )
    buffers = [buffer for group in groups for buffer in group]
    assert [sorted(fitting[i].key for i in buffer) for buffer in buffers] == rows
    assert len(rows) > 20


def test_first_fit_and_best_fit_differ():
    def buffers(packing):
        sizes = {"capacity": 10, "audio_capacity": 0, "max_documents": 9, "packing_bins": 3}
        return [*pack_lengths([5, 6, 4, 5], [0] * 4, packing=packing, **sizes)]

    assert buffers("first_fit") == [[[0, 2], [1], [3]]]
    assert buffers("best_fit") == [[[0, 3], [1, 2]]]
    sizes = {"capacity": 10, "audio_capacity": 80, "max_documents": 9, "packing_bins": 3}
    # The fullest by slots and encoder frames: 5 + 8, not 6.
    assert [*pack_lengths([6, 5, 2], [0, 64, 8], packing="best_fit", **sizes)] == [[[0], [1, 2]]]


def test_a_group_that_the_end_of_the_stream_leaves_open_does_not_count():
    def same(count: int) -> Lengths:
        return Lengths(np.full(count, 40), np.zeros(count, int), np.zeros(count), [[]] * count)

    outcome = simulate(same(30), config(), WORK)
    assert outcome.documents.tolist() == [4] * 6
    assert (outcome.padding, outcome.skipped) == (0.0, 0.0)
    assert simulate(same(5), config(), WORK).documents.tolist() == [4, 1], "the only group counts"


def test_figures_are_those_of_the_rows_packed():
    documents = random_documents(1, 200, chunk_frames=170)
    stream, settings = lengths_of(documents), config(2, 2, round_to=4)
    outcome = simulate(stream, settings, WORK)
    rows = [[documents[i] for i in buffer] for buffer in outcome.buffers]
    sizes = {"front_end": FastConformer(num_mels=MELS), "context": 2, "audio_ranks": 4, "round_to": 4}
    sizes |= {name: getattr(settings.data, name) for name in ("capacity", "audio_capacity", "max_documents")}
    batches = [pack_row(row, **sizes)[0] for row in rows]  # raises where a row does not fit
    slots, frames = 160 * len(rows), 640 * len(rows)
    real, heard = (
        sum(int(x.sum()) for x in xs)
        for xs in zip(*((b.segment_ids > 0, b.frame_mask) for b in batches), strict=True)
    )
    assert outcome.padding == pytest.approx(1 - real / slots)
    assert outcome.audio_padding == pytest.approx(1 - heard / frames)
    assert outcome.overhead == pytest.approx((3 * slots + 0.5 * frames) / (3 * real + 0.5 * heard) - 1)
    assert outcome.skipped == 0


def test_settings_that_nothing_fits_leave_everything_out():
    outcome = simulate(lengths_of(random_documents(3, 20)), config(capacity=0), WORK)
    assert (outcome.buffers, outcome.skipped, outcome.overhead) == ([], 1.0, float("inf"))


def test_padded_batches_take_their_longest_and_length_buckets_are_made_inside_an_epoch():
    tokens = np.array([10, 2, 4, 8, 6, 2])
    stream = Lengths(tokens, 8 * tokens, 0.08 * tokens, [[8 * n] for n in tokens.tolist()])
    in_order = padded(stream, config(), 2, WORK)
    assert in_order.buffers == [[0, 1], [2, 3], [4, 5]]
    assert in_order.padding == in_order.audio_padding == pytest.approx(1 - 32 / 48)
    assert in_order.overhead == pytest.approx(48 / 32 - 1)
    by_length = padded(stream, config(), 2, WORK, epoch=3)
    assert by_length.buffers == [[1, 2], [0], [5, 4], [3]]
    assert by_length.padding == pytest.approx(1 - 32 / (8 + 10 + 12 + 8))


def test_imbalance_is_that_of_the_rows_packed():
    documents = random_documents(4, 60, chunk_frames=170)
    settings = config(4, audio_capacity=4096, round_to=2)
    outcome = simulate(lengths_of(documents), settings, WORK)
    sizes = {
        "capacity": 160,
        "audio_capacity": 4096,
        "front_end": FastConformer(num_mels=MELS),
        "max_documents": 7,
        "context": 4,
    }
    rows = [[documents[i] for i in buffer] for buffer in outcome.buffers]
    expected = [
        np.mean([pack_row(row, **sizes, round_to=2, order_seed=seed)[1].imbalance for row in rows])
        for seed in (None, 0)
    ]
    before, after = balance(lengths_of(documents), outcome)
    assert [before, after] == pytest.approx(expected)
    assert after < before
