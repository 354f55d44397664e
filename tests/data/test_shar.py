"""Lhotse Shar directories: read as lhotse reads what it wrote; what is wrong in one is skipped or refused."""

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Channels, Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.shar import SharSource
from jaxthd.data.sources.source import Containers, SourceSetting
from jaxthd.errors import UserError
from tests.data.sets import add, sound, write_tar

WRITTEN = Path(__file__).parents[1] / "references" / "shar"
"""By tests/references/shar.py."""


def read_shar(
    folder: Path, setting: str = "data.manifest", prompt: str = "{audio}"
) -> tuple[list[Example], list[Skipped]]:
    return SharSource(SourceSetting(str(folder), setting)).read(DataConfig(prompt=prompt))


def said(example: Example) -> list[tuple[str, list[str]]]:
    return [(t.role, ["<clip>" if isinstance(p, Clip) else p for p in t.parts]) for t in example.turns]


def test_a_directory_that_lhotse_wrote_is_read_as_lhotse_reads_it():
    examples, skipped = read_shar(WRITTEN, prompt="Say: {audio}")
    expected = np.load(WRITTEN / "expected.npz")
    assert [e.key for e in examples] == ["1:range", "2:two.words", "3:second", "4:a/both"]
    assert [said(e) for e in examples] == [
        [("system", ["Listen."]), ("user", ["What is said? ", "<clip>"]), ("assistant", ["one"])],
        [("user", ["Say: ", "<clip>"]), ("assistant", ["one two"])],
        [("user", ["Say: ", "<clip>"]), ("assistant", ["right"])],
        [("user", ["Hear this: ", "<clip>"]), ("assistant", ["both"])],
    ]
    for example in examples:
        name = example.key.partition(":")[2]
        assert example.text == " ".join(expected[f"{name}.texts"])
        (clip,) = example.clips
        wave = expected[f"{name}.audio"]
        assert clip.duration == wave.shape[1] / 16_000
        samples = load_audio(
            clip.path, clip.offset, clip.duration, member=clip.member, channels=clip.channels
        )
        np.testing.assert_array_equal(samples, wave.mean(axis=0))
    assert [(f.key, f.reason) for f in skipped] == [
        ("5:silent", "cuts.000001.jsonl.gz line 2: text is empty; expected a transcript"),
        ("6:nothing", "cuts.000001.jsonl.gz line 3: the cut has no recording"),
    ]


def cut(name: str = "a", **fields: Any) -> dict[str, Any]:
    """As lhotse writes it. A field that is ... is left out."""
    recording = {"id": "r", "sources": [{"type": "shar", "channels": [0], "source": ""}], "channel_ids": [0]}
    supervision = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 0.5, "text": "one"}
    whole = {"id": name, "start": 0.0, "duration": 0.5, "channel": 0, "supervisions": [supervision]}
    whole |= {"recording": recording, "type": "MonoCut"} | fields
    return {name: value for name, value in whole.items() if value is not ...}


def write_cuts(path: Path, *cuts: Any) -> None:
    data = b"".join(c if isinstance(c, bytes) else json.dumps(c).encode() + b"\n" for c in cuts)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def members(*names: str, **data: bytes) -> dict[str, bytes]:
    """A recording and its metadata for each cut, as they lie in the tar file."""
    return {
        f"{n}.{kind}": data.get(n, sound(0.5)) if kind == "flac" else b"{}"
        for n in names
        for kind in ("flac", "json")
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One shard with the recordings of the cuts a and b, without cuts."""
    write_tar(tmp_path / "recording.000000.tar", members("a", "b"))
    return tmp_path


@pytest.mark.parametrize("name", ["cuts.000000.jsonl", "cuts.000000.jsonl.gz"])
def test_a_cut_is_a_range_of_its_recording_wherever_it_lies_in_the_tar_file(folder, name):
    write_cuts(folder / name, cut("b", start=0.125, duration=0.25), cut("a", start=...))
    (b, a), skipped = read_shar(folder)
    assert not skipped
    assert (b.key, a.key, b.duration) == ("1:b", "2:a", 0.25)
    assert [(c.member and c.member.name, c.offset, c.duration) for e in (b, a) for c in e.clips] == [
        ("b.flac", 0.125, 0.25),
        ("a.flac", 0.0, 0.5),
    ]


@pytest.mark.parametrize(
    ("channel", "there", "channels"),
    [
        (0, [0], None),
        ([1, 0], [0, 1], None),
        (1, [0, 1], Channels((1,), 2)),
        ([3, 1], [1, 2, 3], Channels((2, 0), 3)),
        (5, [4, 5], Channels((1,), 2)),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_cut_hears_its_channels(folder, channel, there, channels, listed):
    sources = [{"type": "shar", "channels": [c], "source": ""} for c in there]
    recording = {"sources": sources} | ({"channel_ids": there} if listed else {})
    write_cuts(folder / "cuts.000000.jsonl", cut(channel=channel, recording=recording, type="MultiCut"))
    (example,), _ = read_shar(folder)
    assert example.clips[0].channels == channels


def texts(*said: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"start": start, "text": text} for start, text in said]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"id": ...}, "id is missing"),
        ({"id": 5}, "id is 5; expected a string"),
        ({"id": "gone"}, "recording.000000.tar: no gone among its 4 members"),
        ({"duration": ...}, "duration is None; expected more than 0 seconds"),
        ({"duration": 0}, "duration is 0.0; expected more than 0 seconds"),
        ({"duration": -1.5}, "duration is -1.5; expected a number of seconds"),
        ({"start": "0"}, "start is '0'; expected a number of seconds"),
        ({"supervisions": ...}, "supervisions is None; expected a list that is not empty"),
        ({"supervisions": []}, "supervisions is []; expected a list that is not empty"),
        ({"supervisions": {"text": "one"}}, "expected a list that is not empty"),
        ({"supervisions": ["one"]}, "a supervision is a JSON str"),
        ({"supervisions": texts((0, None), (1, " "))}, "text is empty; expected a transcript"),
        ({"supervisions": texts((0, 7))}, "text is 7; expected a string"),
        ({"supervisions": texts((None, "a"), (1, "b"))}, "start of a supervision is None"),
        ({"type": "MixedCut"}, "type is 'MixedCut'; expected a MonoCut or a MultiCut"),
        ({"type": ["x"]}, "type is ['x']; expected a MonoCut"),
        ({"channel": 1}, "channel is 1; expected channels of its recording, [0]"),
        ({"channel": [0, {}]}, "channel is [0, {}]; expected numbers of channels"),
        ({"channel": True}, "channel is [True]; expected numbers of channels"),
        ({"channel": []}, "channel is []; expected a list that is not empty"),
        ({"recording": []}, "recording is a JSON list"),
        ({"recording": {}}, "sources is None; expected a list"),
        ({"recording": {"channel_ids": "0"}}, "channels of the recording is '0'; expected a list"),
        ({"custom": 5}, "custom is a JSON int"),
        ({"custom": {"context": 5}}, "context is 5; expected a string"),
        ({"custom": {"_skipme": True}}, "_skipme is set"),
    ],
)
def test_a_cut_that_cannot_be_used_is_skipped_with_its_reason(folder, fields, reason):
    write_cuts(folder / "cuts.000000.jsonl", cut("b"), cut(**fields), cut("b"))
    examples, (item,) = read_shar(folder)
    assert [e.key for e in examples] == ["1:b", "3:b"]
    assert item.key == ("2:gone" if fields.get("id") == "gone" else "2:" if "id" in fields else "2:a")
    assert reason in item.reason


def test_null_fields_are_absent_ones(folder):
    write_cuts(
        folder / "cuts.000000.jsonl",
        cut(custom=None, start=None, channel=None, type=...),
        cut(recording=None),
    )
    examples, skipped = read_shar(folder)
    assert len(examples) == 2
    assert not skipped


def test_broken_lines_and_names_that_are_there_twice_cost_no_other_cut(tmp_path):
    write_tar(tmp_path / "recording.0.tar", members("a") | {"../b.flac": b""})
    with tarfile.open(tmp_path / "recording.0.tar", "a") as tar:
        for _ in range(2):
            add(tar, "d.flac", sound(0.5))
    write_tar(tmp_path / "recording.1.tar", members("a", "c") | {"c.nodata": b""})
    write_cuts(tmp_path / "cuts.0.jsonl", b"{\n", b"[1]\n", cut("a"), cut("../b"), cut("d"))
    write_cuts(tmp_path / "cuts.1.jsonl", b"\n", b"\xff\n", cut("a"))
    examples, skipped = read_shar(tmp_path)
    assert [e.key for e in examples] == ["3:a", "8:a"]
    assert [e.clips[0].path.name for e in examples] == ["recording.0.tar", "recording.1.tar"]
    assert [f.key for f in skipped] == ["1:", "2:", "4:../b", "5:d", "7:"]
    assert "has a name that leads out of it" in skipped[2].reason
    assert "is in it more than once" in skipped[3].reason
    assert skipped[4].reason.startswith("cuts.1.jsonl line 2: not JSON")


def test_context_may_lie_in_a_file_of_its_own(folder):
    write_cuts(folder / "cuts.000000.jsonl", cut("a", custom={"context": "old"}), cut("b"))
    write_cuts(folder / "context.000000.jsonl.gz", {"cut_id": "a", "context": "new"}, {"cut_id": "b"})
    write_cuts(folder / "system_prompt.000000.jsonl", {"cut_id": "b", "system_prompt": "Be brief."})
    (a, b), _ = read_shar(folder)
    assert said(a)[0] == ("user", ["new ", "<clip>"])
    assert said(b)[0] == ("system", ["Be brief."])
    (folder / "context.000000.jsonl.gz").write_bytes(gzip.compress(bytes(99))[:20])
    with pytest.raises(UserError, match=r"context\.000000\.jsonl\.gz, after line 0: .*ended before"):
        read_shar(folder)
    write_cuts(folder / "context.000000.jsonl.gz", b"{\n")
    with pytest.raises(UserError, match=r"context\.000000\.jsonl\.gz line 1: not JSON.*write the file anew"):
        read_shar(folder)


def test_a_directory_that_is_not_whole_is_refused(folder):
    with pytest.raises(
        UserError, match=r"holds no cuts.*expected a Lhotse Shar directory, or a manifest.*data\.x"
    ):
        read_shar(folder, "data.x")
    write_cuts(folder / "cuts.000000.jsonl", cut())
    assert len(read_shar(folder)[0]) == 1
    write_cuts(folder / "cuts.000000.jsonl.gz", cut())
    with pytest.raises(UserError, match=r"cuts\.000000\.jsonl and .*cuts\.000000\.jsonl\.gz are one shard"):
        read_shar(folder)
    (folder / "cuts.000000.jsonl.gz").rename(folder / "cuts.000001.jsonl.gz")
    with pytest.raises(UserError, match=r"cuts\.000001\.jsonl\.gz has no recording\.000001\.tar beside it"):
        read_shar(folder)
    write_tar(folder / "recording.000001.tar", {})
    with pytest.raises(UserError, match=r"recording\.000001\.tar holds no members"):
        read_shar(folder)
    write_tar(folder / "recording.000001.tar", members("a"))
    (folder / "recording.000000.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"recording\.000000\.tar holds no bytes"):
        read_shar(folder)
    (folder / "recording.000000.tar").write_bytes(b"x" * 5000)
    (folder / "recording.000001.tar").write_bytes(b"x" * 5000)
    with pytest.raises(
        UserError, match=r"no usable line \(2 skipped\); expected one cut a line.*\n.*damaged"
    ):
        read_shar(folder)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three shards of two cuts, each with a context of its own."""
    for n in range(3):
        write_tar(tmp_path / f"recording.00000{n}.tar", members(f"{n}a", f"{n}b"))
        write_tar(tmp_path / f"features.00000{n}.tar", members(f"{n}a", f"{n}b"))
        write_cuts(tmp_path / f"cuts.00000{n}.jsonl.gz", cut(f"{n}a"), cut(f"{n}b"))
        said = [{"cut_id": f"{n}{name}", "context": "Well?"} for name in "ab"]
        write_cuts(tmp_path / f"context.00000{n}.jsonl.gz", *said)
    return tmp_path


def opened(folder: Path) -> SharSource:
    source = open_source(SourceSetting(str(folder)))
    assert isinstance(source, SharSource)
    return source


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("*.000001.*", "files numbered 0 to 2, and none has the number 1"),
        ("cuts.000001.*", r"00001\.(jsonl\.gz|tar) has no cuts\.000001\.jsonl\.gz beside it"),
        ("cuts.000002.*", r"00002\.(jsonl\.gz|tar) has no cuts\.000002\.jsonl\.gz beside it"),
        ("[cr][ue]*.000002.*", r"00002\.\w+(\.gz)? has no cuts\.000002\.jsonl\.gz beside it"),
        ("recording.000001.*", r"cuts\.000001\.jsonl\.gz has no recording\.000001\.tar beside it"),
        ("context.000001.*", r"has no context\.000001\.jsonl\.gz beside it, and other shards have one"),
    ],
)
def test_a_part_of_a_shard_that_is_missing_ends_the_run(three: Path, gone: str, said: str):
    assert len(read_shar(three)[0]) == 6
    for path in three.glob(gone):
        path.unlink()
    source = opened(three)
    for read_it in (source.containers, source.files, source.digest, lambda: source.read(DataConfig())):
        with pytest.raises(UserError, match=said):
            read_it()


def test_other_fields_need_not_be_those_of_all_shards(three: Path):
    (three / "features.000001.tar").unlink()
    assert len(read_shar(three)[0]) == 6


def test_numbers_of_parts_in_the_names_of_shards_count_them(three: Path):
    for path in list(three.iterdir()):
        path.rename(
            three
            / path.name.replace(".00000", ".").replace(".jsonl", "-of-4.jsonl").replace(".tar", "-of-4.tar")
        )
    with pytest.raises(UserError, match=r"3 of the 4 parts that cuts\.0-of-4\.jsonl\.gz's name counts"):
        read_shar(three)


def test_files_that_would_not_be_read_are_refused(three: Path):
    for name, said in (
        ("cuts.000003.jsonl.zst", "is compressed in a way that is not read"),
        ("recording.000003.tar.gz", "is compressed in a way that is not read"),
        ("cuts.000003.jsonl.gz.part", "is unfinished"),
        ("recording.000003.tar.incomplete", "is unfinished"),
    ):
        (three / name).write_bytes(b"x")
        with pytest.raises(UserError, match=rf"{name} {said}"):
            read_shar(three)
        (three / name).unlink()
    for name in ("cuts.000000.jsonl.gz.idx", "notes.zip", "recording.000000.tar.idx"):
        (three / name).write_bytes(b"x")
    assert len(read_shar(three)[0]) == 6


def test_an_index_lists_the_shards(three: Path):
    names = {field: sorted(p.name for p in three.glob(f"{field}.*")) for field in ("cuts", "recording")}
    index = three / "shar_index.json"
    index.write_text(json.dumps({"fields": names}))
    assert len(read_shar(three)[0]) == 6
    assert index in opened(three).files()
    for path in three.glob("*.000002.*"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"lists 3 files such as cuts\.000000.*1 are not among.*000002\.jsonl\.gz"
    ):
        opened(three).containers()
    index.write_text("{")
    with pytest.raises(UserError, match=r"shar_index\.json: it is no index of shards"):
        read_shar(three)


def test_what_a_user_should_know_of_a_shar_directory_is_noted(three: Path):
    assert opened(three).containers() == Containers(9, 9)
    for path in three.glob("*.000000.*"):
        path.unlink()
    write_tar(three / "recording.000001.tar", members("1a", "1b", "x", "y"))
    data = (three / "recording.000002.tar").read_bytes()
    (three / "recording.000002.tar").write_bytes(data + data)
    source = opened(three)
    begins = "its shards begin at cuts.000001.jsonl.gz, not at 0"
    assert source.containers() == Containers(6, 6, (begins,))
    assert len(source.read(DataConfig())[0]) == 4
    counted = source.containers()
    assert counted.notes[0] == begins
    assert counted.notes[1].startswith("recording.000002.tar: bytes follow the end mark at byte")
    assert counted.notes[2] == "2 recordings of tar files are those of no cut, recording.000001.tar first"


@pytest.mark.parametrize("field", ["cuts", "context"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "holds no bytes"),
        (gzip.compress(b"\n", mtime=0), "holds no lines"),
        (gzip.compress(b'{"id": "x"}\n' * 99, mtime=0)[:-9], "ended before the end-of-stream marker"),
        (gzip.compress(b'{"id": "1a", "cut_id": "1a"}\n{"i', mtime=0), "line 2: the file ends within a line"),
    ],
)
def test_damage_to_cuts_and_fields_ends_the_run(three: Path, field: str, data: bytes, said: str):
    (three / f"{field}.000001.jsonl.gz").write_bytes(data)
    with pytest.raises(UserError, match=rf"{field}\.000001\.jsonl\.gz.*{said}"):
        read_shar(three)


def test_one_shard_without_a_number_is_a_directory_too(tmp_path):
    write_tar(tmp_path / "recording.tar", members("a"))
    write_cuts(tmp_path / "cuts.jsonl.gz", cut())
    write_tar(tmp_path / "features.tar", {"a.llc": b"", "a.json": b"{}"})
    (tmp_path / "cuts.jsonl.gz.idx").write_bytes(b"")
    assert [e.key for e in read_shar(tmp_path)[0]] == ["1:a"]
