"""Manifests of Lhotse cuts: read as lhotse reads what it wrote; the rest is listed with the reason."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Alternative, Channels, Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.cuts import CutSource
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import Containers, SourceSetting
from jaxthd.errors import UserError
from tests.data.sets import sound

WRITTEN = Path(__file__).parents[1] / "references" / "cuts"
"""By tests/references/cuts.py."""


def read(path: Path) -> tuple[list[Example], list[Skipped]]:
    source = open_source(SourceSetting(str(path)))
    assert isinstance(source, CutSource)
    return source.read(DataConfig(prompt="Say: {audio}"))


def clip_of(example: Example) -> Clip:
    (clip,) = example.clips
    assert isinstance(clip, Clip)
    return clip


def test_cuts_that_lhotse_wrote_are_read_as_lhotse_reads_them():
    examples, skipped = read(WRITTEN / "cuts.jsonl.gz")
    expected = np.load(WRITTEN / "expected.npz")
    assert [e.key for e in examples] == ["1:range", "2:two.words", "3:second", "4:both"]
    assert [e.text for e in examples] == ["one", "one two", "right", "both"]
    assert [e.turns[0].parts[0] for e in examples] == ["What is said? ", *["Say: "] * 3]
    for example in examples:
        clip, wave = clip_of(example), expected[f"{example.key.partition(':')[2]}.audio"]
        samples = load_audio(clip.path, clip.offset, clip.duration, channels=clip.channels)
        np.testing.assert_array_equal(samples, wave.mean(axis=0))
    reasons = [item.reason.partition(";")[0] for item in skipped]
    assert reasons[0] == "transforms is [{'kwargs': {'factor': 1.1}, 'name': 'Speed'}]"
    assert reasons[1:] == ["type is 'MixedCut'"] * 2 + ["supervisions is []"]


SOURCE = {"type": "file", "channels": [0], "source": "a.wav"}


def cut(*sources: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """As lhotse writes it. A field that is ... is left out."""
    spoken = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 0.5, "text": "one"}
    whole = {"id": "a", "start": 0.0, "duration": 0.5, "channel": 0, "supervisions": [spoken]}
    whole |= {"recording": {"id": "r", "sources": list(sources or [SOURCE])}, "type": "MonoCut"} | fields
    return {name: value for name, value in whole.items() if value is not ...}


def write(path: Path, *cuts: Any) -> Path:
    path.write_bytes(b"".join(c if isinstance(c, bytes) else json.dumps(c).encode() + b"\n" for c in cuts))
    return path


def spoken(start: float, duration: float, text: str | None = "x") -> dict[str, Any]:
    return {"id": "s", "recording_id": "r", "start": start, "duration": duration, "text": text}


OTHER = {"type": "file", "channels": [1], "source": "b.wav"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (cut({**SOURCE, "type": "command"}), "its recording is of type 'command'; expected file"),
        (cut({**SOURCE, "type": "url"}), "its recording is of type 'url'"),
        (cut({**SOURCE, "source": ""}), "source is empty"),
        (cut(SOURCE, OTHER, channel=[0, 1], type="MultiCut"), "channel is [0, 1] of 2 files"),
        (cut(SOURCE, OTHER, channel=...), "channel is None of 2 files"),
        (cut(channel=2), "channel is 2; expected channels of its recording, [0]"),
        (cut(recording=None, features={"type": "fbank"}), "the cut has features alone"),
        (cut(recording=...), "the cut has no recording"),
        (cut(recording={"sources": []}), "sources is []"),
        (cut(type="PaddingCut"), "type is 'PaddingCut'"),
        (cut(duration=0), "duration is 0.0"),
        (cut(start=-1), "start is -1"),
        (cut(custom={"_skipme": True}), "_skipme is set"),
        (cut(recording=None, custom={"wav": "a.wav"}), "the cut has no recording, but custom.wav"),
        (cut(custom={"context": "<audio> or <audio>", "system_prompt": "<sound>"}), "a text holds <sound>"),
        (
            cut(supervisions=[spoken(0.5, 0.2)]),
            "a supervision lies from 0.5 s to 0.7 s, outside of the cut, which",
        ),
        (
            cut(supervisions=[spoken(0.1, 0.2), spoken(9, 1)]),
            "a supervision lies from 9 s to 10 s, outside of",
        ),
        (cut(supervisions=[spoken(-1, 1.0)]), "a supervision lies from -1 s to 0 s, outside of the cut"),
        (cut(supervisions=[spoken(10**400, 1)]), "start of a supervision is 1000"),
        (b'{"id": \n', "not JSON"),
    ],
)
def test_what_is_not_read_is_listed(tmp_path: Path, line: Any, reason: str):
    examples, skipped = read(write(tmp_path / "cuts.jsonl", line, cut(id="b")))
    assert [e.key for e in examples] == ["2:b"]
    assert skipped[0].reason.startswith(reason)


def test_the_file_that_holds_a_cuts_channels_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    several = {"type": "file", "channels": [1, 2], "source": "/c.wav"}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here.wav").write_bytes(sound(0.5))
    here = cut({"type": "file", "channels": [0], "source": "here.wav"}, id="d")
    lines = cut(SOURCE, OTHER, channel=1), cut(SOURCE, several, channel=2, id="b"), here
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "elsewhere" / "cuts.jsonl", *lines)
    examples, _ = read(path)
    assert [clip_of(e).path for e in examples] == [path.parent / "b.wav", Path("/c.wav"), Path("here.wav")]
    assert [clip_of(e).channels for e in examples] == [None, Channels((1,), 2), None]


def test_preferences_come_from_custom(tmp_path: Path):
    line = cut(custom={"chosen": "a", "rejected": "b", "context": "Well?"}, supervisions=[])
    (example,), _ = read(write(tmp_path / "cuts.jsonl", line))
    assert example.alternatives == (Alternative("a", 1.0), Alternative("b", -1.0))


def test_cuts_are_told_from_lines_of_a_manifest(tmp_path: Path):
    lines = b'\n{"id"\n', cut()
    assert isinstance(open_source(SourceSetting(str(write(tmp_path / "x.jsonl", *lines)))), CutSource)
    plain = {"audio_filepath": "a.wav", "text": "x"}
    for name, first in (("cuts.jsonl", plain), ("none.jsonl", b""), ("cuts.jsonl.gz", b"\x1f\x8bx")):
        path = write(tmp_path / name, first)
        assert isinstance(open_source(SourceSetting(str(path))), ManifestSource)
    path = write(tmp_path / "x.jsonl", *lines)
    tarred = open_source(SourceSetting(str(path), tarred_audio="a.tar"))
    with pytest.raises(UserError, match=r"is of cuts, and .* its tar files"):
        tarred.read(DataConfig())
    with pytest.raises(FileNotFoundError, match="no manifest at "):
        open_source(SourceSetting(f"cuts:{tmp_path}/none/cuts.jsonl")).read(DataConfig())


def test_containers_of_cuts_are_counted_and_must_be_whole(tmp_path: Path):
    for n in range(2):
        write(tmp_path / f"cuts-{n}-of-3.jsonl", cut())
    source = open_source(SourceSetting(f"{tmp_path}/cuts-{{0..1}}-of-3.jsonl"))
    assert isinstance(source, CutSource)
    note = "2 of the 3 parts that cuts-0-of-3.jsonl's name counts"
    assert source.containers() == Containers(3, 2, (note,))
    assert source.files() == [tmp_path / "cuts-0-of-3.jsonl", tmp_path / "cuts-1-of-3.jsonl"]
    write(tmp_path / "cuts-1-of-3.jsonl", cut(), json.dumps(cut()).encode()[:-9])
    with pytest.raises(UserError, match=r"cuts-1-of-3\.jsonl, line 2: the file ends within a line"):
        source.read(DataConfig())
    (tmp_path / "cuts-1-of-3.jsonl").unlink()
    for read_it in (source.containers, lambda: source.read(DataConfig())):
        with pytest.raises(FileNotFoundError, match=r"no manifest at .*cuts-1-of-3\.jsonl"):
            read_it()


def test_a_line_that_is_nested_too_deep_for_a_worker_is_listed(tmp_path: Path):
    nested = json.dumps(cut(x="@")).encode().replace(b'"@"', b"[" * 400 + b"]" * 400)
    examples, skipped = read(write(tmp_path / "cuts.jsonl", cut(id="b"), nested + b"\n"))
    assert [e.key for e in examples] == ["1:b"]
    assert "nested more than 100 deep" in skipped[0].reason


def test_a_supervision_that_lies_partly_inside_or_has_no_text_is_no_matter(tmp_path: Path):
    partly = [spoken(-1, 1.2, "one"), spoken(0.4, 3, "two"), spoken(7, 1, None), spoken(8, 1, " ")]
    (example,), _ = read(write(tmp_path / "cuts.jsonl", cut(supervisions=partly)))
    assert example.text == "one two"


def test_other_recordings_of_a_cut_are_counted_and_its_own_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/home/x")
    target = {"id": "t", "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": 16000}
    custom = {"target_audio": target, "noise": "n.wav", "snr": 5.0, "lang": "en"}
    path = write(tmp_path / "cuts.jsonl", cut({**SOURCE, "source": "~/a.wav"}, custom=custom))
    source = open_source(SourceSetting(str(path)))
    (example,), skipped = source.read(DataConfig())
    assert (clip_of(example).path, skipped) == (Path("/home/x/a.wav"), [])
    assert source.unread_recordings == {"custom.target_audio": 1, "custom.noise": 1}
