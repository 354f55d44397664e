"""The fuzzer of scripts/fuzz_sources.py at a size a test can afford; and that it would notice."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.huggingface import HuggingFaceSource
from jaxthd.data.sources.source import SourceSetting
from tests.fuzz.checks import Outcome, Written, check, run
from tests.fuzz.recordings import make_recordings
from tests.fuzz.sets import write_table
from tests.fuzz.sources import KINDS, fuzz


def test_damaged_sources_are_trained_on_or_listed_and_the_seed_decides_all(tmp_path: Path):
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        outcomes = fuzz(tmp_path / name, 5 * len(KINDS), 3, 0)
        assert [text for outcome in outcomes.values() for text in outcome.violations] == []
        found.append({k: (o.inputs, o.written, o.trained, o.listed, o.refused) for k, o in outcomes.items()})
    assert found[0] == found[1]
    assert all(counts[0] == 5 for counts in found[0].values())
    assert sum(counts[2] for counts in found[0].values()) > 10
    assert sum(counts[3] for counts in found[0].values()) > 10


def misnames(example: Example, epoch: int) -> Any:
    return Skipped("7:", "it went wrong")


def test_a_defect_is_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import numpy as np
    import pyarrow

    make_recordings(tmp_path)
    path, outcome = tmp_path / "t.parquet", Outcome()
    write_table(
        np.random.default_rng(0), path, pyarrow.Table.from_pylist([{"audio": "s16.wav", "text": "a"}])
    )
    written = Written(SourceSetting(str(path)), {1: ""})
    check(written, misnames, 0, outcome)
    assert "listed ['7:']; written {1: ''}" in outcome.violations.pop()
    monkeypatch.setattr(HuggingFaceSource, "read", lambda *_: 1 / 0)
    check(written, misnames, 0, outcome)
    assert "ZeroDivisionError" in outcome.violations.pop()


@pytest.mark.nightly
def test_twenty_thousand_inputs_have_no_violation() -> None:
    with pytest.raises(SystemExit) as ended:
        run(fuzz, 20_000, 0)
    assert not ended.value.code
