"""scripts/fuzz_data.py at a size a test can afford; and that it would notice."""

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
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.data.workers import Workers
from scripts import fuzz_data
from scripts.fuzz_data import CONFIG, UTTERANCE, Outcome, check, fuzz, make_recordings

LOAD = SpeechDocuments(CONFIG, ByteTokenizer(), train=True)


def test_damaged_data_is_trained_on_or_listed_and_the_seed_decides_all(tmp_path: Path):
    workers = Workers(1)
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        outcomes = fuzz(tmp_path / name, 110, 7, workers if name == "here" else 0)
        assert [text for outcome in outcomes.values() for text in outcome.violations] == []
        files = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.jsonl")}
        counts = {k: (o.inputs, o.lines, o.documents, o.listed, o.refused) for k, o in outcomes.items()}
        found.append((files, counts))
    workers.close()
    assert found[0] == found[1]
    assert all(counts[0] == 10 for counts in found[0][1].values())
    assert all(documents for _, _, documents, _, _ in found[0][1].values())
    assert sum(listed for _, _, _, listed, _ in found[0][1].values()) > 20


def checked(folder: Path, load: Any, workers: Workers | int = 0) -> list[str]:
    make_recordings(folder)
    manifest = folder / "m.jsonl"
    manifest.write_text(json.dumps(UTTERANCE) + "\n")
    outcome = Outcome()
    check(manifest, load, workers, outcome)
    return outcome.violations


def raises(example: Example, epoch: int) -> Any:
    raise KeyError("defect")


def misnames(example: Example, epoch: int) -> Any:
    return Skipped("7:", "it went wrong")


def not_finite(example: Example, epoch: int) -> Any:
    made = LOAD(example, epoch)
    assert not isinstance(made, Skipped)
    return replace(made, chunks=tuple(np.full_like(chunk, np.nan) for chunk in made.chunks))


@pytest.mark.parametrize(
    ("load", "violation"),
    [(raises, "KeyError: 'defect'"), (misnames, "lines ['1', '7'] are neither"), (not_finite, "not finite")],
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
    monkeypatch.setattr(fuzz_data, "ITEM_SECONDS", 0.1)
    monkeypatch.setattr(ManifestSource, "read", lambda *_: time.sleep(60))
    (found,) = checked(tmp_path, LOAD)
    assert "TimeoutError: no end after 0.1 s" in found
