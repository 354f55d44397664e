"""Data sources: jaxthd's are found by name or by recognition; a user's is one class and one line."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxthd
from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.data.example import Clip, Example, Samples, Turn, utterance
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.registry import SOURCES, open_source, read_source
from jaxthd.data.sources.shar import SharSource
from jaxthd.data.sources.source import Source, SourceSetting
from jaxthd.errors import UserError


class Beeps(Source):
    """ "beeps:COUNT", or a path that ends in .beeps and holds the count: noise in memory; item 2 has none."""

    @staticmethod
    def recognises(path: str) -> bool:
        return path.endswith(".beeps")

    @property
    def count(self) -> int:
        return int(self.path if self.path.isdigit() else Path(self.path).read_text())

    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        examples, skipped = [], []
        for n in range(self.count):
            noise = np.random.default_rng(n).normal(0, 0.1, 1600 + 160 * n).astype(np.float32)
            turns = utterance(Samples(noise, 16_000), "one " * n + "two", data.prompt, data.audio_placeholder)
            if n == 2:
                skipped.append(Skipped(f"{n}:beep/{n}", "it is silent"))
            else:
                examples.append(Example(f"{n}:beep/{n}", turns))
        return examples, skipped

    def digest(self) -> str:
        return f"{self.count} beeps"


@pytest.fixture(autouse=True)
def beeps():
    jaxthd.register_source("beeps", Beeps)
    yield
    del SOURCES["beeps"]


def config(*manifest: str, **data: Any) -> Config:
    defaults = {"validation_manifest": "", "workers": 0, "packing": "padded", "capacity": 64}
    return Config(
        data=DataConfig(manifest=manifest, **{**defaults, "max_skipped_share": 1.0, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )


def read(loader: Any, batches: int) -> list[tuple[str, float]]:
    """(key, seconds of audio) of the documents of the next batches, one a row."""
    return [(report.keys[0][0], report.audio_seconds) for _, report in islice(loader, batches)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_defined_outside_is_read_packed_and_resumed(tmp_path: Path, workers: int):
    (tmp_path / "five.beeps").write_text("5")
    sets = config("beeps:4", str(tmp_path / "five.beeps"), workers=workers)
    data = SpeechData(sets, tmp_path)
    with data.training() as loader:
        first = read(loader, 7)
        position = json.loads(json.dumps(loader.get_state()))
        rest = read(loader, 4)
    data.close()
    seconds = {f"{n}:beep/{n}": 0.1 + n / 100 for n in range(5) if n != 2}
    want = {key: s for key, s in seconds.items() if key[0] != "4"} | {f"1/{k}": s for k, s in seconds.items()}
    assert dict(first) == pytest.approx(want)
    assert len(first) == 7
    listed = [json.loads(line) for line in data.skipped.path.read_text().splitlines()]
    assert listed == [
        {"manifest": title, "key": "2:beep/2", "reason": "it is silent"}
        for title in ("beeps:4", f"{tmp_path}/five.beeps")
    ]
    again = SpeechData(sets, tmp_path)
    with again.training() as loader:
        loader.set_state(position)
        assert read(loader, 4) == rest
    again.close()
    other = SpeechData(config("beeps:4", "beeps:6"), tmp_path)
    with (
        other.training() as loader,
        pytest.raises(UserError, match=r"manifest: other content in data set 2 of 2"),
    ):
        loader.set_state(position)


def test_a_validation_set_may_be_of_any_source(tmp_path: Path):
    data = SpeechData(config("beeps:2", validation_manifest=("a=beeps:4", "beeps:1")), tmp_path)
    with data.validation(name="a") as loader:
        assert [key for key, _ in read(loader, 9)] == ["0:beep/0", "1:beep/1", "3:beep/3"]
    assert data.is_skipped("2:beep/2", "a")
    assert [x.key for x in data.validation_examples("beeps-1")] == ["0:beep/0"]


def test_sources_are_found_by_name_or_by_what_they_recognise(tmp_path: Path):
    def kind(path: str) -> type[Source]:
        return type(open_source(SourceSetting(path)))

    (tmp_path / "a.beeps").touch()
    assert kind(f"{tmp_path}/a.beeps") is Beeps
    assert kind(f"{tmp_path}/a.jsonl") is kind(f"manifest:{tmp_path}/a.beeps") is ManifestSource
    assert kind(str(tmp_path)) is kind("shar:anywhere") is SharSource
    assert open_source(SourceSetting("shar:anywhere")).path == "anywhere"
    (tmp_path / "beep:1").touch()
    assert kind(str(tmp_path / "beep:1")) is ManifestSource
    with pytest.raises(UserError, match=r"'beep' no registered data source.*beeps"):
        kind("beep:1")
    with pytest.raises(ValueError, match="a data source of the name 'be:eps'"):
        jaxthd.register_source("be:eps", Beeps)


def test_what_a_source_gives_is_checked():
    class Wrong(Beeps):
        def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
            keys = {"none": [], "bare": ["a.wav"], "good": ["7:a.wav"]}[self.path]
            return [Example(key, (Turn("assistant", ("x",)),)) for key in keys], []

    def found(path: str, number: int) -> list[str]:
        return [x.key for x in read_source(Wrong(SourceSetting(path)), DataConfig(), number)[0]]

    with pytest.raises(UserError, match="none holds nothing that can be used"):
        found("none", 0)
    with pytest.raises(UserError, match="item of bare the key 'a"):
        found("bare", 0)
    assert found("good", 0) == ["7:a.wav"]
    assert found("good", 2) == ["2/7:a.wav"]


def test_a_path_that_exists_needs_no_name_of_a_source_and_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    line = json.dumps({"audio_filepath": "~/a.wav", "text": "one"}) + "\n"
    for name in ("shar:m.jsonl", "x:m.jsonl", "home/m.jsonl"):
        Path(name).write_text(line)
    for path in ("shar:m.jsonl", "x:m.jsonl", "~/m.jsonl", "manifest:~/m.jsonl"):
        source = open_source(SourceSetting(path))
        assert isinstance(source, ManifestSource)
        (example,), _ = source.read(DataConfig())
        assert example.clips == [Clip(tmp_path / "home" / "a.wav")], path
    (tmp_path / "home" / "~").mkdir()
    (tmp_path / "home" / "~" / "a.wav").touch()
    (example,), _ = open_source(SourceSetting("home/m.jsonl")).read(DataConfig())
    assert example.clips == [Clip(Path("home/~/a.wav"))]
    with pytest.raises(UserError, match="no registered data source"):
        open_source(SourceSetting("y:m.jsonl"))


def test_a_validation_set_that_exists_needs_no_name_before_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "lang=de.jsonl"
    path.touch()
    for manifest in (str(path), "~/lang=de.jsonl"):
        (found,) = DataConfig(validation_manifest=manifest).validation_sets
        assert tuple(found) == ("lang-de", manifest, "", False)
    (found,) = DataConfig(validation_manifest="lang=de.jsonl").validation_sets
    assert tuple(found) == ("lang", "de.jsonl", "", True)
