"""A run that goes on with data that has grown or changed: which items its epochs have."""

import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.data.loader import Loader
from jaxthd.data.stream import Epochs, Era
from jaxthd.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(0, 0.1, 8000), 16000)
    return tmp_path


def lines(*names: str) -> str:
    return "".join(json.dumps({"audio_filepath": "a.wav", "text": name}) + "\n" for name in names)


def config(*manifests: Path, **data: Any) -> Config:
    defaults: dict[str, Any] = {"workers": 0, "capacity": 32, "packing_bins": 2, "rows": 2}
    return Config(
        data=DataConfig(manifest=tuple(map(str, manifests)), validation_manifest="", **defaults | data),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )


def take(loader: Loader, batches: int) -> list[str]:
    return [key for _, report in islice(loader, batches) for row in report.keys for key in row]


def position(settings: Config, workdir: Path, batches: int) -> tuple[list[str], dict[str, Any]]:
    with SpeechData(settings, workdir).training() as loader:
        keys = take(loader, batches)
        return keys, json.loads(json.dumps(loader.get_state()))


def go_on(settings: Config, workdir: Path, state: dict[str, Any], batches: int) -> list[str]:
    with SpeechData(settings, workdir).training() as loader:
        loader.set_state(state)
        return take(loader, batches)


FIRST = [f"w{n}" for n in range(20)]
MORE = [f"v{n}" for n in range(10)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ends", ["\n", ""])
def test_appended_lines_join_when_the_epoch_under_way_has_ended(
    folder: Path, workers: int, ends: str
) -> None:
    path = folder / "m.jsonl"
    path.write_text(lines(*FIRST).rstrip("\n") + ends)
    settings = config(path, workers=workers)
    before, state = position(settings, folder, 5)
    path.write_text(lines(*FIRST, *MORE))
    after = go_on(settings, folder, state, 60)
    keys = [int(key.partition(":")[0]) for key in before + after]
    # Epochs overlap a little where documents wait in open buffers; each item counts once in each epoch.
    old = Counter(key for key in keys if key <= 20)
    new = Counter(key for key in keys if key > 20)
    assert set(new) == set(range(21, 31))
    latest = max(state["latest"])
    assert max(old.values()) - min(old.values()) <= 1
    assert max(new.values()) - min(new.values()) <= 1
    assert latest <= max(old.values()) - max(new.values()) <= latest + 2
    assert not [key for key in keys[:15] if key > 20]


def test_a_position_after_growth_is_restored_and_grows_again(folder: Path) -> None:
    path, other = folder / "m.jsonl", folder / "n.jsonl"
    path.write_text(lines(*FIRST))
    other.write_text(lines(*MORE))
    settings = config(path, other)  # one source: items of the second set get other numbers
    _, state = position(settings, folder, 3)
    path.write_text(lines(*FIRST, *MORE))
    with SpeechData(settings, folder).training() as loader:
        loader.set_state(state)
        take(loader, 3)
        middle = json.loads(json.dumps(loader.get_state()))
        want = take(loader, 30)
    assert go_on(settings, folder, middle, 30) == want
    path.write_text(lines(*FIRST, *MORE, "x"))
    third = go_on(settings, folder, middle, 60)
    assert "31:a.wav" in third
    assert "1/10:a.wav" in third
    assert [len(each) for each in middle["eras"]] == [2]


@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_a_compressed_manifest_is_the_same_data(folder: Path, weights: tuple[float, ...]) -> None:
    path, other = folder / "m.jsonl", folder / "n.jsonl"
    path.write_text(lines(*FIRST))
    other.write_text(lines(*MORE))
    settings = config(path, other, weights=weights)
    with SpeechData(settings, folder).training() as loader:
        take(loader, 3)
        state, want = json.loads(json.dumps(loader.get_state())), take(loader, 10)
    packed = folder / "m.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert go_on(config(packed, other, weights=weights), folder, state, 10) == want


def test_other_changes_are_refused_unless_they_are_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "m.jsonl"
    path.write_text(lines(*FIRST))
    settings = config(path)
    _, state = position(settings, folder, 3)
    path.write_text(lines(*MORE, *FIRST))
    with pytest.raises(UserError, match=r"other content in data set 1 of 1.*--data\.accept-changes"):
        go_on(settings, folder, state, 1)
    after = go_on(config(path, accept_changes=True), folder, state, 12)
    first = max(state["latest"]) + 1
    assert f"epoch {first} begins with all that is there now" in capsys.readouterr().out
    assert {int(key.partition(":")[0]) for key in after} == set(range(1, 31))


def test_a_position_of_an_older_version_is_restored(folder: Path) -> None:
    path, other = folder / "m.jsonl", folder / "n.jsonl"
    path.write_text(lines(*FIRST))
    other.write_text(lines(*MORE))
    settings = config(path, other)
    with SpeechData(settings, folder).training() as loader:
        take(loader, 3)
        state, want = json.loads(json.dumps(loader.get_state())), take(loader, 10)
    older = {name: state[name] for name in ("identity", "streams")}
    assert go_on(settings, folder, older, 10) == want


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_epoch_has_each_item_once(seed: int | None, rows: int) -> None:
    epochs = Epochs([4, 9], seed)
    epochs.eras = [Era(0, (4, 5)), Era(2, (4, 7)), Era(3, (4, 9))]
    seen: dict[int, Counter[int]] = {}
    for row in range(rows):
        count = sum(len(range(row, n, rows)) for n in (9, 9, 11, 13, 13))
        for place in range(count):
            item, epoch = epochs.at(row, rows, place)
            seen.setdefault(epoch, Counter())[item] += 1
    assert {epoch: sorted(items.elements()) for epoch, items in seen.items()} == {
        epoch: list(range(n)) for epoch, n in enumerate((9, 9, 11, 13, 13))
    }
