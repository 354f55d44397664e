"""Hugging Face data sets on disk: every form of recording, other columns, what is listed or refused."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import AudioError, load_audio
from jaxthd.data.example import Alternative, Cell, Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.columns import require_columns
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import Containers, SourceSetting
from jaxthd.errors import UserError
from jaxthd.planning.lengths import clip_samples
from tests.data.sets import sound, write_arrow, write_parquet

pyarrow = pytest.importorskip("pyarrow")

WAVE = np.random.default_rng(0).uniform(-0.5, 0.5, 4000).astype(np.float32)
RATE = 8000


def read(path: Path, *columns: str, **data: Any) -> tuple[list[Example], list[Skipped]]:
    source = open_source(SourceSetting(str(path), columns=columns))
    source.digest()
    found = source.read(DataConfig(columns=columns, **data))
    require_columns([source.columns])
    return found


def decoded(example: Example) -> np.ndarray:
    (clip,) = example.clips
    assert isinstance(clip, Clip)
    samples = load_audio(clip.path, clip.offset, clip.duration, member=clip.member)
    assert clip_samples(clip) == len(samples)
    return samples


WRITTEN = Path(__file__).parents[1] / "references" / "huggingface"
"""By tests/references/huggingface.py."""


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


@pytest.mark.parametrize("type_", ["list", "large", "fixed"])
def test_lists_of_lists_are_channels_or_samples_by_their_shape(tmp_path: Path, type_: str):
    wave = np.random.default_rng(0).uniform(-0.5, 0.5, (1000, 2)).astype(np.float32)
    inner = {
        "list": pyarrow.list_(pyarrow.list_(pyarrow.float32())),
        "large": pyarrow.large_list(pyarrow.large_list(pyarrow.float32())),
        "fixed": pyarrow.list_(pyarrow.list_(pyarrow.float32(), 2)),
    }[type_]
    for number, rows in enumerate((wave, wave.T) if type_ != "fixed" else (wave,)):
        audio = pyarrow.array([rows.tolist()] * 3, inner)
        table = pyarrow.table({"audio": audio, "sampling_rate": [16_000] * 3, "text": list("abc")})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
        examples, _ = read(tmp_path / f"{number}.parquet")
        for example in examples:
            np.testing.assert_allclose(decoded(example), wave.mean(1), atol=1e-6)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.zeros((100, 100)).tolist(), r"samples of shape \[100, 100\]; expected \[samples\], \[channels"),
        ([[0.0] * 1000, [0.0] * 999], "lists of 1000 and of 999 samples; expected as many in each channel"),
        ([[0.0] * 1000, None], "lists of 1000 and of None samples"),
        ([], "it holds no samples; expected"),
        ([[], []], "it holds no samples; expected"),
        ([[[0.0] * 1000]], "samples of type list.*; expected"),
        ([1, 2, 3] * 1000, "samples of type int64; expected floating-point numbers, or int16: convert"),
        ([[1] * 1000] * 2, "samples of type int64; expected floating-point numbers, or int16: convert"),
        (["a"] * 1000, "samples of type object; expected floating-point numbers"),
    ],
)
def test_lists_that_are_no_samples_are_named(tmp_path: Path, array: list, why: str):
    row = {"audio": {"array": array, "sampling_rate": RATE}, "text": "x"}
    (example,), _ = read(write_parquet(tmp_path / "t.parquet", [row]))
    with pytest.raises(AudioError, match=why):
        load_audio(example.clips[0].path, member=example.clips[0].member)


def test_columns_have_other_names_and_the_rest_are_fields(tmp_path: Path):
    held = {"bytes": sound(0.5), "path": "a.wav"}
    row = {"speech": held, "audio": b"-", "raw": "ONE", "sentence": "no", "duration": 500.0, "speaker": 3}
    path = write_parquet(tmp_path / "t.parquet", [row | {"emotion": [0.1], "spans": [{"word": "one"}]}])
    (example,), _ = read(path, "audio=speech", "text=raw", "duration=")
    assert example.text == "ONE"
    assert len(decoded(example)) == 8000
    assert dict(example.fields) == {"sentence": "no", "speaker": 3, "spans": [{"word": "one"}]}
    with pytest.raises(UserError, match=r"'nothing', which no item of .* fields speech, audio"):
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


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"audio": f"{first + n}.wav", "text": f"text {first + n}", "n": first + n} for n in range(count)]


def refused(path: Path | str, said: str) -> None:
    """Everything that looks at the files says the same, before anything is trained."""
    source = open_source(SourceSetting(str(path)))
    for read_it in (source.containers, source.files, lambda: source.read(DataConfig())):
        with pytest.raises(UserError, match=said):
            read_it()


def refused_as_read(path: Path | str, said: str) -> None:
    source = open_source(SourceSetting(str(path)))
    for read_it in (source.digest, lambda: source.read(DataConfig())):
        with pytest.raises(UserError, match=said):
            read_it()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("names", "gone", "said"),
    [
        ("train-0000{}-of-00003", 1, r"2 of the 3 parts that train-0000\d-of-00003.*train-00001-of-00003"),
        ("train-0000{}-of-00003", 2, "2 of the 3 parts"),
        ("train-0000{}-of-00003", 0, "2 of the 3 parts"),
        ("part_{}_of_3", 1, "2 of the 3 parts"),
        ("000{}", 1, "files numbered 0 to 2, and none has the number 1"),
        ("part.{}", 1, "files numbered 0 to 2, and none has the number 1"),
    ],
)
def test_a_part_that_is_missing_ends_the_run(tmp_path: Path, kind: str, names: str, gone: int, said: str):
    write = write_parquet if kind == "parquet" else write_arrow
    (tmp_path / "data").mkdir()
    files = [tmp_path / "data" / f"{names.format(n)}.{kind}" for n in range(3)]
    for n, file in enumerate(files):
        write(file, rows_of(2, n))
    source = open_source(SourceSetting(str(tmp_path)))
    assert (source.containers(), source.files()) == (Containers(3, 3), files)
    assert len(read(tmp_path)[0]) == 6
    files[gone].unlink()
    refused(tmp_path, said)


def test_parts_counted_from_1_are_whole_and_those_of_two_sets_are_not(tmp_path: Path):
    for n in (1, 2):
        write_parquet(tmp_path / f"part-{n}-of-2.parquet", rows_of(1, n))
    assert len(read(tmp_path)[0]) == 2
    for n in (2019, 2022):
        (tmp_path / "years").mkdir(exist_ok=True)
        write_parquet(tmp_path / "years" / f"{n}.parquet", rows_of(1, n))
    assert len(read(tmp_path / "years")[0]) == 2
    write_parquet(tmp_path / "part-1-of-1.parquet", rows_of(1))
    refused(tmp_path, r"part-1-of-2\.parquet of 2 parts|part-1-of-1\.parquet of 1 parts")


def test_parts_that_a_user_names_are_the_users_choice_and_noted(tmp_path: Path):
    for n in range(3):
        write_parquet(tmp_path / f"train-0000{n}-of-00003.parquet", rows_of(1, n))
    for path, there in (
        ("train-00000-of-00003", 1),
        ("train-0000{1..2}-of-00003", 2),
        ("train-0000{0..2}-of-00003", 3),
    ):
        source = open_source(SourceSetting(f"{tmp_path}/{path}.parquet"))
        example = path.replace("{1..2}", "1")
        notes = (f"{there} of the 3 parts that {example}.parquet's name counts",) if there < 3 else ()
        assert source.containers() == Containers(3, there, notes)
        assert len(source.read(DataConfig())[0]) == there


def test_what_would_not_be_read_of_a_folder_is_refused(tmp_path: Path):
    write_parquet(tmp_path / "a.parquet", rows_of(1))
    for name in ("b.parquet.zst", "b.parquet.incomplete", "b.arrow.tmp"):
        (tmp_path / name).write_bytes(b"x")
        refused(tmp_path, rf"{name} is (unfinished|compressed)")
        (tmp_path / name).unlink()
    (tmp_path / "README.md.tmp").write_bytes(b"x")
    assert len(read(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("t.parquet", lambda data: b"", "holds no bytes"),
        ("t.arrow", lambda data: b"", "holds no bytes"),
        ("t.parquet", lambda data: data[: len(data) // 2], "footer"),
        ("t.parquet", lambda data: data + b"xx", "footer"),
        ("t.parquet", lambda data: data + data, "several parquet files joined"),
        (
            "stream.arrow",
            lambda data: data + data,
            r"\d+ bytes follow the end mark of the stream, at byte \d+",
        ),
        ("stream.arrow", lambda data: data[:-8], "the stream has no end mark: it ends early"),
        ("stream.arrow", lambda data: data[:-3], "stream.arrow: "),
        ("stream.arrow", lambda data: data[: len(data) // 2], "stream.arrow: "),
        ("file.arrow", lambda data: data[:-8], "file.arrow: "),
        ("file.arrow", lambda data: data[: len(data) // 2], "file.arrow: "),
        ("t.parquet", lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("t.parquet", lambda data: b"<html>404</html>", "a page of HTML"),
        ("t.parquet", gzip.compress, r"compressed \(gzip\)"),
        ("t.parquet", lambda data: b"ARROW1" + data, "an arrow file.*rename it"),
        ("t.arrow", lambda data: b"PAR1" + data, "a parquet file.*rename it"),
    ],
)
def test_a_damaged_table_ends_the_run_alone_and_among_others(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], said: str
):
    path = tmp_path / name
    if name.endswith(".parquet"):
        write_parquet(path, rows_of(9))
    else:
        write_arrow(path, rows_of(9), stream=not name.startswith("file"))
    assert len(read(path)[0]) == 9
    path.write_bytes(damage(path.read_bytes()))
    refused_as_read(path, said)
    (write_parquet if path.suffix == ".parquet" else write_arrow)(path.with_stem("a"), rows_of(3))
    refused_as_read(tmp_path, said)


def test_a_stream_cut_after_any_batch_ends_the_run(tmp_path: Path):
    whole = write_arrow(tmp_path / "t.arrow", rows_of(9), group=1).read_bytes()
    for size in range(8, len(whole), 8):
        (tmp_path / "t.arrow").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"t\.arrow"):
            read(tmp_path / "t.arrow")


def test_a_table_without_rows_is_an_error(tmp_path: Path):
    table = pyarrow.Table.from_pylist(rows_of(1)).slice(0, 0)
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    write_parquet(tmp_path / "a.parquet", rows_of(1))
    for stream in (True, False):
        with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(
            str(tmp_path / "b.arrow"), table.schema
        ):
            pass
        refused_as_read(tmp_path / "b.arrow", r"b\.arrow holds no rows")
    (tmp_path / "b.arrow").unlink()
    for path in (tmp_path / "b.parquet", tmp_path):
        refused_as_read(path, r"b\.parquet holds no rows")


def test_a_group_of_more_rows_than_are_listed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_parquet(tmp_path / "t.parquet", rows_of(9))
    column = pyarrow.parquet.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + 20] = b"\xff" * 20
    path.write_bytes(data)
    examples, skipped = read(path)
    assert (len(examples), len(skipped)) == (6, 3)
    monkeypatch.setattr("jaxthd.data.sources.huggingface.MOST_ROWS", 2)
    refused_as_read(path, r"t\.parquet, group 1: ")


def test_an_arrow_batch_that_cannot_be_read_ends_the_run(tmp_path: Path):
    path = write_arrow(tmp_path / "t.arrow", rows_of(9))
    data = bytearray(path.read_bytes())
    second = data.index(b"\xff\xff\xff\xff", data.index(b"\xff\xff\xff\xff", 8) + 8)
    data[second + 8 : second + 40] = bytes(32)  # the metadata of a message
    path.write_bytes(data)
    refused_as_read(path, r"t\.arrow")


def write_info(path: Path, rows: int, **more: Any) -> None:
    """dataset_info.json, as datasets writes it, in part."""
    split = {"name": "train", "num_bytes": 1, "num_examples": rows, "dataset_name": "parquet", **more}
    path.write_text(json.dumps({"builder_name": "parquet", "splits": {"train": split}}))


def test_rows_that_records_count_must_be_there(tmp_path: Path):
    for n in range(2):
        write_parquet(tmp_path / f"parquet-train-0000{n}-of-00002.parquet", rows_of(3 + n))
    info = tmp_path / "dataset_info.json"
    write_info(info, 7, shard_lengths=[3, 4])
    assert len(read(tmp_path)[0]) == 7
    assert info in open_source(SourceSetting(str(tmp_path))).files()
    write_info(info, 10)
    refused_as_read(tmp_path, r"dataset_info\.json counts 10 rows in 2 files, .*, and there are 7; expected")
    write_info(info, 7, shard_lengths=[4, 3])
    refused_as_read(tmp_path, r"counts 4 rows in parquet-train-00000-of-00002\.parquet, and there are 3")
    info.write_text(json.dumps({"splits": {"test": {"num_examples": 1}, "train": {"num_examples": 8}}}))
    refused_as_read(tmp_path, "counts 8 rows")
    info.rename(tmp_path / "dataset_infos.json")
    (tmp_path / "dataset_infos.json").write_text(
        json.dumps({"default": {"splits": {"train": {"num_examples": 9}}}})
    )
    refused_as_read(tmp_path, r"dataset_infos\.json counts 9 rows")
    (tmp_path / "dataset_infos.json").unlink()
    readme = "---\ndataset_info:\n  splits:\n  - name: train\n    num_examples: 70\n---\n# Voices\n"
    (tmp_path / "README.md").write_text(readme)
    source = open_source(SourceSetting(str(tmp_path)))
    source.read(DataConfig())
    name = "parquet-train-00000-of-00002.parquet"
    assert source.containers() == Containers(
        2, 2, (f"README.md counts 70 rows in 2 files, {name} first, and there are 7",)
    )
    for text in ("{", "[]", "3", '{"splits": 3}', '{"splits": {"train": 3}}', '{"splits": {}}', "\xff"):
        info.write_bytes(text.encode("latin-1"))
        assert len(read(tmp_path)[0]) == 7


def test_numbers_that_save_to_disk_keeps_of_a_filtered_set_are_noted(tmp_path: Path):
    write_arrow(tmp_path / "data-00000-of-00001.arrow", rows_of(5))
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write_info(tmp_path / "dataset_info.json", 10)
    source = open_source(SourceSetting(str(tmp_path)))
    assert len(source.read(DataConfig())[0]) == 5
    note = "dataset_info.json counts 10 rows in data-00000-of-00001.arrow, and there are 5"
    assert source.containers() == Containers(1, 1, (note,))


def test_files_that_state_json_lists_must_be_there(tmp_path: Path):
    names = [f"data-0000{n}-of-00003.arrow" for n in range(3)]
    for n, name in enumerate(names):
        write_arrow(tmp_path / name, rows_of(2, n))
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    assert len(read(tmp_path)[0]) == 6
    (tmp_path / names[1]).unlink()
    refused(tmp_path, rf"1 of the 3 files that .*state\.json lists are not there, .*{names[1]}")
    state.write_text(json.dumps({"_data_files": [{"filename": name} for name in names[::2]]}))
    refused(tmp_path, "2 of the 3 parts")


def test_splits_that_are_listed_and_gone_are_named(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refused(tmp_path, r"holds the splits train \(dataset_dict\.json lists test, too, and there is no such")


def test_a_summary_lists_files_and_rows(tmp_path: Path):
    groups: list[Any] = []
    for n in range(2):
        table = pyarrow.Table.from_pylist(rows_of(4, n))
        with pyarrow.parquet.ParquetWriter(
            tmp_path / f"{'ab'[n]}.parquet", table.schema, metadata_collector=groups
        ) as writer:
            writer.write_table(table, row_group_size=2)
        groups[-1].set_file_path(f"{'ab'[n]}.parquet")
    pyarrow.parquet.write_metadata(table.schema, tmp_path / "_metadata", metadata_collector=groups)
    assert len(read(tmp_path)[0]) == 8
    assert tmp_path / "_metadata" in open_source(SourceSetting(str(tmp_path))).files()
    write_parquet(tmp_path / "b.parquet", rows_of(3))
    refused_as_read(tmp_path, r"_metadata counts 4 rows in b\.parquet, and there are 3")
    (tmp_path / "b.parquet").unlink()
    refused(tmp_path, r"_metadata, of 2 files, of which 1 are not there, .*b\.parquet first")


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
