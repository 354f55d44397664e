import json
from pathlib import Path

import pytest

from jaxthd.data.manifest import read_manifest

GOOD = {"audio_filepath": "a.wav", "text": "one", "duration": 1.5}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "manifest.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def test_fields_of_a_line_arrive_and_further_ones_are_kept(tmp_path):
    line = {
        "audio_filepath": "clips/a.wav",
        "text": "né",
        "duration": 2,
        "offset": 0.25,
        "lang": "fr",
        "n": [1],
    }
    (utterance,), faults = read_manifest(write(tmp_path, line))
    assert not faults
    assert utterance.audio_path == tmp_path / "clips" / "a.wav"
    assert (utterance.text, utterance.duration, utterance.offset) == ("né", 2.0, 0.25)
    assert utterance.fields == {"lang": "fr", "n": [1]}


def test_duration_and_offset_may_be_absent_or_null(tmp_path):
    bare = {"audio_filepath": "a.wav", "text": ""}
    utterances, faults = read_manifest(write(tmp_path, bare, bare | {"duration": None, "offset": None}))
    assert not faults
    assert [(u.duration, u.offset, u.text) for u in utterances] == [(None, 0.0, "")] * 2


def test_absolute_paths_stay(tmp_path):
    (utterance,), _ = read_manifest(write(tmp_path, GOOD | {"audio_filepath": "/elsewhere/a.wav"}))
    assert utterance.audio_path == Path("/elsewhere/a.wav")


def test_keys_are_unique_and_do_not_depend_on_where_the_manifest_lies(tmp_path):
    keys = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        utterances, _ = read_manifest(write(tmp_path / name, GOOD, GOOD, GOOD | {"offset": 1.0}))
        keys.append([u.key for u in utterances])
    assert keys[0] == keys[1] == ["1:a.wav", "2:a.wav", "3:a.wav"]


@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        (b'{"audio_filepath": "a.wav", "text"', "2:", "not JSON"),
        (b'{"text": "\xff", "audio_filepath": "a.wav"}', "2:", "not JSON"),
        (b"[" * 100_000, "2:", "not JSON"),
        (["a.wav", "one"], "2:", "list"),
        ({"text": "one"}, "2:", "audio_filepath is missing"),
        (GOOD | {"audio_filepath": ["l.wav", "r.wav"]}, "2:", "expected a string"),
        (GOOD | {"audio_filepath": ""}, "2:", "empty"),
        ({"audio_filepath": "a.wav"}, "2:a.wav", "text is missing"),
        (GOOD | {"text": 7}, "2:a.wav", "text is 7"),
        (GOOD | {"duration": -1.5}, "2:a.wav", "duration is -1.5"),
        (GOOD | {"duration": 0}, "2:a.wav", "duration is 0"),
        (GOOD | {"duration": "1.5"}, "2:a.wav", "duration is '1.5'"),
        (GOOD | {"duration": True}, "2:a.wav", "duration is True"),
        (GOOD | {"duration": float("nan")}, "2:a.wav", "duration is nan"),
        (GOOD | {"offset": float("inf")}, "2:a.wav", "offset is inf"),
        (GOOD | {"offset": -0.1}, "2:a.wav", "offset is -0.1"),
    ],
)
def test_a_faulty_line_is_reported_and_costs_no_other_line(tmp_path, line, key, reason):
    utterances, faults = read_manifest(write(tmp_path, GOOD, line, GOOD))
    assert [u.key for u in utterances] == ["1:a.wav", "3:a.wav"]
    assert [f.key for f in faults] == [key]
    assert reason in faults[0].reason


def test_blank_lines_and_a_byte_order_mark_are_no_faults(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  \r", GOOD)
    utterances, faults = read_manifest(path)
    assert [u.key for u in utterances] == ["1:a.wav", "4:a.wav"]
    assert not faults


def test_an_absent_manifest_is_an_error_that_says_which_setting(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl.*data\.manifest"):
        read_manifest(tmp_path / "gone.jsonl")


def test_a_manifest_without_a_usable_line_is_an_error_that_shows_the_faults(tmp_path):
    with pytest.raises(ValueError, match=r"no usable line \(1 faulty\)[\s\S]*text is missing"):
        read_manifest(write(tmp_path, {"audio_filepath": "a.wav"}))
    with pytest.raises(ValueError, match=r"no usable line \(0 faulty\)"):
        read_manifest(write(tmp_path))
