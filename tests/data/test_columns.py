"""data.columns: the fields of every kind of data set by the names that they have there."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DataConfig
from jaxthd.data.example import Clip, Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources import synthetic
from jaxthd.data.sources.columns import FIELDS, require_columns
from jaxthd.data.sources.manifest import read_chats
from jaxthd.data.sources.registry import open_source, training_sources
from jaxthd.data.sources.source import Source, SourceSetting
from jaxthd.errors import UserError
from tests.data.sets import sound, write_parquet, write_tar

TEXTS = ("uno", "dos tres", "cuatro", "")
"""Ragged, and one without a text, which is skipped."""
HELD = sound(0.5)
Write = Callable[[Path, dict[str, str]], tuple[str, str]]
"""(folder, {field: its name in the set}) -> (the setting's path, its tar files)."""


def opened(path: str, *columns: str, tars: str = "", **setting: Any) -> Source:
    return open_source(SourceSetting(path, tarred_audio=tars, columns=columns, **setting))


def read(path: Path | str, *columns: str, **setting: Any) -> tuple[list[Example], list[Skipped]]:
    source = opened(str(path), *columns, **setting)
    found = source.read(DataConfig())
    require_columns([source.columns])
    return found


def lines(path: Path, *entries: object) -> Path:
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def said(examples: list[Example]) -> list[tuple[str, list[list[object]], str]]:
    """Keys, the prompts with the names of their recordings, and answers."""

    def name(part: object) -> object:
        return (
            (part.member.name.partition(" ")[0] if part.member else part.path.name)
            if isinstance(part, Clip)
            else part
        )

    turns = [[[name(part) for part in turn.parts] for turn in example.turns[:-1]] for example in examples]
    return [(e.key, of_e, e.text) for e, of_e in zip(examples, turns, strict=True)]


# --- one set of utterances, written in every form ---


def fields_of(number: int, names: dict[str, str], **more: Any) -> dict[str, Any]:
    fields = {"context": f"Question {number}?", "system_prompt": "Listen.", "text": TEXTS[number], **more}
    return {names.get(field, field): value for field, value in fields.items()}


def jsonl(folder: Path, names: dict[str, str]) -> tuple[str, str]:
    entries = [fields_of(n, names, audio_filepath=f"{n}.wav", duration=0.5) for n in range(len(TEXTS))]
    return str(lines(folder / "m.jsonl", *entries)), ""


def tarred(folder: Path, names: dict[str, str]) -> tuple[str, str]:
    """Two tar files, chosen by a field."""
    for shard in range(2):
        write_tar(folder / f"audio_{shard}.tar", {f"{n}.wav": HELD for n in range(shard, len(TEXTS), 2)})
    entries = [fields_of(n, names, audio_filepath=f"{n}.wav", shard_id=n % 2) for n in range(len(TEXTS))]
    return str(lines(folder / "m.jsonl", *entries)), str(folder / "audio_{0..1}.tar")


def cut(number: int, names: dict[str, str], source: dict[str, Any]) -> dict[str, Any]:
    """A cut as lhotse writes it: its fields in `custom`, and the text in that of its supervision."""
    custom = fields_of(number, names)
    text = names.get("text", "text")
    spoken = {"id": f"s{number}", "recording_id": "r", "start": 0.0, "duration": 0.5}
    spoken |= {"text": custom.pop(text)} if text == "text" else {"custom": {text: custom.pop(text)}}
    recording = {"id": "r", "sources": [{"channels": [0], **source}], "channel_ids": [0]}
    name = names.get("audio_filepath", "recording")
    whole = {"id": f"{number}.wav", "start": 0.0, "duration": 0.5, "channel": 0, "type": "MonoCut"}
    if name == "recording":
        whole |= {"recording": recording, "custom": custom}
    else:
        first = {"id": "other", "sources": [{"channels": [0], **source, "source": "other.wav"}]}
        whole |= {"recording": first, "custom": {**custom, name: recording}}
    return whole | {"supervisions": [spoken]}


def cuts(folder: Path, names: dict[str, str]) -> tuple[str, str]:
    entries = [cut(n, names, {"type": "file", "source": f"{n}.wav"}) for n in range(len(TEXTS))]
    return str(lines(folder / "cuts.jsonl", *entries)), ""


def shar(folder: Path, names: dict[str, str]) -> tuple[str, str]:
    """The contexts lie in a file of their own."""
    entries = [cut(n, names, {"type": "shar", "source": ""}) for n in range(len(TEXTS))]
    context, name = names.get("context", "context"), names.get("audio_filepath", "recording")
    own = [{"cut_id": x["id"], context: x["custom"].pop(context)} for x in entries]
    lines(folder / "cuts.000000.jsonl.gz", *entries)
    lines(folder / f"{context}.000000.jsonl.gz", *own)
    for field in {"recording", name}:
        held = {f"{n}.wav.flac": HELD for n in range(len(TEXTS))}
        write_tar(folder / f"{field}.000000.tar", held)
    return str(folder), ""


def parquet(folder: Path, names: dict[str, str]) -> tuple[str, str]:
    rows = [
        {
            names.get(field.replace("audio", "audio_filepath"), field): value
            for field, value in fields_of(n, {}, audio={"bytes": HELD, "path": f"{n}.wav"}).items()
        }
        for n in range(len(TEXTS))
    ]
    return str(write_parquet(folder / "t.parquet", rows)), ""


RENAMED = {
    "text": "transcript",
    "context": "instruction",
    "system_prompt": "system",
    "audio_filepath": "clip",
}


@pytest.mark.parametrize("write", [jsonl, tarred, cuts, shar, parquet])
@pytest.mark.parametrize("which", [tuple(RENAMED), ("text",), ("audio_filepath",)])
def test_every_field_of_every_kind_of_data_set_may_have_another_name(
    write: Write, which: tuple[str, ...], tmp_path: Path
):
    names = {field: RENAMED[field] for field in which}
    if write is tarred and "text" in which:
        names["shard_id"] = "shard"
    (tmp_path / "plain").mkdir()
    (tmp_path / "renamed").mkdir()
    path, tars = write(tmp_path / "plain", {})
    wanted, without = read(path, tars=tars)
    assert [example.text for example in wanted] == ["uno", "dos tres", "cuatro"]
    path, tars = write(tmp_path / "renamed", names)
    columns = [f"{field}={name}" for field, name in names.items()]
    found, skipped = read(path, *columns, tars=tars)
    if write in (cuts, shar) and "audio_filepath" in which:
        assert all(example.clips[0].path != tmp_path / "renamed" / "other.wav" for example in found)
    assert said(found) == said(wanted)
    assert [item.key for item in skipped] == [item.key for item in without]
    typo = [*columns[1:], f"{which[0]}=typo"]
    if not (write is shar and which[0] == "audio_filepath"):  # then the tar files are not there
        with pytest.raises(UserError, match=r"names 'typo', which no item of .* has; expected|audio=clip to"):
            read(path, *typo, tars=tars)


def test_fields_of_messages_have_other_names_too(tmp_path: Path):
    """In conversations, in prompts and answers of preferences, and in the rows of a table."""
    talk = [{"speaker": "user", "said": "<audio>What?"}, {"speaker": "assistant", "said": "Uno."}]
    columns = ("messages=turns", "role=speaker", "content=said")
    path = lines(tmp_path / "m.jsonl", {"turns": talk, "audios": ["a.wav"]}, {"turns": talk[:1]})
    (chat,), (skipped,) = read(path, *columns)
    assert said([chat]) == [("1:", [["a.wav", "What?"]], "Uno.")]
    assert "<audio> and the line names no recording" in skipped.reason
    (asked,) = read_chats(
        lines(tmp_path / "c.jsonl", {"turns": talk[:1], "audios": ["a.wav"]}), columns=columns
    )
    assert asked.turns == chat.turns[:1]
    table = write_parquet(tmp_path / "t.parquet", [{"turns": [{"speaker": "user", "said": "Hi"}, talk[1]]}])
    (row,), _ = read(table, *columns)
    assert said([row]) == [("1:", [["Hi"]], "Uno.")]
    asks = {"speaker": "user", "said": "Well?"}
    no = {"speaker": "assistant", "said": "Dos."}
    pair = {"chosen": [asks, talk[1]], "rejected": [asks, no]}
    (example,), _ = read(lines(tmp_path / "p.jsonl", pair), *columns[1:])
    assert [x.text for x in example.alternatives] == ["Uno.", "Dos."]
    with pytest.raises(UserError, match="names 'typo', which no item"):
        read(path, "messages=turns", "role=speaker", "content=said", "text=typo")


def test_a_cut_s_text_may_be_that_of_the_whole_cut_and_its_recording_another_range(tmp_path: Path):
    """lhotse reads a custom recording over the cut's range and its selected channels, or whole if it is not
    aligned with the cut's own."""
    sources = [{"type": "file", "channels": [0, 1], "source": "target.wav"}]
    recording = {"id": "t", "sources": sources, "channel_ids": [0, 1], "duration": 7.0}
    custom = {"target": recording, "target_channel_selector": 1, "whole": "uno dos"}
    plain = cut(0, {}, {"type": "file", "source": "a.wav"}) | {"start": 2.0, "custom": custom}
    unaligned = plain | {"custom": custom | {"target_unaligned": True}}
    found, _ = read(lines(tmp_path / "cuts.jsonl", plain, unaligned), "audio=target", "text=whole")
    assert [example.text for example in found] == ["uno dos"] * 2
    clips = [example.clips[0] for example in found]
    assert [(c.path.name, c.offset, c.duration) for c in clips] == [
        ("target.wav", 2, 0.5),
        ("target.wav", 0, 7),
    ]
    assert [c.channels.used for c in clips] == [(1,), (1,)]
    (example,), _ = read(lines(tmp_path / "own.jsonl", plain), "target=")
    assert (example.text, example.clips[0].path.name) == ("uno", "a.wav")


# --- items of several forms, and columns that are not there ---


def test_a_named_field_replaces_the_item_s_own_and_others_keep_theirs(tmp_path: Path):
    path = lines(
        tmp_path / "m.jsonl",
        {"wav": "a.wav", "sentence": "one", "text": "not this"},
        {"audio_filepath": "noisy.wav", "wav": "b.wav", "sentence": "two"},
        {"audio_filepath": "good.wav", "text": "one"},
    )
    examples, _ = read(path, "audio=wav", "text=sentence")
    assert [e.key for e in examples] == ["1:a.wav", "2:b.wav", "3:good.wav"]
    assert [e.text for e in examples] == ["one", "two", "one"]
    assert [dict(e.fields) for e in examples] == [{}] * 3
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Yes."}]
    (example,), _ = read(lines(tmp_path / "c.jsonl", {"messages": chat, "wav": "a.wav"}), "wav=")
    assert example.turns[0].parts == ("What?",)


def test_an_item_without_the_column_and_the_field_is_skipped(tmp_path: Path):
    path = lines(
        tmp_path / "m.jsonl", {"audio_filepath": "a.wav", "said": "uno"}, {"audio_filepath": "b.wav"}
    )
    examples, (skipped,) = read(path, "text=said")
    assert [x.text for x in examples] == ["uno"]
    assert (skipped.key, skipped.reason.partition(";")[0]) == ("2:b.wav", "text is missing")


def test_a_column_must_be_in_one_of_the_training_sets_and_the_others_are_said(tmp_path: Path):
    good = {"audio_filepath": "good.wav", "text": "one"}
    plain, named = lines(tmp_path / "m.jsonl", good), lines(tmp_path / "n.jsonl", good | {"said": "two"})
    with pytest.raises(UserError, match=r"names 'said', which no item of .*m\.jsonl has; expected one of"):
        read(plain, "text=said")
    data = DataConfig(manifest=(str(plain), str(named)), columns=("text=said",), validation_manifest="")
    sources = training_sources(data)
    assert [source.read(data)[0][0].text for source in sources] == ["one", "two"]
    require_columns([source.columns for source in sources])
    notes = [source.containers().notes for source in sources]
    assert notes == [("no line has 'said', which data.columns names: text is read by its own name",), ()]
    # Where nothing can be read without it, that is the reason.
    with pytest.raises(UserError, match="names 'wav', which no item of"):
        read(lines(tmp_path / "none.jsonl", {"sound_file": "a.wav"}), "audio=wav")


@pytest.mark.parametrize("setting", ["txt=transcript", "text", "=transcript"])
def test_an_unknown_field_is_an_error_that_lists_those_that_there_are(setting: str, tmp_path: Path):
    path = lines(tmp_path / "m.jsonl", {"audio_filepath": "a.wav", "text": "uno"})
    with pytest.raises(UserError, match=r"expected FIELD=COLUMN, with one of") as raised:
        read(path, setting)
    assert all(field in str(raised.value) for field in FIELDS)


def test_built_in_data_has_no_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(synthetic, "user_cache", lambda: tmp_path)
    monkeypatch.setitem(synthetic.SETS, "", synthetic.SETS[""]._replace(train=2, validation=1))
    with pytest.raises(UserError, match=r"data\.columns is text=said, and the fields of synthetic have"):
        training_sources(DataConfig(columns=("text=said",)))
