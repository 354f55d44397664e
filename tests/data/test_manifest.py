"""A line becomes an example or is skipped: utterances, NeMo's conversations, ShareGPT's, chat messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DataConfig
from jaxthd.config.front_end import SpeakerSegment
from jaxthd.data.example import Clip, Example, Turn
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from tests.data.sets import read_manifest

GOOD = {"audio_filepath": "a.wav", "text": "one", "duration": 1.5}
ANSWER = {"from": "Assistant", "value": "Yes.", "type": "text"}
CLIP = Path("a.wav")


def write(folder: Path, *lines: object) -> Path:
    path = folder / "manifest.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def read_one(folder: Path, line: object, **options: Any) -> Example:
    (example,), skipped = read_manifest(write(folder, line), **options)
    assert not skipped
    return example


def turns_of(folder: Path, line: object, **options: Any) -> list[tuple[str, list[object]]]:
    """(role, parts) of each turn; a recording as its path from the folder, with its range if it has one."""

    def short(part: str | Clip) -> object:
        if isinstance(part, str):
            return part
        path = part.path.relative_to(folder)
        return path if (part.offset, part.duration) == (0.0, None) else (path, part.offset, part.duration)

    return [(t.role, [short(p) for p in t.parts]) for t in read_one(folder, line, **options).turns]


def test_an_utterance_is_a_prompt_with_its_recording_and_a_transcript(tmp_path):
    line = {"audio_filepath": "clips/a.wav", "text": "né {audio}", "duration": 2, "offset": 0.25, "n": [1]}
    example = read_one(tmp_path, line)
    clip = Clip(tmp_path / "clips" / "a.wav", 0.25, 2.0)
    turns = (Turn("user", (clip,)), Turn("assistant", ("né {audio}",)))
    assert example == Example("1:clips/a.wav", turns, fields={"n": [1]})
    assert (example.clips, example.duration, example.text) == ([clip], 2.0, "né {audio}")
    asked, _ = turns_of(
        tmp_path, {"audio_filepath": "a.wav", "text": "b"}, prompt="Hear <a>!", placeholder="<a>"
    )
    assert asked == ("user", ["Hear ", CLIP, "!"])


@pytest.mark.parametrize("form", ["path", "list", "message"])
def test_who_speaks_when_stands_beside_a_recordings_path(tmp_path, form):
    segments = [{"speaker": "b", "start": 0.5, "end": 2}, {"speaker": 1, "start": 0, "end": 0.75}]
    named = {"speaker_segments": segments}
    line = {
        "path": GOOD | named,
        "list": {"audio": ["a.wav"], "text": "one"} | named,
        "message": {
            "conversations": [
                {"from": "User", "value": "a.wav", "type": "audio"} | named,
                {"from": "User", "value": "Who?", "type": "text"},
                ANSWER,
            ]
        },
    }[form]
    example = read_one(tmp_path, line)
    (clip,) = example.clips
    assert isinstance(clip, Clip)
    assert clip.speakers == (SpeakerSegment(0.5, 2.0, "b"), SpeakerSegment(0.0, 0.75, "1"))
    assert not example.fields
    (silent,) = read_one(tmp_path, GOOD | {"speaker_segments": []}).clips
    (unsaid,) = read_one(tmp_path, GOOD | {"speaker_segments": None}).clips
    assert isinstance(silent, Clip)
    assert isinstance(unsaid, Clip)
    assert (silent.speakers, unsaid.speakers) == ((), None)


@pytest.mark.parametrize(
    "segments",
    [{}, "a", [1], [{"speaker": "a"}], [{"speaker": "a", "start": 2, "end": 2}]]
    + [[{"speaker": x, "start": 0, "end": 1}] for x in (None, True, 0.5)],
)
def test_segments_of_another_form_are_skipped_with_the_reason(tmp_path, segments):
    examples, skipped = read_manifest(write(tmp_path, GOOD, GOOD | {"speaker_segments": segments}))
    assert len(examples) == len(skipped) == 1
    assert "speaker_segments" in skipped[0].reason


def test_a_prompt_without_a_placeholder_leaves_the_recording_out(tmp_path):
    assert turns_of(tmp_path, GOOD, prompt="say:") == [("user", ["say:"]), ("assistant", ["one"])]
    assert turns_of(tmp_path, GOOD, prompt="") == [("assistant", ["one"])]


def test_duration_and_offset_may_be_absent_or_null(tmp_path):
    bare = {"audio_filepath": "a.wav", "text": "one"}
    examples, skipped = read_manifest(write(tmp_path, bare, bare | {"duration": None, "offset": None}))
    assert not skipped
    assert [e.clips for e in examples] == [[Clip(tmp_path / "a.wav")]] * 2
    assert [e.duration for e in examples] == [None] * 2


def test_entries_of_one_role_in_a_row_are_one_turn_with_recordings_in_their_places(tmp_path):
    line = {
        "id": "c7",
        "conversations": [
            {"from": "System", "value": "Be brief."},
            {"from": "User", "value": "Is this", "type": "text"},
            {"from": "User", "value": "a.wav", "type": "audio", "duration": 2.5, "offset": 1},
            {"from": "user", "value": "or that?", "type": "text"},
            {"from": "USER", "value": "b/b.wav", "type": "audio", "duration": 1.25},
            ANSWER,
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Quite."},
            {"from": "gpt", "value": "Sure."},
        ],
    }
    asked = ["Is this ", (CLIP, 1.0, 2.5), " or that? ", (Path("b/b.wav"), 0.0, 1.25)]
    assert turns_of(tmp_path, line) == [
        ("system", ["Be brief."]),
        ("user", asked),
        ("assistant", ["Yes."]),
        ("user", ["Sure?"]),
        ("assistant", ["Quite. Sure."]),
    ]
    example = read_one(tmp_path, line)
    assert (example.key, example.duration, example.text) == ("1:c7", 3.75, "Yes. Quite. Sure.")


@pytest.mark.parametrize("beside", ["audio", "sound"])
def test_placeholders_take_the_listed_recordings_in_order_over_all_turns(tmp_path, beside):
    line = {
        beside: ["a.wav", {"audio_filepath": "b.wav", "offset": 2.0}, {"path": "a.wav", "duration": 1}],
        "conversations": [
            {"from": "human", "value": "<s>First, <s> then"},
            {"from": "gpt", "value": "Yes."},
            {"from": "human", "value": "<s>"},
            {"from": "gpt", "value": "No."},
        ],
    }
    assert turns_of(tmp_path, line, placeholder="<s>") == [
        ("user", [CLIP, "First, ", (Path("b.wav"), 2.0, None), " then"]),
        ("assistant", ["Yes."]),
        ("user", [(CLIP, 0.0, 1.0)]),
        ("assistant", ["No."]),
    ]
    assert read_one(tmp_path, line | {beside: ["a", "b", "c"], "id": 5}, placeholder="<s>").key == "1:5"


def test_chat_messages_take_strings_and_lists_of_text_and_audio(tmp_path):
    listed = [
        {"type": "audio", "path": "a.wav"},
        {"type": "text", "text": "Who"},
        {"type": "text", "text": "?"},
    ]
    unnamed = [{"type": "audio"}, {"type": "audio", "audio": "c.wav", "offset": 0.5}]
    line = {
        "messages": [
            {"role": "user", "content": listed},
            {"role": "assistant", "content": [{"type": "text", "text": "Me."}]},
            {"role": "user", "content": unnamed},
            {"role": "user", "content": "{audio}?"},
            {"role": "assistant", "content": "You."},
        ],
        "audio": [{"audio_filepath": "b.wav"}, "d.wav"],
    }
    parts = [Path("b.wav"), (Path("c.wav"), 0.5, None), " ", Path("d.wav"), "?"]
    assert turns_of(tmp_path, line) == [
        ("user", [CLIP, "Who?"]),
        ("assistant", ["Me."]),
        ("user", parts),
        ("assistant", ["You."]),
    ]


def test_a_conversation_may_be_text_alone(tmp_path):
    line = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]}
    example = read_one(tmp_path, line)
    assert (example.key, example.clips, example.duration) == ("1:", [], 0.0)


def test_relative_paths_are_taken_from_the_manifest_and_absolute_ones_as_they_are(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere" / "b.wav"
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data", GOOD, GOOD | {"audio_filepath": str(elsewhere)})
    monkeypatch.chdir(tmp_path)
    expected = [tmp_path / "data" / "a.wav", elsewhere]
    for given in (path, "data/manifest.jsonl"):
        examples, _ = read_manifest(given)
        assert [clip.path.absolute() for e in examples for clip in e.clips] == expected


def test_keys_are_unique_and_do_not_change_when_the_files_move(tmp_path):
    keys = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, GOOD, GOOD, GOOD | {"offset": 1.0})
        source = open_source(SourceSetting(str(path)))
        keys.append([e.key for number in range(2) for e in read_source(source, DataConfig(), number)[0]])
    assert keys[0] == keys[1]
    assert keys[0] == ["1:a.wav", "2:a.wav", "3:a.wav", "1/1:a.wav", "1/2:a.wav", "1/3:a.wav"]


def nemo(*entries: object, **beside: object) -> dict[str, object]:
    return {"id": "c", "conversations": list(entries), **beside}


def chat(*contents: object) -> dict[str, object]:
    """Messages of the user and, last, of the assistant."""
    roles = ["user"] * (len(contents) - 1) + ["assistant"]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


HEARD = {"from": "User", "value": "a.wav", "type": "audio"}
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        (b'{"audio_filepath": "a.wav", "text"', "2:", "not JSON"),
        (b'{"text": "\xff", "audio_filepath": "a.wav"}', "2:", "not JSON"),
        (b"[" * 100_000, "2:", "not JSON"),
        (b'{"duration": ' + b"9" * 5000 + b"}", "2:", "not JSON"),
        (["a.wav", "one"], "2:", "the line is a JSON list; expected an object"),
        ({"text": "one"}, "2:", "audio_filepath is missing; found ['text']"),
        (GOOD | {"audio_filepath": ["l.wav", "r.wav"]}, "2:", "expected a string"),
        (GOOD | {"audio_filepath": ""}, "2:", "audio_filepath is empty"),
        (GOOD | {"audio_filepath": "\ud800"}, "2:", "surrogates not allowed"),
        ({"audio_filepath": "a.wav"}, "2:a.wav", "text is missing"),
        (GOOD | {"text": 7}, "2:a.wav", "text is 7"),
        (GOOD | {"text": "\ud800"}, "2:a.wav", "surrogates not allowed"),
        (GOOD | {"text": " \n"}, "2:a.wav", "text is empty"),
        (GOOD | {"text": DEEP}, "2:a.wav", "text is [[[[[[[...]]]]]]]"),
        (GOOD | {"duration": -1.5}, "2:a.wav", "duration is -1.5"),
        (GOOD | {"duration": 0}, "2:a.wav", "duration is 0"),
        (GOOD | {"duration": "1.5"}, "2:a.wav", "duration is '1.5'"),
        (GOOD | {"duration": True}, "2:a.wav", "duration is True"),
        (GOOD | {"duration": float("nan")}, "2:a.wav", "duration is nan"),
        (GOOD | {"duration": 10**400}, "2:a.wav", "expected a number of seconds from 0 to 1e9"),
        (GOOD | {"offset": float("inf")}, "2:a.wav", "offset is inf"),
        (GOOD | {"offset": -0.1}, "2:a.wav", "offset is -0.1"),
        (nemo(), "2:c", "conversations is []; expected a list that is not empty"),
        ({"conversations": "hello"}, "2:", "conversations is 'hello'; expected a list"),
        (nemo(ANSWER) | {"id": ["c"]}, "2:", "id is ['c']; expected a string"),
        (nemo(HEARD, "Yes."), "2:c", "conversations 2: it is a JSON str; expected an object"),
        (nemo(HEARD, ANSWER | {"from": "tool"}), "2:c", "conversations 2: unknown role 'tool'; expected"),
        (nemo(HEARD, ANSWER | {"from": None}), "2:c", "conversations 2: from is None; expected a string"),
        (nemo(HEARD, {"from": "gpt"}), "2:c", "conversations 2: value is missing"),
        (
            nemo(HEARD | {"type": "image"}, ANSWER),
            "2:c",
            "conversations 1: type is 'image'; expected text or",
        ),
        (nemo(HEARD | {"duration": 0}, ANSWER), "2:c", "conversations 1: duration is 0"),
        (nemo(HEARD | {"value": ""}, ANSWER), "2:c", "conversations 1: path is empty"),
        (nemo(HEARD, ANSWER | {"value": " "}), "2:c", "conversations 2: an empty turn (assistant)"),
        (nemo(HEARD), "2:c", "no turn of the assistant"),
        (nemo(HEARD, ANSWER, HEARD), "2:c", "the last turn is the user's; expected the assistant's"),
        (nemo(HEARD, HEARD | {"from": "gpt"}), "2:c", "a recording in a turn of the assistant"),
        (nemo(HEARD, ANSWER, audio="b.wav"), "2:c", "0 audio placeholders ({audio}) but 1 clips listed"),
        (
            nemo(ANSWER | {"from": "User", "value": "{audio} or {audio}?"}, ANSWER, audio=["b.wav"]),
            "2:c",
            "2 audio placeholders ({audio}) but 1 clips listed in audio; expected one clip for each",
        ),
        (nemo(ANSWER, audio=[7]), "2:c", "an entry of audio is a JSON int"),
        (nemo(ANSWER, audio=[{"file": "a"}]), "2:c", "path is missing; found ['file']"),
        (chat(None, "Yes."), "2:", "messages 1: content is None; expected a list"),
        (chat([], "Yes."), "2:", "messages 1: content is []"),
        (chat(["Hm"], "Yes."), "2:", "messages 1: an item of content is a JSON str"),
        (chat([{"type": "text"}], "Yes."), "2:", "messages 1: text is missing"),
        (chat([{"image": "Hm"}], "Yes."), "2:", "messages 1: type is None"),
        (chat([{"type": "audio"}], "Yes."), "2:", "1 audio placeholders ({audio}) but 0 clips"),
    ],
)
def test_an_unusable_line_is_reported_and_costs_no_other_line(tmp_path, line, key, reason):
    examples, skipped = read_manifest(write(tmp_path, GOOD, line, GOOD))
    assert [e.key for e in examples] == ["1:a.wav", "3:a.wav"]
    assert [f.key for f in skipped] == [key]
    assert reason in skipped[0].reason
    assert len(skipped[0].reason) < 200


@pytest.mark.parametrize("nothing", [{}, {"text": None}, {"text": " "}])
def test_a_line_without_a_text_is_a_prompt_where_answers_are_drawn(tmp_path, nothing):
    line = {"audio_filepath": "a.wav", "answer": 8} | nothing
    example = read_one(tmp_path, line, prompt="{audio} Their sum?", prompts=True)
    assert example.turns == (Turn("user", (Clip(tmp_path / "a.wav"), " Their sum?")),)
    assert example.is_unanswered
    assert example.fields == {"answer": 8}
    answered = read_one(tmp_path, line | {"text": "eight"}, prompts=True)
    assert not answered.is_unanswered
    (kept,), (skipped,) = read_manifest(write(tmp_path, line, GOOD))
    assert (kept.key, skipped.key) == ("2:a.wav", "1:a.wav")
    assert "text is" in skipped.reason


def test_conversations_that_end_with_the_user_and_bare_prompts_are_prompts_too(tmp_path):
    question = {"role": "user", "content": "{audio} What?"}
    turns = (Turn("user", (Clip(tmp_path / "a.wav"), " What?")),)
    for line in (
        {"id": "c", "audio": ["a.wav"], "messages": [question]},
        {"id": "c", "audio": ["a.wav"], "prompt": [question]},
        {"id": "c", "audio": ["a.wav"], "prompt": question["content"]},
    ):
        example = read_one(tmp_path, line, prompts=True)
        assert (example.key, example.turns) == ("1:c", turns)
        assert read_manifest(write(tmp_path, GOOD, line))[1], "refused where answers are supervised"
    last = {"id": "c", "messages": [{"role": "user", "content": "Hm"}, {"role": "system", "content": "Hm"}]}
    assert read_manifest(write(tmp_path, GOOD, last), prompts=True)[1]


def test_blank_lines_and_a_byte_order_mark_are_no_items(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b"  \r", GOOD)
    examples, skipped = read_manifest(path)
    assert [e.key for e in examples] == ["1:a.wav", "4:a.wav"]
    assert not skipped


def test_an_absent_manifest_is_an_error_that_says_which_setting(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl.*data\.manifest"):
        read_manifest(tmp_path / "gone.jsonl")


def test_a_manifest_without_a_usable_line_is_an_error_that_shows_the_reasons(tmp_path):
    with pytest.raises(ValueError, match=r"no usable line \(1 skipped\)[\s\S]*text is missing"):
        read_manifest(write(tmp_path, {"audio_filepath": "a.wav"}))
    with pytest.raises(ValueError, match=r"manifest\.jsonl holds no lines"):
        read_manifest(write(tmp_path))
