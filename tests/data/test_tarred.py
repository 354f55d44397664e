"""Recordings in tar files are what they are as files; what is wrong with a tar file costs no more than it."""

import bz2
import gzip
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.data.audio import recordings as audio
from jaxthd.data.audio.containers import View
from jaxthd.data.audio.recordings import AudioError, load_audio
from jaxthd.data.example import Channels, Clip, Example, Member
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.sources.tarred import index_tar, shard_number
from jaxthd.errors import UserError
from tests.data.sets import add, read_manifest, sound, write_tar

LONG = "é" * 80 + "/" + "x" * 150 + ".wav"


def samples(clip: Clip) -> np.ndarray:
    return load_audio(clip.path, clip.offset, clip.duration, member=clip.member, channels=clip.channels)


def line(name: str, **more: Any) -> dict[str, Any]:
    return {"audio_filepath": name, "text": "one", **more}


def write_manifest(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    return path


def read(path: Path | str, tars: Path | str) -> tuple[list[Example], list[Skipped]]:
    return read_manifest(path, tarred_audio=str(tars))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_member_is_heard_as_the_file_would_be(tmp_path, form):
    """In any order, and by ranges; long names, too, which the formats keep in three ways."""
    files = {
        "a.wav": sound(0.5, 8000, seed=1),
        "b/b.flac": sound(0.7, 44_100, 2, seed=2, kind="flac"),
        "c.ogg": sound(1.2, 22_050, seed=3, kind="ogg"),
        "d.mp3": sound(0.9, 16_000, seed=4, kind="mp3"),
        LONG: sound(0.3, seed=5),
    }
    files.pop(LONG if form == tarfile.USTAR_FORMAT else "") if form == tarfile.USTAR_FORMAT else None
    index = index_tar(write_tar(tmp_path / "a.tar", files, form))
    assert (list(index.members), index.damage) == (list(files), "")
    for name in reversed(files):
        (tmp_path / "alone").write_bytes(files[name])
        clip = index.clip(name)
        np.testing.assert_array_equal(samples(clip), load_audio(tmp_path / "alone"))
        part = replace(clip, offset=0.05, duration=0.2)
        np.testing.assert_array_equal(samples(part), load_audio(tmp_path / "alone", 0.05, 0.2))


def test_a_range_of_a_long_recording_costs_no_more_than_the_range(tmp_path, monkeypatch):
    files = {"before.wav": sound(1.0), "hour.wav": sound(600.0, 8000), "after.wav": sound(1.0, seed=1)}
    clip = index_tar(write_tar(tmp_path / "a.tar", files)).clip("hour.wav")
    read: list[int] = []
    original = View.readinto

    def counted(self: Any, buffer: Any) -> int:
        read.append(original(self, buffer))
        return read[-1]

    monkeypatch.setattr(View, "readinto", counted)
    assert len(samples(replace(clip, offset=300.0, duration=1.0))) == 16_000
    assert 16_000 < sum(read) < 100_000


def test_a_member_begins_and_ends_where_it_does(tmp_path):
    files = {"a": b"before", "b": bytes(range(256)) * 9, "c": b"after"}
    member = index_tar(write_tar(tmp_path / "a.tar", files)).clip("b").member
    assert member is not None
    with (tmp_path / "a.tar").open("rb") as tar:
        within = View(tar, member.start, member.size)
        for at, wanted in ((0, 5000), (0, 10), (2300, 100), (2304, 1), (9999, 1)):
            buffer = bytearray(b"?" * wanted)
            assert within.seek(at) == within.tell() == at
            count = within.readinto(buffer)
            assert buffer == files["b"][at : at + wanted].ljust(wanted, b"?")
            assert count == len(files["b"][at : at + wanted])
        assert within.seek(-4, 2) == len(files["b"]) - 4
        assert within.seek(-1, 1) == len(files["b"]) - 5
        assert within.seek(-1) == len(files["b"]) - 5, "libsndfile is told that it did not work"
        assert within.error is None


def test_a_tarred_manifest_is_the_plain_one_with_other_places_for_its_recordings(tmp_path):
    """Utterances with offsets, segments as NeMo names them, and conversations of several recordings."""
    files = {name: sound(1.0 + n, seed=n) for n, name in enumerate(("a.wav", "b.flac", "c-sub1.wav"))}
    said = {"from": "User", "type": "audio", "value": "a.wav", "offset": 0.5, "duration": 0.25}
    lines = [
        line("a.wav"),
        line("b.flac", offset=0.5, duration=1.0),
        line("c-sub1.wav", shard_id=7),
        {"id": "c", "conversations": [said, said | {"value": "./b.flac"}, {"from": "gpt", "value": "yes"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "audio", "path": "a.wav"}]},
                {"role": "assistant", "content": "no"},
            ]
        },
    ]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    path, tar = write_manifest(tmp_path / "m.json", *lines), write_tar(tmp_path / "a.tar", files)
    (plain, _), (tarred, skipped) = read_manifest(path), read(path, tar)
    assert not skipped
    assert [(e.key, e.text, [t.role for t in e.turns]) for e in plain] == [
        (e.key, e.text, [t.role for t in e.turns]) for e in tarred
    ]
    pairs = [
        (a, b) for p, t in zip(plain, tarred, strict=True) for a, b in zip(p.clips, t.clips, strict=True)
    ]
    assert len(pairs) == 6
    for whole, inside in pairs:
        assert inside.path == tar
        assert inside.member is not None
        assert (inside.offset, inside.duration) == (whole.offset, whole.duration)
        np.testing.assert_array_equal(samples(inside), samples(whole))


def test_segments_of_one_recording_are_ranges_of_it(tmp_path):
    tar = write_tar(
        tmp_path / "a.tar",
        {"a.wav": sound(2.0), "b-sub1.wav": sound(1.0), "b.wav": sound(1.0), "n": sound(1.0)},
    )
    names = ("a.wav", "a-sub1.wav", "a-sub12.wav", "b-sub1.wav", "n-sub2", "-sub1.wav", "a-subx.wav")
    lines = [line(name, offset=0.1 * n, duration=0.5) for n, name in enumerate(names)]
    examples, skipped = read(write_manifest(tmp_path / "m.json", *lines), tar)
    found = [(clip.member and clip.member.name, clip.offset) for e in examples for clip in e.clips]
    assert found == [
        ("a.wav", 0.0),
        ("a.wav", 0.1),
        ("a.wav", 0.2),
        ("b-sub1.wav", pytest.approx(0.3)),
        ("n", 0.4),
    ]
    assert [item.key for item in skipped] == ["6:-sub1.wav", "7:a-subx.wav"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """manifest_{0..2}.json and audio_{0..2}.tar, each with an a.wav of its own; all.json has shard_id."""
    every = []
    for n in range(3):
        write_tar(tmp_path / f"audio_{n}.tar", {"a.wav": sound(0.5 + n), f"{n}.wav": sound(0.2)})
        lines = [line("a.wav", shard_id=n), line(f"{n}.wav", shard_id=n)]
        write_manifest(tmp_path / f"manifest_{n}.json", *lines)
        every += lines
    write_manifest(tmp_path / "all.json", *every)
    return tmp_path


def places(examples: list[Example]) -> list[tuple[str, str, int]]:
    return [(c.path.name, c.member.name, len(samples(c))) for e in examples for c in e.clips if c.member]


@pytest.mark.parametrize("manifest", ["manifest__OP_0..2_CL_.json", "all.json"])
@pytest.mark.parametrize("tars", ["audio__OP_0..2_CL_.tar", "audio_{2,0,1}.tar"])
def test_shards_go_by_order_or_by_shard_id(shards, manifest, tars):
    if (manifest, tars) == ("manifest__OP_0..2_CL_.json", "audio_{2,0,1}.tar"):
        with pytest.raises(UserError, match=r"manifest_0\.json would go with audio_2\.tar.*in one order"):
            read(f"{shards}/{manifest}", f"{shards}/{tars}")
        return
    examples, skipped = read(f"{shards}/{manifest}", f"{shards}/{tars}")
    assert not skipped
    assert [e.key for e in examples] == ["1:a.wav", "2:0.wav", "3:a.wav", "4:1.wav", "5:a.wav", "6:2.wav"]
    expected = [
        (f"audio_{n}.tar", name, size)
        for n in range(3)
        for name, size in (("a.wav", 8000 + 16000 * n), (f"{n}.wav", 3200))
    ]
    assert places(examples) == expected


def test_what_does_not_go_together_is_refused(shards, tmp_path):
    one, many = str(shards / "all.json"), f"{shards}/manifest_{{0..2}}.json"
    for manifest, tars, message in (
        (
            many,
            f"{shards}/audio_{{0..1}}.tar",
            "3 manifests and 2 tar files .*expected one tar file for each",
        ),
        (many, f"{shards}/audio_{{0..4}}.tar", r"2 of the 5 files of .*audio_3\.tar first"),
        (one, f"{{{shards}/audio_0.tar,{shards}/x.tar}}", r"numbered \[0, None\].*expected a number in each"),
        (one, f"{shards}/audio_{{0,0}}.tar", r"numbered \[0, 0\]"),
    ):
        write_tar(tmp_path / "x.tar", {"a.wav": b""})
        with pytest.raises(UserError, match=message):
            read(manifest, tars)
    with pytest.raises(FileNotFoundError, match=r"manifest_3\.json.*data\.manifest"):
        read(f"{shards}/manifest_{{2..3}}.json", f"{shards}/audio_{{2..3}}.tar")


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("audio_3.tar", 3),
        ("audio_0012.tar", 12),
        ("a_1/audio_2_16k.tar", 2),
        ("audio-07-clean.tar", 7),
        ("audio.tar", None),
        ("v2_audio.tar", None),
        ("audio-00001-of-00004.tar", 1),
        ("part_0_of_3.jsonl", 0),
    ],
)
def test_a_shards_number_is_in_its_name(name, number):
    assert shard_number(Path(name)) == number


def reasons_of(folder: Path, tar: Path, *names: str, **more: Any) -> dict[str, str]:
    """Reasons by name; of an utterance that is sound, nothing."""
    lines = [line(name, **more) for name in names]
    examples, skipped = read(write_manifest(folder / "m.json", line("good.wav", **more), *lines), tar)
    assert len(samples(examples[0].clips[0])) == 8000
    return {item.key.partition(":")[2]: item.reason for item in skipped}


def test_what_is_wrong_in_a_tar_file_is_skipped_with_its_reason_and_nothing_is_opened(tmp_path):
    (tmp_path / "plain.wav").write_bytes(sound(1.0))
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "good.wav", sound(0.5))
        for name, kind in (
            ("soft.wav", tarfile.SYMTYPE),
            ("hard.wav", tarfile.LNKTYPE),
            ("folder", tarfile.DIRTYPE),
            ("device.wav", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(tmp_path / "plain.wav")
            tar.addfile(info)
        for name in ("twice.wav", "twice.wav", "../up.wav", "a/../../up.wav", "..a/b..wav"):
            add(tar, name, sound(0.5, seed=1))
    absolute = str(tmp_path / "plain.wav")
    no_file, out = "is no plain file in it", "has a name that leads out of it"
    found = reasons_of(
        tmp_path,
        path,
        "soft.wav",
        "hard.wav",
        "folder",
        "device.wav",
        "twice.wav",
        "../up.wav",
        "a/../../up.wav",
        "..a/b..wav",
        "plain.wav",
        absolute,
        "../plain.wav",
    )
    expected = {
        "soft.wav": no_file,
        "hard.wav": no_file,
        "folder": no_file,
        "device.wav": no_file,
        "twice.wav": "is in it more than once",
        "../up.wav": out,
        "a/../../up.wav": out,
        "plain.wav": "no plain.wav among its 9 members;",
        absolute: "among its 9 members",
        "../plain.wav": "among its 9 members",
    }
    assert list(found) == list(expected)
    for name, reason in expected.items():
        assert reason in found[name]
        assert str(path) in found[name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "m.json", "plain.wav"]


def test_an_absolute_name_is_a_name_like_any_other(tmp_path):
    (tmp_path / "a.wav").write_bytes(sound(1.0))
    tar = write_tar(tmp_path / "a.tar", {str(tmp_path / "a.wav"): sound(0.25)})
    examples, _ = read(write_manifest(tmp_path / "m.json", line(str(tmp_path / "a.wav"))), tar)
    assert places(examples) == [("a.tar", str(tmp_path / "a.wav"), 4000)]


def test_damage_costs_what_comes_after_it(tmp_path):
    files = {"good.wav": sound(0.5), "cut.wav": sound(1.0), "last.wav": sound(0.5)}
    whole = write_tar(tmp_path / "a.tar", files).read_bytes()
    cut, last = (index_tar(tmp_path / "a.tar").clip(name).member for name in ("cut.wav", "last.wav"))
    assert isinstance(cut, Member)
    assert isinstance(last, Member)
    header = last.start - tarfile.BLOCKSIZE
    for damaged, reasons in (
        (
            whole[: cut.start + 1000],
            ["is cut short, with the tar file", "before it is damaged, or cut short"],
        ),
        (whole[: cut.start - 100], [f"before it is damaged, at byte {cut.start - 512};"] * 2),
        (whole[:header], [None, f"among its 2 members; the tar file ends early, at byte {header}, without"]),
        (whole[: header + 512], [None, "is cut short, with the tar file"]),
        (
            whole[:header] + b"x" * 512 + whole[last.start :],
            [None, f"before it is damaged, at byte {header};"],
        ),
    ):
        path = tmp_path / "damaged.tar"
        path.write_bytes(damaged)
        found = reasons_of(tmp_path, path, "cut.wav", "last.wav")
        assert len(found) == 2 - reasons.count(None)
        for name, reason in zip(("cut.wav", "last.wav"), reasons, strict=True):
            assert reason is None or reason in found[name]


def with_size(header: bytes, size: int) -> bytes:
    """A header that claims another size, its checksum right, as base-256 numbers."""
    data = bytearray(header)
    data[124:136] = (b"\x80" if size >= 0 else b"\xff") + size.to_bytes(11, "big", signed=True)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


@pytest.mark.parametrize("size", [-512, -1024, -(2**80), 2**40, 2**63, 2**86])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_header_of_any_size_ends_nothing_but_the_tar_file(tmp_path, size, form):
    """Of a recording, or of the header before it that holds its long name."""
    whole = write_tar(
        tmp_path / "a.tar", {"good.wav": sound(0.5), LONG: sound(0.5), "z": b""}, form
    ).read_bytes()
    ends = [index_tar(tmp_path / "a.tar").clip(name).member for name in ("good.wav", LONG)]
    assert ends[0] is not None
    assert ends[1] is not None
    extended = -(-(ends[0].start + ends[0].size) // 512) * 512
    for header in (extended, ends[1].start - 512):
        damaged = whole[:header] + with_size(whole[header : header + 512], size) + whole[header + 512 :]
        (tmp_path / "damaged.tar").write_bytes(damaged)
        assert len(reasons_of(tmp_path, tmp_path / "damaged.tar", LONG)) == 1


def test_what_is_no_tar_file_or_compressed_is_said_so(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"good.wav": sound(0.5)})
    for data, reason in (
        (gzip.compress(path.read_bytes()), r"a\.tar is compressed \(gzip\); expected a tar file that is not"),
        (bz2.compress(path.read_bytes()), r"a\.tar is compressed \(bzip2\).*bunzip2"),
        (b"PK\x03\x04" + bytes(5000), r"a\.tar is compressed \(zip\)"),
        (b"", r"a\.tar holds no bytes"),
        (bytes(10_240), r"a\.tar holds no members"),
        (b"x" * 5000, r"no usable line \(1 skipped\)[^$]*damaged, or cut short"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError, match=reason):
            read(write_manifest(tmp_path / "m.json", line("good.wav")), path)


def test_one_bad_tar_file_costs_its_own_recordings(shards):
    (shards / "audio_1.tar").write_bytes(b"x" * 5000)
    examples, skipped = read(shards / "all.json", f"{shards}/audio_{{0..2}}.tar")
    assert [e.key for e in examples] == ["1:a.wav", "2:0.wav", "5:a.wav", "6:2.wav"]
    assert [f.key for f in skipped] == ["3:a.wav", "4:1.wav"]
    assert all("audio_1.tar" in item.reason for item in skipped)


@pytest.mark.parametrize("shard", [None, 3, "0", True, 1.0, [0]])
def test_a_line_whose_shard_is_unknown_is_skipped(shards, shard):
    path = write_manifest(shards / "m.json", line("a.wav", shard_id=0), line("a.wav", shard_id=shard))
    _, (item,) = read(path, f"{shards}/audio_{{0..2}}.tar")
    assert item.reason == f"shard_id is {shard!r}; expected the number of a tar file, 0 to 2"


def test_a_tar_file_that_has_changed_since_is_named(tmp_path):
    clip = index_tar(write_tar(tmp_path / "a.tar", {"a.wav": sound(2.0)})).clip("a.wav")
    data = clip.path.read_bytes()
    for kept in (0, 600, 30_000):
        clip.path.write_bytes(data[:kept])
        with pytest.raises(AudioError, match=r"a\.tar: a\.wav: .*become shorter since its headers were read"):
            samples(clip)
    clip.path.write_bytes(bytes(len(data)))
    with pytest.raises(AudioError, match=r"a\.tar: a\.wav: libsndfile cannot read it"):
        samples(clip)
    clip.path.unlink()
    with pytest.raises(AudioError, match=r"a\.tar: no such file"):
        samples(clip)


def test_the_channels_of_a_cut_are_heard(tmp_path):
    data = sound(0.5, channels=3)
    clip = index_tar(write_tar(tmp_path / "a.tar", {"a.wav": data})).clip("a.wav")
    (tmp_path / "a.wav").write_bytes(data)
    wave = audio.soundfile.read(tmp_path / "a.wav", dtype="float32")[0]
    for heard in ((1,), (2, 0)):
        found = samples(replace(clip, channels=Channels(heard, 3)))
        np.testing.assert_array_equal(found, wave[:, list(heard)].mean(axis=1, dtype=np.float32))
    np.testing.assert_array_equal(samples(replace(clip, channels=Channels((4, 5, 1), 6))), samples(clip))
    with pytest.raises(AudioError, match=r"a\.wav: 3 channels; expected 4, as its recording says, or the 2"):
        samples(replace(clip, channels=Channels((0, 1), 4)))


def test_lines_that_nemo_would_skip_are_skipped(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {"good.wav": sound(0.5)})
    assert reasons_of(tmp_path, tar, "good.wav", _skipme=False) == {}
    lines = [line("good.wav"), line("good.wav", _skipme=True), line("good.wav", custom={"_skipme": 1})]
    examples, skipped = read(write_manifest(tmp_path / "m.json", *lines), tar)
    assert len(examples) == 1
    assert [item.reason for item in skipped] == ["_skipme is set"] * 2


def notes_of(manifest: Path | str, tars: Path | str) -> tuple[int, int, list[str]]:
    """(containers named, containers there, notes) after reading."""
    source = open_source(SourceSetting(str(manifest), tarred_audio=str(tars)))
    before = source.containers()
    source.read(DataConfig())
    after = source.containers()
    assert before is not None
    assert after is not None
    assert before[:2] == after[:2]
    return *after[:2], list(after.notes)


def test_what_follows_the_end_mark_is_said_and_not_read(tmp_path):
    first = write_tar(tmp_path / "1.tar", {"good.wav": sound(0.5)}).read_bytes()
    second = write_tar(tmp_path / "2.tar", {"b.wav": sound(0.5)}).read_bytes()
    end = 512 + -(-len(sound(0.5)) // 512) * 512
    joined = tmp_path / "joined.tar"
    joined.write_bytes(first + second)
    text = f"bytes follow the end mark at byte {end} and are not read"
    assert text in reasons_of(tmp_path, joined, "b.wav")["b.wav"]
    (note,) = notes_of(write_manifest(tmp_path / "m.json", line("good.wav")), joined)[2]
    assert note.startswith(f"joined.tar: {text}")
    for tail in (bytes(20_480), bytes(3 << 20)):
        joined.write_bytes(first + tail)
        assert index_tar(joined).end == ""
    joined.write_bytes(first + bytes(3 << 20) + second)
    assert text in index_tar(joined).end
    joined.write_bytes(first[:end])
    (note,) = notes_of(tmp_path / "m.json", joined)[2]
    assert f"joined.tar: the tar file ends early, at byte {end}, without an end mark" in note


def test_members_that_no_line_names_are_counted(shards):
    path = write_manifest(shards / "m.json", line("a.wav", shard_id=0), line("a-sub1.wav", shard_id=0))
    named, there, notes = notes_of(path, f"{shards}/audio_{{0..2}}.tar")
    assert (named, there) == (4, 4)
    assert notes == ["5 of the 6 members of tar files are named by no line, audio_0.tar first"]
    assert notes_of(shards / "all.json", f"{shards}/audio_{{0..2}}.tar") == (4, 4, [])


def write_metadata(path: Path, shards: int) -> None:
    """A part of what NeMo's convert_to_tarred_audio_dataset.py writes."""
    path.write_text(
        f"created_datetime: x\nversion: 0\ndataset_config:\n  num_shards: {shards}\n  shuffle: true\n"
    )


def test_nemos_metadata_counts_the_tar_files(shards):
    tars = f"{shards}/audio_{{0..2}}.tar"
    write_metadata(shards / "metadata.yaml", 3)
    assert notes_of(shards / "all.json", tars) == (4, 4, [])
    write_manifest(shards / "part.json", line("a.wav", shard_id=0), line("0.wav", shard_id=0))
    assert notes_of(shards / "part.json", f"{shards}/audio_{{0..1}}.tar")[:2] == (4, 3)
    assert (
        "2 of the 3 tar files that metadata.yaml counts"
        in notes_of(shards / "part.json", f"{shards}/audio_{{0..1}}.tar")[2]
    )
    source = open_source(SourceSetting(str(shards / "all.json"), tarred_audio=tars))
    assert source.files() == [
        shards / name for name in ("all.json", "audio_0.tar", "audio_1.tar", "audio_2.tar", "metadata.yaml")
    ]
    write_metadata(shards / "metadata.yaml", 5)
    for read_it in (source.containers, lambda: source.read(DataConfig())):
        with pytest.raises(
            UserError, match=r"metadata\.yaml counts 5 tar files, and .* holds 3; expected all"
        ):
            read_it()
    write_metadata(shards / "metadata.yaml", 3)
    write_metadata(shards / "metadata_version_1.yaml", 4)
    (shards / "all.json").rename(shards / "all_version_1.json")
    with pytest.raises(UserError, match=r"metadata_version_1\.yaml counts 4 tar files"):
        notes_of(shards / "all_version_1.json", tars)
    for text in ("- 1\n", "dataset_config: {num_shards: -1}\n", "a: [\n", "dataset_config: 3\n"):
        (shards / "metadata_version_1.yaml").write_text(text)
        assert notes_of(shards / "all_version_1.json", tars) == (4, 4, [])


def test_parts_that_are_left_out_are_counted(shards):
    for n in range(2):
        (shards / f"audio_{n}.tar").rename(shards / f"audio-{n}-of-3.tar")
        (shards / f"manifest_{n}.json").rename(shards / f"part_{n}_of_3.json")
    assert notes_of(f"{shards}/part_{{0..1}}_of_3.json", f"{shards}/audio-{{0..1}}-of-3.tar") == (
        6,
        4,
        [
            "2 of the 3 parts that part_0_of_3.json's name counts",
            "2 of the 3 parts that audio-0-of-3.tar's name counts",
        ],
    )
