"""The fuzzer of scripts/fuzz_data.py at a size a test can afford; and that it would notice."""

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.data.workers import Workers
from tests.fuzz import checks
from tests.fuzz.checks import CONFIG, Outcome, Written, check, run
from tests.fuzz.data import KINDS, fuzz
from tests.fuzz.lines import UTTERANCE
from tests.fuzz.ranges import Recording, wrong
from tests.fuzz.recordings import make_recordings

LOAD = SpeechDocuments(CONFIG, ByteTokenizer(), train=True)
SETTING = SourceSetting("m.jsonl")


def test_damaged_data_is_trained_on_or_listed_and_the_seed_decides_all(tmp_path: Path):
    workers = Workers(1)
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        outcomes = fuzz(tmp_path / name, 10 * len(KINDS), 7, workers if name == "here" else 0)
        assert [text for outcome in outcomes.values() for text in outcome.violations] == []
        files = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.jsonl")}
        counts = {k: (o.inputs, o.written, o.trained, o.listed, o.refused) for k, o in outcomes.items()}
        found.append((files, counts))
    workers.close()
    assert found[0] == found[1]
    assert all(counts[0] == 10 for counts in found[0][1].values())
    assert all(trained for _, _, trained, _, _ in found[0][1].values())
    assert all(written == sum(became) for _, written, *became in found[0][1].values())
    assert sum(listed for _, _, _, listed, _ in found[0][1].values()) > 20


def checked(folder: Path, load: Any, workers: Workers | int = 0) -> list[str]:
    make_recordings(folder)
    manifest = folder / "m.jsonl"
    manifest.write_text(json.dumps(UTTERANCE) + "\n")
    outcome = Outcome()
    check(Written(SourceSetting(str(manifest)), {1: "s16.wav"}), load, workers, outcome)
    return outcome.violations


def raises(example: Example, epoch: int) -> Any:
    raise KeyError("defect")


def misnames(example: Example, epoch: int) -> Any:
    return Skipped("7:", "it went wrong")


def not_finite(example: Example, epoch: int) -> Any:
    made = LOAD(example, epoch)
    assert not isinstance(made, Skipped)
    pieces = (piece._replace(features=np.full_like(piece.features, np.nan)) for piece in made.pieces)
    return replace(made, pieces=tuple(pieces))


@pytest.mark.parametrize(
    ("load", "violation"),
    [
        (raises, "KeyError: 'defect'"),
        (misnames, "listed ['7:']; written {1: 's16.wav'}"),
        (not_finite, "not finite"),
    ],
)
def test_a_defect_is_a_violation(tmp_path: Path, load: Any, violation: str):
    (found,) = checked(tmp_path, load)
    assert violation in found


def test_an_item_that_does_not_end_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "endless.py").write_text("import time\n\ndef load(example, epoch):\n    time.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    workers = Workers(1, 0.2)
    (found,) = checked(tmp_path, importlib.import_module("endless").load, workers)
    workers.close()
    assert "worker process died" in found


def test_a_manifest_that_takes_too_long_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "ITEM_SECONDS", 0.1)
    monkeypatch.setattr(ManifestSource, "read", lambda *_: time.sleep(60))
    (found,) = checked(tmp_path, LOAD)
    assert "TimeoutError: no end after 0.1 s" in found


def test_other_samples_and_a_lost_end_are_violations(tmp_path: Path):
    recording = Recording(np.random.default_rng(9), tmp_path / "a")
    assert not recording.lost
    assert list(wrong(np.random.default_rng(0), recording)) == []
    recording.whole = recording.whole + 1e-3
    assert "other samples than in one decode" in next(wrong(np.random.default_rng(0), recording))
    recording.seconds += 1.0
    recording.lost = True
    assert "gives" in next(wrong(np.random.default_rng(0), recording))


@pytest.mark.parametrize(
    ("written", "violation"),
    [
        (Written(SETTING, {1: "b.wav"}), "1:s16.wav was written as b.wav"),
        (Written(SETTING, {1: "", 2: ""}), "written {1: '', 2: ''}"),
        (Written(SETTING, {1: ""}, stops=True), "the run goes on"),
        (Written(SETTING, {1: ""}, heard={1: 2}), "with 1 recordings, 2 were written"),
        (Written(SETTING, {1: ""}, lost=frozenset({1})), "listed [], damaged [1]"),
    ],
)
def test_what_differs_from_what_was_written_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Written, violation: str
):
    monkeypatch.chdir(tmp_path)
    make_recordings(tmp_path)
    (tmp_path / SETTING.path).write_text(json.dumps(UTTERANCE) + "\n")
    outcome = Outcome()
    check(written, LOAD, 0, outcome)
    (found,) = outcome.violations
    assert violation in found


def test_a_sound_data_set_that_is_refused_is_a_violation(tmp_path: Path):
    outcome = Outcome()
    check(Written(SourceSetting(str(tmp_path / "gone.jsonl")), {1: ""}, stops=False), LOAD, 0, outcome)
    assert "no manifest at" in outcome.violations[0]
    check(Written(SourceSetting(str(tmp_path / "gone.jsonl")), {1: ""}, stops=True), LOAD, 0, outcome)
    assert len(outcome.violations) == 1


@pytest.mark.nightly
def test_twenty_thousand_inputs_have_no_violation() -> None:
    with pytest.raises(SystemExit) as ended:
        run(fuzz, 20_000, 0)
    assert not ended.value.code
