"""Hugging Face data sets on disk: every form of recording, other columns, what is listed or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.example import Alternative, Cell, Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.errors import UserError
from jaxthd.planning.lengths import clip_samples
from tests.data.sets import sound, write_arrow, write_parquet

pyarrow = pytest.importorskip("pyarrow")

WAVE = np.random.default_rng(0).uniform(-0.5, 0.5, 4000).astype(np.float32)
RATE = 8000


def read(path: Path, *columns: str, **data: Any) -> tuple[list[Example], list[Skipped]]:
    source = open_source(SourceSetting(str(path)))
    source.digest()
    return source.read(DataConfig(columns=columns, **data))


def decoded(example: Example) -> np.ndarray:
    (clip,) = example.clips
    assert isinstance(clip, Clip)
    samples = load_audio(clip.path, clip.offset, clip.duration, member=clip.member)
    assert clip_samples(clip) == len(samples)
    return samples


WRITTEN = Path(__file__).parents[1] / "references" / "huggingface"
"""By scripts/references/huggingface.py."""


def test_what_datasets_wrote_is_read(tmp_path: Path):
    for kind in ("saved", "parquet"):
        examples, skipped = read(WRITTEN / kind)
        assert [e.key for e in examples] == ["1:low.wav", "2:both.wav", "3:beside.wav"]
        assert [(e.text, e.fields["gender"]) for e in examples] == [("one", 0), ("two", 1), ("three", 0)]
        assert not skipped
        for example in examples[: 3 if kind == "saved" else 2]:
            expected = load_audio(WRITTEN / example.key.partition(":")[2])
            np.testing.assert_array_equal(decoded(example), expected)
    with pytest.raises(ValueError, match=r"there is no file .*parquet/beside\.wav"):
        decoded(examples[2])  # datasets has left it where it was


FORMS: dict[str, dict[str, Any]] = {
    "bytes": {"audio": {"bytes": b"sound", "path": "x/a.wav"}},
    "path": {"audio": {"bytes": None, "path": "a.wav"}},
    "path alone": {"audio": "a.wav"},
    "bytes alone": {"audio": b"sound"},
    "array": {"audio": {"array": WAVE.tolist(), "sampling_rate": RATE, "path": "a.wav"}},
    "channels": {"audio": {"array": [WAVE.tolist()] * 2, "sampling_rate": RATE}},
    "list and rate": {"audio": WAVE.tolist(), "sampling_rate": RATE},
}


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
@pytest.mark.parametrize("form", FORMS)
def test_a_recording_of_any_form_is_that_of_the_file(tmp_path: Path, form: str, kind: str):
    soundfile.write(tmp_path / "a.wav", WAVE, RATE, subtype="FLOAT")
    data, row = (tmp_path / "a.wav").read_bytes(), FORMS[form]
    if row["audio"] == b"sound":
        row = {"audio": data}
    elif form == "bytes":
        row = {"audio": row["audio"] | {"bytes": data}}
    rows = [{"text": str(n), "id": f"r{n}"} | row for n in range(5)]
    path = tmp_path / ("t.parquet" if kind == "parquet" else "t.arrow")
    if kind == "parquet":
        write_parquet(path, rows, group=2)
    else:
        write_arrow(path, rows, group=2, stream=kind == "arrow stream")
    examples, skipped = read(path)
    assert not skipped
    named = "a.wav" if "path" in form or form in ("bytes", "array") else None
    assert [e.key for e in examples] == [f"{n + 1}:{named or f'r{n}'}" for n in range(5)]
    assert [e.text for e in examples] == list("01234")
    expected = load_audio(tmp_path / "a.wav")
    for example in examples:
        np.testing.assert_array_equal(decoded(example), expected)


def test_integers_are_scaled_as_a_file_of_16_bits(tmp_path: Path):
    integers = np.round(WAVE * 2**15).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", integers, RATE)
    of_array = pyarrow.array([integers.tolist()], pyarrow.list_(pyarrow.int16()))
    table = pyarrow.table({"audio": of_array, "sampling_rate": [RATE], "text": ["x"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    (example,), _ = read(tmp_path / "t.parquet")
    np.testing.assert_array_equal(decoded(example), load_audio(tmp_path / "a.wav"))


def test_columns_have_other_names_and_the_rest_are_fields(tmp_path: Path):
    held = {"bytes": sound(0.5), "path": "a.wav"}
    row = {"speech": held, "audio": b"-", "raw": "ONE", "sentence": "no", "duration": 500.0, "speaker": 3}
    path = write_parquet(tmp_path / "t.parquet", [row | {"emotion": [0.1], "spans": [{"word": "one"}]}])
    (example,), _ = read(path, "audio=speech", "text=raw", "duration=")
    assert example.text == "ONE"
    assert len(decoded(example)) == 8000
    assert dict(example.fields) == {"sentence": "no", "speaker": 3, "spans": [{"word": "one"}]}
    with pytest.raises(UserError, match=r"data\.columns names 'nothing', and the columns are speech, audio"):
        read(path, "audio=nothing")
    with pytest.raises(UserError, match=r"data\.columns has 'sound='; expected FIELD=COLUMN"):
        read(path, "sound=speech")


def test_rows_are_conversations_and_preferences_as_lines_are(tmp_path: Path):
    held = {"bytes": sound(0.5), "path": None}
    chat = [{"role": "user", "content": "{audio} Well?"}, {"role": "assistant", "content": "Yes."}]
    (example,), _ = read(write_parquet(tmp_path / "a.parquet", [{"audio": held, "messages": chat}]))
    assert [turn.role for turn in example.turns] == ["user", "assistant"]
    assert len(decoded(example)) == 8000
    (example,), _ = read(
        write_parquet(tmp_path / "b.parquet", [{"messages": [chat[1] | {"role": "user"}, chat[1]]}])
    )
    assert not example.clips
    pair = {"audio": held, "chosen": "a", "rejected": "b", "completion": None}
    implicit = {"audio": held, "chosen": chat, "rejected": [chat[0], chat[1] | {"content": "No."}]}
    for number, row in enumerate((pair, implicit, pair | {"prompt": "{audio}?"})):
        (example,), _ = read(write_parquet(tmp_path / f"{number}.parquet", [row]))
        assert [a.preference for a in example.alternatives] == [1.0, -1.0]
        assert example.alternatives[0] == Alternative("a" if row is not implicit else "Yes.", 1.0)
        assert len(example.clips) == 1


def test_what_cannot_be_used_is_listed_row_by_row(tmp_path: Path):
    held = {"bytes": sound(0.5), "path": "a.wav"}
    rows = [{"audio": held, "text": text} for text in ("one", None, " ", "two", "three", "four")]
    path = write_parquet(tmp_path / "t.parquet", rows, group=2)
    examples, skipped = read(path)
    assert [e.key for e in examples] == [f"{n}:a.wav" for n in (1, 4, 5, 6)]
    assert [(s.key, s.reason.partition(";")[0]) for s in skipped] == [
        ("2:a.wav", "text is missing"),
        ("3:a.wav", "text is empty"),
    ]
    meta = pyarrow.parquet.read_metadata(path)
    text = next(i for i in range(3) if meta.row_group(1).column(i).path_in_schema == "text")
    at = meta.row_group(1).column(text).data_page_offset
    data = bytearray(path.read_bytes())
    data[at : at + 20] = b"\xff" * 20
    path.write_bytes(data)
    examples, skipped = read(path)
    assert [e.key for e in examples] == [f"{n}:a.wav" for n in (1, 5, 6)]
    assert [s.key for s in skipped] == ["2:a.wav", "3:", "4:"]
    assert "t.parquet, group 1: 2 rows cannot be read" in skipped[1].reason
    path.write_bytes(data[:50])
    with pytest.raises(UserError, match=r"no usable row \(1 skipped\).*\n  row 1: .*cannot be read"):
        read(path)


def test_a_cell_without_a_recording_says_so(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        {"audio": {"bytes": None, "path": None}},
        {"audio": {"bytes": None, "path": "gone.wav"}},
        {"audio": {"bytes": b"", "path": None}},
        {"audio": {"bytes": b"no sound", "path": None}},
    ]
    path = write_parquet(tmp_path / "t.parquet", [row | {"text": "x"} for row in rows])
    reasons = [
        "it holds no recording",
        "there is no file",
        "it holds no recording",
        "libsndfile cannot read it",
    ]
    for example, reason in zip(read(path)[0], reasons, strict=True):
        (clip,) = example.clips
        assert isinstance(clip, Clip)
        with pytest.raises(ValueError, match=reason):
            load_audio(clip.path, member=clip.member)
        assert clip_samples(clip) == 0
    with pytest.raises(ValueError, match="audio cannot be read"):
        load_audio(path, member=Cell("x", "audio", 9, 0))


def test_rows_without_a_column_that_is_read_are_listed(tmp_path: Path):
    path = write_arrow(tmp_path / "t.arrow", [{"audio": b"x"}] * 3, group=2)
    with pytest.raises(UserError, match=r"no usable row \(3 skipped\)"):
        read(path)


def test_folders_are_those_that_datasets_writes(tmp_path: Path):
    rows = [{"audio": {"bytes": sound(0.5), "path": f"{n}.wav"}, "text": "x"} for n in range(3)]
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    for number, name in enumerate(("b", "a", "cache-1")):
        write_arrow(saved / f"{name}.arrow", rows[number : number + 1])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert [e.key for e in read(saved)[0]] == ["1:1.wav", "2:0.wav"], "by name, without the cache"
    (saved / "state.json").write_text('{"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}')
    assert [e.key for e in read(saved)[0]] == ["1:0.wav", "2:1.wav"], "in the order of state.json"
    with pytest.raises(UserError, match="holds the splits train; expected one of them"):
        read(saved.parent)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(UserError, match=r"1 of the 1 files .* are not there"):
        read(saved)
    (saved / "state.json").write_text('{"_data_files": [], "_indices_data_files": 3}')
    with pytest.raises(UserError, match="call flatten_indices"):
        read(saved)
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        write_parquet(hub / f"{name}.parquet", rows[:1])
    assert len(read(hub.parent)[0]) == 2
    write_parquet(hub / "test-00000-of-00001.parquet", rows[:1])
    with pytest.raises(UserError, match=r"holds test\.parquet, train\.parquet; expected the files of one"):
        read(hub.parent)
    for names in (("train", "test"), ("data-0", "validation"), ("train", "0")):
        plain = tmp_path / "-".join(names)
        plain.mkdir()
        for name in names:
            write_parquet(plain / f"{name}.parquet", rows[:1])
        with pytest.raises(UserError, match="expected the files of one split"):
            read(plain)
    numbered = tmp_path / "numbered"
    numbered.mkdir()
    for name in ("0000", "0001"):
        write_parquet(numbered / f"{name}.parquet", rows[:1])
    assert len(read(numbered)[0]) == 2
    assert len(read(hub / "train-{00000..00001}-of-00002.parquet")[0]) == 2


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_parquet(tmp_path / "t.parquet", [{"audio": "a.wav", "text": "x"}])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'jaxthd\[parquet\]'"):
        open_source(SourceSetting(str(path))).read(DataConfig())


def test_a_column_of_recordings_that_is_not_read_is_an_error_or_counted(tmp_path: Path):
    held = {"bytes": sound(0.5), "path": "a.wav"}
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    pcm = {"array": WAVE[:9].tolist(), "sampling_rate": RATE}
    columns = {"speech": held, "x": held, "y": pcm, "audios": [held, held], "wav": b"x", "mp3": [0.5]}
    for name, value in columns.items():
        path = write_parquet(tmp_path / f"{name}.parquet", [{name: value, "messages": chat}] * 2)
        with pytest.raises(
            UserError, match=rf"column '{name}'.*data\.columns audio={name} to read it.* {name}= to"
        ):
            read(path)
        examples, skipped = read(path, f"{name}=")
        assert [example.clips for example in examples] == [[], []]
        beside = write_parquet(tmp_path / "b.parquet", [{name: value, "audio": held, "text": "one"}] * 2)
        source = open_source(SourceSetting(str(beside)))
        examples, skipped = source.read(DataConfig())
        assert (len(examples), skipped, source.unread_recordings) == (2, [], {name: 2})
    path = write_parquet(tmp_path / "p.parquet", [{"image": held, "audio": held, "messages": chat}])
    with pytest.raises(UserError, match="column 'image', which is not read"):
        read(path)
    path = write_parquet(tmp_path / "s.parquet", [{"clip_path": "x/a", "messages": chat}])
    with pytest.raises(UserError, match="clip_path names a recording that is not read"):
        read(path)


def test_paths_in_columns_are_read_from_the_folder_of_the_table(tmp_path: Path):
    chat = [{"role": "user", "content": "<audio><audio>Who?"}, {"role": "assistant", "content": "Me."}]
    for name in ("audio", "audios"):
        path = write_parquet(tmp_path / f"{name}.parquet", [{name: ["a.wav", "b.wav"], "messages": chat}])
        (example,), _ = read(path)
        assert example.clips == [Clip(tmp_path / "a.wav"), Clip(tmp_path / "b.wav")]
    (tmp_path / "a.wav").write_bytes(sound(0.5))
    (example,), _ = read(write_parquet(tmp_path / "t.parquet", [{"audio_filepath": "a.wav", "text": "one"}]))
    assert len(decoded(example)) == 8000
