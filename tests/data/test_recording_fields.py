"""Recordings of lines: every form that is read, and fields that name one and are not read."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DataConfig
from jaxthd.data.example import Clip
from jaxthd.data.sources.conversations import TAGS
from jaxthd.data.sources.manifest import ManifestSource, read_chats
from jaxthd.data.sources.recordings import other_recordings
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.errors import UserError
from tests.data.sets import read_manifest

ANSWER = {"role": "assistant", "content": "Yes."}
GOOD = {"audio_filepath": "good.wav", "text": "one"}
A, B = Path("a.wav"), Path("b.wav")


def write(folder: Path, *lines: object, name: str = "m.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


def chat(content: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **beside}


def asked(folder: Path, line: object, **options: Any) -> list[object]:
    """The parts of the first turn: texts, and recordings as paths from the folder, with ranges if any."""
    (example,), skipped = read_manifest(write(folder, line), **options)
    assert not skipped
    return [part if isinstance(part, str) else _short(folder, part) for part in example.turns[0].parts]


def _short(folder: Path, clip: Any) -> object:
    path = clip.path.relative_to(folder) if clip.path.is_relative_to(folder) else clip.path
    return path if (clip.offset, clip.duration) == (0.0, None) else (path, clip.offset, clip.duration)


def refused(folder: Path, line: object, **options: Any) -> str:
    (good,), (skipped,) = read_manifest(write(folder, GOOD, line), **options)
    assert good.key == "1:good.wav"
    return skipped.reason


PART = {"type": "audio"}


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (chat("<audio>What?", audios=["a.wav"]), [A, "What?"]),
        (
            chat("<audio>Or<audio>?", audios=["a.wav", {"path": "b.wav", "offset": 1}]),
            [A, "Or", (B, 1.0, None), "?"],
        ),
        (
            {
                "audios": ["a.wav"],
                "conversations": [
                    {"from": "human", "value": "<audio>\nWhat?"},
                    {"from": "gpt", "value": "Yes."},
                ],
            },
            [A, "\nWhat?"],
        ),
        (chat("What <sound>?", sounds=[{"audio_filepath": "a.wav"}]), ["What ", A, "?"]),
        (chat("<|audio_1|> or <|audio_2|>?", audio=["a.wav", {"url": "b.wav"}]), [A, " or ", B, "?"]),
        (chat("{audio}?", audios="a.wav"), [A, "?"]),
        (chat("{audio}?", audios="a.wav", offset=0.5, duration=2), [(A, 0.5, 2.0), "?"]),
        (chat("{audio}?", audio=None, audios=[], sound="", sounds=["a.wav"]), [A, "?"]),
        (chat("What?", audio_filepath="a.wav", offset=0.5, duration=2), [(A, 0.5, 2.0), "What?"]),
        (chat("What? {audio}", audio_filepath="a.wav"), ["What? ", A]),
        (chat("What? <audio>", audio_filepath="a.wav"), ["What? ", A]),
        (chat([PART | {"audio_url": "a.wav"}, {"type": "text", "text": "?"}]), [A, "?"]),
        (chat([PART | {"url": "a.wav"}, {"type": "input_text", "text": "?"}]), [A, "?"]),
        (chat([{"type": "audio_url", "audio_url": {"url": "a.wav"}}, {"text": "?"}]), [A, "?"]),
        (chat([{"type": "input_audio", "input_audio": {"data": "a.wav", "format": "wav"}}]), [A]),
        (chat([{"audio": "a.wav"}, {"text": "?"}]), [A, "?"]),
        (chat([PART | {"audio": {"path": "a.wav"}, "offset": 1, "text": None}]), [(A, 1.0, None)]),
        (
            chat([PART | {"path": None, "audio": "a.wav"}, {"type": "text", "text": "?", "audio": None}]),
            [A, "?"],
        ),
        (chat([PART | {"url": "file:///x/a%20b.wav"}]), [Path("/x/a b.wav")]),
        ({"messages": [{"role": "user", "content": "Who?", "audio": "a.wav"}, ANSWER]}, [A, "Who?"]),
        ({"messages": [{"role": "user", "content": "? {audio}", "audios": ["a.wav"]}, ANSWER]}, ["? ", A]),
        ({"conversations": [{"role": "user", "content": "{audio}"}, ANSWER], "audio": ["a.wav"]}, [A]),
        ({"audio": "a.wav", "text": "x", "offset": 0.5, "duration": 1}, [(A, 0.5, 1.0)]),
        ({"audio": {"path": "a.wav"}, "text": "x"}, [A]),
        ({"audios": ["a.wav"], "text": "x", "audio_filepath": None}, [A]),
        (GOOD | {"context": "<audio>What?"}, [Path("good.wav"), "What?"]),
        (GOOD | {"audio_filepath": "file:///x/a.wav"}, [Path("/x/a.wav")]),
    ],
)  # fmt: skip
def test_a_recording_is_read_in_every_form(tmp_path: Path, line: dict[str, Any], parts: list[object]):
    assert asked(tmp_path, line) == parts


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_is_a_placeholder_of_a_listed_recording_and_never_text(tmp_path: Path, tag: str):
    assert asked(tmp_path, chat(f"So: {tag}?", audios=["a.wav"])) == ["So: ", A, "?"]
    assert "names no recording for it" in refused(tmp_path, chat(f"So: {tag}?"))
    assert "names no recording for it" in refused(tmp_path, chat(f"{{audio}} {tag}", audios=["a.wav"]))
    assert "0 audio placeholders" in refused(tmp_path, chat("What?", audios=["a.wav"]))
    answer = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"The {tag}."}]}
    assert asked(tmp_path, answer) == ["?"]
    system = {"messages": [{"role": "system", "content": tag}, *answer["messages"]]}
    assert "names no recording for it" in refused(tmp_path, system)
    assert "names no recording for it" in refused(tmp_path, GOOD | {"system_prompt": tag})


def test_recordings_go_with_prompts_and_preferences_too(tmp_path: Path):
    pair = {"chosen": "Yes.", "rejected": "No."}
    for line in (
        {"prompt": "<audio>Who?", "audios": ["a.wav"]} | pair,
        {"prompt": [{"role": "user", "content": "Who?"}], "audio_filepath": "a.wav"} | pair,
        {"messages": [{"role": "user", "content": "<sound>Who?"}], "sounds": ["a.wav"]} | pair,
        {
            "chosen": [{"role": "user", "content": "Who?"}, ANSWER],
            "rejected": "No.",
            "audio_filepath": "a.wav",
        },
        {"audio": "a.wav", "context": "<audio> Who?"} | pair,
        {"audios": ["a.wav"], "prompt": "<audio>Who?"},
        {"audio_filepath": "a.wav", "prompt": "Who?"},
    ):
        parts = asked(tmp_path, line, prompts=True)
        assert parts[0] == A, line
        assert str(parts[-1]).strip() == "Who?"
        wrong = {"audio": None, "audios": None, "sounds": None, "audio_filepath": None, "wav": "a.wav"}
        plain = json.loads(json.dumps(line | wrong).replace("<audio>", "").replace("<sound>", ""))
        assert "wav names a recording that is not read" in refused(tmp_path, plain, prompts=True)


@pytest.mark.parametrize("text", ["a.wav", " clips/a.FLAC\n", "https://x/a.mp3?key=1"])
def test_a_text_that_is_nothing_but_the_name_of_a_recording_is_refused(tmp_path: Path, text: str):
    """Kimi-Audio writes {"role": "user", "message_type": "audio", "content": "a.wav"}."""
    assert "which names a recording" in refused(tmp_path, chat(text))
    assert asked(tmp_path, chat(f"What is said in {text.strip()} ?"))
    spoken = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}
    assert asked(tmp_path, spoken) == ["?"]


@pytest.mark.parametrize("name", ["audio_id", "recordingId", "clip_key"])
def test_the_id_of_a_recording_costs_a_line_that_has_none(tmp_path: Path, name: str):
    assert f"{name} names a recording that is not read" in refused(tmp_path, chat("What?", **{name: "x17"}))
    lines = chat("What?", audio_filepath="a.wav", **{name: "x17"}), chat("What?", utterance_id="x17")
    source = ManifestSource(SourceSetting(str(write(tmp_path, *lines))))
    examples, skipped = source.read(DataConfig())
    assert (len(examples), skipped, source.unread_recordings) == (2, [], {})


@pytest.mark.parametrize("name", ["start", "start_time", "Begin", "segment_start", "audio_start", "offset_s"])
def test_a_start_that_is_not_read_is_counted(tmp_path: Path, name: str):
    """Without an offset the recording is read from its beginning, and the text is that of a part."""
    lines = GOOD | {name: 1.5}, GOOD | {name: 2, "offset": 2}, GOOD | {name: 0}, GOOD | {name: "1"}
    path = write(tmp_path, *lines, chat("What?", **{name: 3}))
    source = ManifestSource(SourceSetting(str(path)))
    examples, _ = source.read(DataConfig())
    assert (len(examples), source.unread_recordings) == (5, {name: 1})


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        *(({name: "x/a.wav"}, name) for name in ("input", "source", "Audio_Path", "noise", "url", "note")),
        *(({name: "a"}, name) for name in ("audio_path", "wav", "WavPath", "audioFilepath", "mp3")),
        *(({name: "a"}, name) for name in ("file", "path", "file_name", "speech_path", "recording", "clip")),
        *(({"x": f"a b.{s}"}, "x") for s in ("flac", "MP3", "opus", "m4a", "aif", "au", "sph", "mp4")),
        ({"audio_url": "https://x/y"}, "audio_url"),
        ({"link": "https://x/a.wav?key=1"}, "link"),
        ({"x": "data:audio/wav;base64,UklGRg"}, "x"),
        ({"files": [{"mime": "audio/wav", "data": "UklGRg"}]}, "files"),
        ({"x": {"array": [0.1, 0.2], "sampling_rate": 16000}}, "x"),
        ({"x": {"bytes": "UklGRg", "path": None}}, "x"),
        ({"wav": [0.1, 0.2]}, "wav"),
        ({"custom": {"audio_path": "a"}}, "custom.audio_path"),
        ({"meta": {"files": [{"name": "a.wav"}]}}, "meta.files"),
        ({"target_audio": {"id": "r", "sources": [{}], "sampling_rate": 16000}}, "target_audio"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_read_costs_the_line_only_where_no_recording_is_read(
    tmp_path: Path, beside: dict[str, Any], name: str
):
    assert other_recordings(beside) == (name,)
    reason = refused(tmp_path, chat("What?", **beside))
    assert reason.startswith(f"{name} names a recording that is not read; expected audio or audio_filepath")
    assert len(reason) < 200
    if "." not in name:
        assert f"data.columns audio={name}, or {name}= to leave it out" in reason
    lines = GOOD | beside, chat("{audio}?", audio=["a.wav"], **beside)
    source = ManifestSource(SourceSetting(str(write(tmp_path, *lines))))
    examples, skipped = source.read(DataConfig())
    assert (len(examples), skipped, source.unread_recordings) == (2, [], {name: 2})
    without = {"text": "one", **beside}
    assert f"audio_filepath is missing: {name} names a recording" in refused(tmp_path, without)


@pytest.mark.parametrize(
    "beside",
    [
        dict.fromkeys(("audio_path", "wav", "audios", "images"), ""),
        {"audio_path": [], "wav": [], "audio": [], "videos": []},
        dict.fromkeys(("audio_path", "recording", "sounds", "image")),
        {"audio_length": 3.5, "wav": 3, "recording": True, "clip": 0.5, "pcm": [1]},
        {"has_audio": "no", "audio_tokens": [1, 2]},
        {"path": "books/a.txt", "file": "main.py", "recording": "the third of May", "speech": "formal"},
        {"domain": "example.net.au", "site": "https://example.net.au", "title": "Rome. The wav"},
        {"note": "first line\nsong.mp3", "voice": "alloy", "speaker": {"name": "x", "age": 3}},
        {"voice": "gmw/en-US+f2"},
    ],
)  # fmt: skip
def test_fields_that_name_no_recording_are_no_matter(tmp_path: Path, beside: dict[str, Any]):
    assert asked(tmp_path, chat("What?", **beside)) == ["What?"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (chat([{"type": "input_audio", "input_audio": {"data": "UklGRg"}}]), "in the line itself (data)"),
        (chat([PART | {"audio": "data:audio/wav;base64,UklGRg"}]), "expected the path of a file"),
        (chat([PART | {"audio": {"array": [0.5], "sampling_rate": 8}}]), "in the line itself (array)"),
        (chat([PART | {"audio": "A" * 5000}]), "is no path, but 5,000 characters"),
        (chat([PART | {"url": "ftp://x/a.wav"}]), "or a URL of s3, gs, az, http or https"),
        (GOOD | {"audio_filepath": "hdfs://x/a.wav"}, "or a URL of s3, gs, az, http or https"),
        (chat([PART | {"file": "a.wav"}]), "found ['file', 'type']: file names a recording; call it path"),
        (chat([{"type": "text", "text": "?", "audio": "a.wav"}]), "a text part with audio, which names"),
        (chat([{"type": "video", "video": "a.mp4"}]), "type is 'video'; expected text or audio"),
        (chat([{"image": "a.png"}]), "type is None; expected text or audio"),
        (chat("{audio}?", audio=[{"file": "a.wav"}]), "found ['file']: file names a recording"),
        (chat("{audio}?", audio={"x": 1}), "path is missing; found ['x'] in audio"),
        (chat("{audio}?", audio=["a.wav"], audios=["b.wav"]), "audio and audios are given"),
        (chat("{audio}?", audio=["a.wav"], images=["a.png"]), "images is given; expected text and"),
        (chat("?", Video="a.mp4"), "Video is given; expected text and recordings alone"),
        (chat("<|audio_2|>?", audio=["a.wav"]), "audio tags are numbered [2]"),
        (chat("<audio><audio>?", audios=["a.wav"]), "2 audio placeholders ({audio}) but 1 clips"),
        ({"messages": [{"role": "user", "content": "?", "wav": "a.wav"}, ANSWER]}, "messages.wav names a"),
        ({"messages": [{"role": "user", "content": "?"}, ANSWER | {"audio": "a"}]}, "messages.audio names"),
        ({"messages": [{"role": "system", "content": "?"}, ANSWER], "audio_filepath": "a"}, "no turn of the"),
        ({"audio": ["a.wav", "b.wav"], "text": "x"}, "audio is ['a.wav', 'b.wav']; expected the path of one"),
        ({"audio": {"file": "a.wav"}, "text": "x"}, "found ['file']: file names a recording"),
    ],
)  # fmt: skip
def test_a_recording_that_is_not_read_is_refused_by_name(tmp_path: Path, line: dict[str, Any], reason: str):
    assert reason in refused(tmp_path, line)


def test_a_recording_beside_the_one_that_is_read_is_counted(tmp_path: Path):
    spoken = {
        "messages": [{"role": "user", "content": "{audio}"}, ANSWER | {"audio": "x.wav"}],
        "audio": ["a.wav"],
    }
    inline = chat([PART | {"path": "a.wav"}], audio_filepath="b.wav")
    lines = GOOD | {"audio": "b.wav"}, GOOD | {"audio": "good.wav"}, spoken, inline
    source = open_source(SourceSetting(str(write(tmp_path, *lines))))
    examples, skipped = source.read(DataConfig())
    assert [len(example.clips) for example in examples] == [1] * 4
    assert not skipped
    assert source.unread_recordings == {"audio": 1, "messages.audio": 1, "audio_filepath": 1}


def test_conversations_to_answer_are_judged_alike(tmp_path: Path):
    line = {"messages": [{"role": "user", "content": "<audio>Who?"}], "audios": ["a.wav"]}
    (example,) = read_chats(write(tmp_path, line))
    assert example.turns[0].parts == (Clip(tmp_path / "a.wav"), "Who?")
    lost = {"messages": [{"role": "user", "content": "Who?"}], "wav": "a.wav"}
    with pytest.raises(UserError, match="line 1: wav names a recording that is not read"):
        read_chats(write(tmp_path, lost))
