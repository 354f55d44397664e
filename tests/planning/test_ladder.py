"""The plan's ladders: figures of the loader's own batches, and the rungs that save the most."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxthd.config import Config
from jaxthd.data.loader import make_loader
from jaxthd.packing.document import Document
from jaxthd.planning.ladder import batch_needs, compare_ladders, ladder_cost, proposed
from jaxthd.planning.simulate import simulate
from jaxthd.validate import DeviceFacts, findings
from tests.packing.test_pack import MELS, random_documents
from tests.planning.test_simulate import config, lengths_of

WORK = (3.0, 0.5)


def mixed(count: int = 240) -> list[Document]:
    """Documents that speak, and in every other stretch of 40 none that does."""
    documents = random_documents(1, 2 * count, chunk_frames=100)
    typed = [d for d in documents if not d.chunks]
    spoken = [d for d in documents if d.chunks]
    stretches = (x[i : i + 40] for i in range(0, min(len(typed), len(spoken)), 40) for x in (spoken, typed))
    return [document for stretch in stretches for document in stretch]


@pytest.mark.parametrize("context", [1, 2])
def test_the_costs_are_those_of_the_loaders_batches(context: int):
    documents = [d for d in mixed() if len(d) <= 160 and d.mel_frames <= 640]
    rungs = ((96, 7, 0), (160, 7, 320))
    settings = config(context, packing_bins=1, rungs=rungs)
    encoder = replace(settings.model.audio_encoder, num_mels=MELS)
    settings = replace(settings, model=replace(settings.model, encoder=encoder))
    stream = lengths_of(documents)
    outcome = simulate(stream, settings, WORK)
    found = ladder_cost(settings, batch_needs(stream, outcome), WORK)
    loader = make_loader(
        [range(len(documents))],
        lambda item, epoch: documents[item],
        settings,
        repeat=False,
        shuffle=False,
        ladder=True,
    )
    reports = [report for _, report in loader][: len(outcome.buffers)]
    used = np.bincount([report.rung for report in reports], minlength=3) / len(reports)
    assert found.shares == pytest.approx(used)
    assert min(found.shares) > 0, "the test is too easy"
    tokens, slots = (sum(getattr(r, name) for r in reports) for name in ("real_tokens", "capacity_tokens"))
    audio, room = (
        sum(getattr(r, name) for r in reports) for name in ("audio_seconds", "audio_slots_seconds")
    )
    assert found.padding == pytest.approx(1 - tokens / slots)
    assert found.audio_padding == pytest.approx(1 - audio / room)
    done, useful = (WORK[0] * a + WORK[1] * 100 * b for a, b in ((slots, room), (tokens, audio)))
    assert found.overhead == pytest.approx(done / useful - 1)


def test_each_further_rung_saves_the_most():
    stream, settings = lengths_of(mixed()), config()
    outcome = simulate(stream, settings, WORK)
    first, second, *_ = ladders = compare_ladders(stream, outcome, WORK)
    assert [len(x.shares) for x in ladders] == [1, 2, 3, 4]
    assert first.overhead == pytest.approx(outcome.overhead)
    assert all(a.overhead > b.overhead for a, b in pairwise(ladders))
    needs = batch_needs(stream, outcome)
    for capacity, audio in combinations((0, 40, 80, 120, 160, 320, 640), 2):
        for sizes in ((capacity, audio), (audio, capacity)):
            rung = (min(sizes[0], 160), 7, sizes[1])
            other = replace(settings, data=replace(settings.data, rungs=(rung,)))
            if rung[0] and not errors(other):
                assert second.overhead <= ladder_cost(other, needs, WORK).overhead + 0.01
    assert all(not errors(x.config) for x in ladders)
    chosen = proposed(ladders)
    assert chosen in ladders[1:]


def errors(settings: Config) -> list[str]:
    found = findings(settings, DeviceFacts("cpu", 8, "cpu"))
    return [str(x) for x in found if not x.is_warning and "rungs" in x.found]


def test_one_size_is_proposed_where_all_buffers_are_alike():
    whole = np.zeros(40, np.int32), np.zeros(40, bool), np.ones(40, bool)
    stream = lengths_of([Document(str(i), *whole) for i in range(200)])
    ladders = compare_ladders(stream, simulate(stream, config(audio_capacity=0), WORK), WORK)
    assert proposed(ladders) == ladders[0]
