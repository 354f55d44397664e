"""What is counted at the start of a run, and when too many items of one set cannot be used."""

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, FilterConfig, ModelConfig
from jaxthd.data import inventory
from jaxthd.data.dataset import SpeechData
from jaxthd.data.inventory import Inventory, SetCount, TrainedOn, trained_on
from jaxthd.data.skipped import least_share
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.errors import StorageError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1.wav to 4.wav of as many half seconds."""
    noise = np.random.default_rng(0).normal(0, 0.1, 32000)
    for number in range(1, 5):
        soundfile.write(tmp_path / f"{number}.wav", noise[: number * 8000], 16000)
    return tmp_path


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def heard(name: str = "1.wav", **more: Any) -> dict[str, Any]:
    return {"audio_filepath": name, "text": "one", **more}


def config(*manifests: str, validation: str = "", **data: Any) -> Config:
    defaults: dict[str, Any] = {"workers": 0, "packing": "padded", "capacity": 64}
    return Config(
        data=DataConfig(manifest=manifests, validation_manifest=validation, **defaults | data),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )


def count_of(path: str, **more: Any) -> SetCount:
    source = open_source(SourceSetting(path))
    examples, skipped = read_source(source, DataConfig())
    return SetCount(source, examples, len(skipped), **more)


def test_items_hours_and_items_without_a_recording_are_said_for_every_set(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    lines = [heard("1.wav"), heard("2.wav", offset=0.25), heard("4.wav", duration=1.5), {"messages": chat}]
    training = write(folder / "train.jsonl", *lines, {"text": "no recording"})
    validation = write(folder / "dev.jsonl", heard("3.wav"))
    SpeechData(config(training, validation=validation, max_skipped_share=0.2), folder).close()
    said = capsys.readouterr().out
    assert f"{training} (training): 5 items (1 cannot be used), 0.00 hours, 1 without a recording" in said
    assert f"{validation} (validation): 1 items, 0.00 hours, 0 without a recording" in said
    kept = json.loads((folder / "inventory.json").read_text())
    # 0.5 s, 1 s from 0.25 s on, 1.5 s of 2 s.
    assert kept[training]["seconds"] == 0.5 + 0.75 + 1.5
    assert kept[training]["without_recording"] == 1
    assert kept[validation]["seconds"] == 1.5


def test_the_lengths_that_a_run_was_trained_on_are_kept(folder: Path) -> None:
    """Half of ten recordings are no longer than 1 s. A second count of the same
    files keeps them; a run from before `usual` was counted has the longest."""
    assert trained_on(folder) is None
    names = ["1.wav"] * 4 + ["2.wav"] + ["3.wav"] * 4 + ["4.wav"]
    path, kept = write(folder / "m.jsonl", *map(heard, names)), folder / "inventory.json"
    for _ in range(2):
        Inventory([count_of(path)], kept).count()
        assert trained_on(folder) == TrainedOn(longest=2.0, usual=1.0)
    stored = json.loads(kept.read_text())
    del stored[path]["usual"]
    kept.write_text(json.dumps(stored))
    assert trained_on(folder) == TrainedOn(2.0, 2.0)


def test_what_takes_too_long_is_said_and_counted_beside_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "BATCH", 1)
    count = count_of(write(folder / "m.jsonl", *[heard()] * 3))
    counted = Inventory([count], folder / "inventory.json")
    [line] = counted.count(seconds=0.0)
    assert "at least 0.00 hours" in line
    assert "3 of 3 recordings uncounted; the count goes on" in line
    news: list[str] = []
    until = time.monotonic() + 20
    while not news and time.monotonic() < until:
        news = counted.news()
        time.sleep(0.01)
    counted.close()
    assert count.is_complete
    assert [line.partition(": ")[2] for line in news] == [
        "3 items, 0.00 hours, 0 without a recording, 1 of 1 containers"
    ]
    assert count.seconds == 1.5
    assert json.loads((folder / "inventory.json").read_text())[count.source.title]["seconds"] == 1.5


def test_a_store_that_fails_ends_the_count_beside_the_run_with_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> float:
        raise StorageError("s3://bucket/1.wav does not answer")

    monkeypatch.setattr(inventory, "clip_seconds", fails)
    counted = Inventory([count_of(write(folder / "m.jsonl", heard()))], None)
    counted.count(seconds=0.0)
    assert counted._thread is not None
    counted._thread.join()
    assert counted.news() == ["the count of the data sets ended early: s3://bucket/1.wav does not answer"]


def test_hours_of_files_that_have_not_changed_are_not_counted_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder / "m.jsonl", heard("1.wav"), heard("4.wav"))
    first = count_of(path)
    Inventory([first], folder / "inventory.json").count()

    def refuse(*_: Any) -> float:
        raise AssertionError("a header was read")

    monkeypatch.setattr("jaxthd.data.audio.recordings.recording_length", refuse)
    again = count_of(path)
    Inventory([again], folder / "inventory.json").count()
    assert (again.text(), again.seconds) == (first.text(), 2.5)
    write(folder / "m.jsonl", heard("1.wav"), heard("4.wav"), heard("4.wav"))
    with pytest.raises(AssertionError, match="a header was read"):
        Inventory([count_of(path)], folder / "inventory.json").count()


def test_a_recording_that_is_not_there_is_named_also_where_hours_are_kept(folder: Path) -> None:
    path = write(folder / "m.jsonl", heard("1.wav", duration=0.5), heard("2.wav"))
    Inventory([count_of(path)], folder / "inventory.json").count()
    (folder / "1.wav").unlink()
    [line] = Inventory([count_of(path)], folder / "inventory.json").count()
    assert "1 items have recordings that cannot be read, 1:1.wav first" in line
    assert "no such file" in line


@pytest.mark.parametrize("workers", [0, 1])
def test_each_set_is_judged_by_itself_before_anything_is_trained(folder: Path, workers: int) -> None:
    """Half of what is drawn, 9% of the lines, on a disk that is not there."""
    there = write(folder / "there.jsonl", *[heard()] * 100)
    away = write(folder / "away.jsonl", *[heard("disk/1.wav", duration=0.5)] * 10)
    with pytest.raises(UserError, match=r"0\.1 of .*away\.jsonl .*cannot be used: 10 items of 10"):
        SpeechData(config(there, away, weights=(1.0, 1.0), workers=workers), folder)


def test_a_validation_set_that_cannot_be_read_ends_the_run_at_its_start(folder: Path) -> None:
    (folder / "broken.wav").write_bytes(b"RIFF" + bytes(40))
    validation = write(folder / "dev.jsonl", *[heard("broken.wav", duration=0.5)] * 3)
    with pytest.raises(UserError, match=r"dev\.jsonl \(data\.validation_manifest\) cannot be used: 3 items"):
        SpeechData(config(write(folder / "m.jsonl", heard()), validation=validation), folder)


def test_a_filter_that_drops_everything_is_named_before_a_batch_is_read(folder: Path) -> None:
    manifest = write(folder / "m.jsonl", *[heard()] * 20)
    with pytest.raises(UserError, match=r"data\.filter drops all 20 items .*seconds: at least 5 \(20\)"):
        SpeechData(config(manifest, filter=FilterConfig(seconds=(5.0, 0.0))), folder)


def documents_until_refused(data: SpeechData) -> Iterator[int]:
    with data.training() as loader:
        for batch in range(1, 1000):
            yield batch
            next(loader)
            data.require_few_skipped()


def test_what_was_read_decides_early(folder: Path) -> None:
    """30% too long for a buffer, which no header tells: refused after tens of items, not a third of them."""
    long = heard(text="x" * 100)
    manifest = write(folder / "m.jsonl", *([heard()] * 7 + [long] * 3) * 100)
    data = SpeechData(config(manifest), folder)
    batches = documents_until_refused(data)
    with pytest.raises(UserError, match=r"more than data\.max_skipped_share 0\.1 of .*m\.jsonl"):
        list(batches)
    assert 10 <= data.skipped.read_of(manifest) <= 100


def test_a_few_that_cannot_be_used_do_not_end_the_run(folder: Path) -> None:
    long = heard(text="x" * 100)
    manifest = write(folder / "m.jsonl", *([heard()] * 19 + [long]) * 20)
    data = SpeechData(config(manifest), folder)
    assert len(list(islice(documents_until_refused(data), 500))) == 500
    data.close()


@pytest.mark.parametrize(
    ("bad", "read", "at_least", "at_most"),
    [
        (0, 50, 0.0, 0.0),
        (1, 1, 0.0, 0.11),
        (10, 10, 0.5, 0.6),
        (18, 60, 0.15, 0.17),
        (300, 1000, 0.25, 0.3),
    ],
)
def test_a_sample_gives_a_lower_bound(bad: int, read: int, at_least: float, at_most: float) -> None:
    assert at_least <= least_share(bad, read, 6000, is_sample=True) <= at_most
    assert least_share(bad, read, 6000, is_sample=False) == bad / 6000
    assert least_share(bad, read, read, is_sample=True) == bad / read


def test_skipped_items_of_a_pass_that_counts_no_reads_are_read_items() -> None:
    assert least_share(10, 0, 6000, is_sample=True) == least_share(10, 10, 6000, is_sample=True) > 0.5
