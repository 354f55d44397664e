"""A ladder changes the size of buffers, and nothing of what they hold."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import Config
from jaxthd.data import dataset
from jaxthd.data.dataset import SynchronizedLoader, whole_position
from jaxthd.data.loader import Loader, make_loader
from jaxthd.data.skipped import SkipLog
from jaxthd.packing.document import encoder_frames
from tests.data.items import BROKEN, LONG, LOUD, SOURCE, load, quiet
from tests.data.test_loader import settings
from tests.packing.test_pack import supervision

RUNGS = ((72, 5, 512), (104, 3, 480), (88, 5, 456))
"""Beside 128, 5, 512: each holds what another one does not."""
LENGTHS = {
    document.key: (len(document), sum(8 * encoder_frames(len(chunk)) for chunk in document.chunks))
    for document in (load(i, 0) for i in SOURCE if i not in (BROKEN, LONG, LOUD))
}
"""Tokens and mel frames of each item."""


def with_rungs(config: Config, rungs: tuple[tuple[int, int, int], ...] = RUNGS) -> Config:
    return replace(config, data=replace(config.data, rungs=rungs))


def loader_of(config: Config, **options: Any) -> Loader:
    return make_loader([SOURCE], load, config, on_skip=quiet, ladder=True, **options)


def needed(keys: tuple[str, ...]) -> np.ndarray:
    """Slots, documents and mel frames of a row on one rank."""
    tokens, frames = np.array([LENGTHS[key] for key in keys], int).reshape(-1, 2).sum(0)
    return np.array([tokens, len(keys), frames])


def test_a_batch_takes_the_first_rung_that_holds_all_of_its_rows():
    config = with_rungs(settings(rows=2))
    plain = make_loader([SOURCE], load, config, on_skip=quiet)
    used = set()
    for (batch, report), (whole, top) in islice(zip(loader_of(config), plain, strict=False), 40):
        assert report.keys == top.keys, "the ladder does not change what is packed"
        sizes = np.array([*RUNGS, (128, 5, 512)])
        holding = [all((needed(keys) <= size).all() for keys in report.keys) for size in sizes]
        assert report.rung == holding.index(True)
        capacity, _, frames = sizes[report.rung]
        assert (batch.tokens.shape[1], batch.mels.shape[1]) == (capacity, frames)
        assert report.capacity_tokens == 2 * capacity
        assert report.audio_slots_seconds == pytest.approx(2 * frames / 100)
        assert (report.real_tokens, report.audio_seconds) == (top.real_tokens, top.audio_seconds)
        for row, keys in enumerate(report.keys):
            of_row = itemgetter(slice(row, row + 1))
            ours, theirs = (supervision(jax.tree.map(of_row, each), keys) for each in (batch, whole))
            assert ours == theirs
        used.add(report.rung)
    assert used == {0, 1, 2, 3}, "the test is too easy"


@pytest.mark.parametrize("layout", ["buffer", "whole"])
def test_a_rung_is_chosen_for_the_ranks(layout: str):
    """On 2 context ranks, documents must fit a rung's shares."""
    config = settings(2, rows=2, layout=layout, round_to=4, audio_capacity=416)
    config = with_rungs(config, ((72, 5, 416), (88, 5, 416)))
    used = set()
    for batch, report in islice(loader_of(config), 40):
        used.add(report.rung)
        assert batch.tokens.shape[1] == (72, 88, 128)[report.rung]
        assert report.real_tokens == (batch.segment_ids > 0).sum()
    assert used == {0, 1, 2}


@pytest.mark.parametrize(("first", "second"), [("whole", "buffer"), ("buffer", "whole"), ("whole", "whole")])
def test_two_rows_on_a_ladder_go_on_under_another_layout_with_the_documents_that_are_left(first, second):
    """Interrupted at each batch of one epoch. Nothing is read twice, nothing is lost."""

    def loader(layout: str) -> Loader:
        config = settings(2, rows=2, layout=layout, round_to=4, audio_capacity=416)
        rungs = ((72, 5, 416), (88, 5, 416))
        return loader_of(with_rungs(config, rungs), repeat=False)

    def keys(batches: Any) -> list[str]:
        return [key for _, report in batches for row in report.keys for key in row]

    whole = keys(loader(first))
    for count in range(1, 12, 2):
        before, after = loader(first), loader(second)
        seen = keys(islice(before, count))
        after.set_state(json.loads(json.dumps(before.get_state())))
        rest = keys(after)
        assert Counter(seen + rest) == Counter(whole)
        if first == second:
            assert seen + rest == whole


def test_a_stream_goes_on_under_another_ladder():
    config = settings(rows=2)
    loader = loader_of(with_rungs(config))
    list(islice(loader, 7))
    state, expected = json.loads(json.dumps(loader.get_state())), list(islice(loader, 5))
    for rungs in (RUNGS, (), ((96, 4, 480),)):
        restored = loader_of(with_rungs(config, rungs))
        restored.set_state(state)
        found = list(islice(restored, 5))
        assert [report.keys for _, report in found] == [report.keys for _, report in expected]
        if rungs == RUNGS:
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("repeat", [False, True])
def test_all_processes_take_the_same_rung(repeat: bool, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Two processes with a row each, in threads, against one with both: also where each row by itself has a
    rung that does not hold the other's, and where one process has no row left."""
    config, barrier, given = with_rungs(settings(rows=2)), threading.Barrier(2, timeout=60), {}
    own = threading.local()

    def exchange(value: Any) -> list[Any]:
        if not hasattr(own, "number"):
            return [value]
        given[own.number] = json.dumps(value)
        barrier.wait()
        found = [json.loads(given[number]) for number in range(2)]
        barrier.wait()
        return found

    monkeypatch.setattr(dataset, "exchange", exchange)

    def read(rows: list[int]) -> tuple[list[Any], dict[str, Any]]:
        skipped = SkipLog(tmp_path / f"skipped{rows}.jsonl", writes=False)
        loader = SynchronizedLoader(loader_of(config, rows=rows, repeat=repeat), skipped)
        return list(islice(loader, 60)), whole_position(loader.get_state())

    def process(number: int) -> tuple[list[Any], dict[str, Any]]:
        own.number = number
        return read([number])

    expected, position = read([0, 1])
    with ThreadPoolExecutor(2) as threads:
        (first, there), (second, _) = threads.map(process, range(2))
    assert there == position
    repacked = crossed = 0
    for (batch, report), (left, of_left), (right, of_right) in zip(expected, first, second, strict=True):
        assert of_left.rung == of_right.rung == report.rung
        assert of_left.rows == of_right.rows == report.rows
        for whole, *parts in zip(*map(jax.tree.leaves, (batch, left, right)), strict=True):
            np.testing.assert_array_equal(whole, np.concatenate(parts))
        alone = [rung_alone(keys) for keys in report.keys]
        repacked, crossed = repacked + (len({*alone}) > 1), crossed + (report.rung > max(alone))
    assert repacked, "the test is too easy"
    assert crossed or not repeat, "the test is too easy"


def rung_alone(keys: tuple[str, ...]) -> int:
    return next((n for n, size in enumerate(RUNGS) if (needed(keys) <= size).all()), len(RUNGS))
