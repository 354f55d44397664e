"""Conversations of a manifest's line: messages with recordings in their places, as turns.

A recording is named by a part of a message, by the message, or by a list of the line (audio, audios, sound,
sounds), from which placeholders in the texts take theirs in order. The placeholder is data.audio_placeholder;
where no text holds that and the line lists recordings, it is one of TAGS.
"""

import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jaxthd.data.example import Clip, Role, Turn, merge_texts
from jaxthd.data.sources.lines import json_list, json_object, seconds, string
from jaxthd.data.sources.recording_fields import (
    FIELD_OF_PATH,
    LISTS,
    names_recording,
    other_modalities,
    other_recordings,
    refusal,
)
from jaxthd.files.paths import expand_home

Locate = Callable[[str], Clip]
"""(name) -> where the recording lies. Raises ValueError with the reason if there is no such recording."""
Parts = list[str | Clip | None]
"""Texts and recordings of a message; None stands for the next recording of the line's list."""

TAGS = {
    "<audio>": "ms-swift, LLaMA-Factory, MiniCPM-o",
    "<sound>": "NeMo, VILA, Audio Flamingo",
    "<speech>": "LLaMA-Omni",
    "<|audio|>": "Ultravox, Granite Speech",
    "<|AUDIO|>": "Qwen2-Audio's processor",
    "<|audio_bos|><|AUDIO|><|audio_eos|>": "Qwen2-Audio's chat template",
    "<|audio_pad|>": "Qwen3-ASR",
    "<|audio_start|><|audio_pad|><|audio_end|>": "Qwen3-Omni",
    "<|audio_bos|><|audio_pad|><|audio_eos|>": "Qwen2.5-Omni",
    "<audio_soft_token>": "Gemma 3n",
    "<Speech><SpeechHere></Speech>": "SALMONN",
    "[AUDIO]": "Voxtral",
    "<|audio_1|>": "Phi-4-multimodal; also _2 and so on, in order",
}
"""Texts that stand for a recording in data sets, and who writes them."""
_NUMBERED = "<|audio_1|>"
_TAG = re.compile(
    "|".join(re.escape(tag) for tag in sorted(TAGS.keys() - {_NUMBERED}, key=len, reverse=True))
    + r"|<\|audio_(\d+)\|>"
)
ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_TEXTS, _AUDIO = ("text", "input_text", "output_text"), ("audio", "audio_url", "input_audio")
"""Types of a message's parts."""
_PLAIN, _TEXT = (
    frozenset({"role", "content", "from", "value", "type", "offset", "duration"}),
    {"type", "text"},
)
_OF_MESSAGES = frozenset(
    {"role", "content", "from", "value", "type", "offset", "duration", "audio_filepath", *LISTS}
)
_OF_PARTS = _OF_MESSAGES | {"text", "url", *FIELD_OF_PATH}
LONGEST_PATH = 4096
"""Bytes of a path, as Linux bounds them."""


def in_folder(folder: Path) -> Locate:
    """Returns what locates recordings in files, by paths from the folder, with ~ and as file:// URLs.

    A path that is not absolute and begins with ~ is the home folder's, unless the folder holds such a name.
    """

    def locate(name: str) -> Clip:
        if len(name) > LONGEST_PATH or (":" in name and name.startswith("data:")):
            raise ValueError(
                f"{reprlib.repr(name)} is no path, but {len(name):,} characters; expected the path of a "
                "file: write the recording into one"
            )
        if ":" in name and "://" in name:
            name = _path_of_url(name)
        if name.startswith("~") and not (folder / name).exists():
            name = expand_home(name)
        return Clip(folder / name)  # an absolute name replaces the folder

    return locate


def _path_of_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        return url
    if scheme.lower() != "file":
        raise ValueError(
            f"{reprlib.repr(url)} is not on a disk; expected the path of a file, since nothing is read from "
            "the network: download it"
        )
    return unquote(rest.removeprefix("localhost"))


def clip_of(entry: dict[str, Any], name: str, locate: Locate) -> Clip:
    """Returns the recording that a field names, with the entry's offset and duration. Raises ValueError."""
    path = string(entry, name)
    if not path:
        raise ValueError(f"{name} is empty; expected the path of a recording")
    duration = seconds(entry, "duration")
    if duration == 0:
        raise ValueError("duration is 0; expected more than 0 seconds, or no duration to read the whole file")
    return replace(locate(path), offset=seconds(entry, "offset") or 0.0, duration=duration)


def path_of(value: Any) -> str | None:
    """Returns the path of a recording: the text itself, or that in an object, or in a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = next((path for name in FIELD_OF_PATH if (path := path_of(value.get(name)))), None)
    return value if isinstance(value, str) and value else None


def recording_of(entry: dict[str, Any], locate: Locate) -> Clip | None:
    """Returns the recording of an object: that of its first field of FIELD_OF_PATH; None if it names none.

    Raises ValueError for one that is in the line itself (base64, samples), or in another field.
    """
    name = next((name for name in FIELD_OF_PATH if entry.get(name)), None)
    if name is None:
        return _unnamed(entry, locate)
    if isinstance(entry[name], dict):
        timed = {n: entry[n] for n in ("offset", "duration") if entry.get(n) is not None}
        inner = recording_of(timed | entry[name], locate)
        if inner is None:
            raise ValueError(f"path is missing; found {reprlib.repr(sorted(entry[name]))} in {name}")
        return inner
    return clip_of(entry, name, locate)


def _unnamed(entry: dict[str, Any], locate: Locate) -> Clip | None:
    """The recording of an object without a field of FIELD_OF_PATH: None, or a URL in `data`."""
    inside = next((name for name in ("data", "bytes", "array") if entry.get(name)), None)
    if inside:
        data = entry[inside]
        if inside == "data" and isinstance(data, str) and ("://" in data[:10] or names_recording(data)):
            return clip_of(entry, "data", locate)
        raise ValueError(
            f"the recording is in the line itself ({inside}); expected the path of a file: write it into one"
        )
    if others := other_recordings(entry, _OF_PARTS):
        raise ValueError(f"path is missing; found {reprlib.repr(sorted(entry))}, and {refusal(others)}")
    empty = next((name for name in FIELD_OF_PATH if entry.get(name) == ""), None)
    return clip_of(entry, empty, locate) if empty else None


def listed_recordings(entry: dict[str, Any], locate: Locate) -> list[Clip]:
    """Returns the recordings of a line's or a message's list, which may be one recording without a list.

    Raises ValueError for two lists that differ. An `offset` of the line is that of its only recording.
    """
    names = [name for name in LISTS if entry.get(name)]
    if not names:
        return []
    if names[1:] and any(entry[name] != entry[names[0]] for name in names):
        raise ValueError(f"{names[0]} and {names[1]} are given; expected one list of recordings: drop one")
    listed, clips = entry[names[0]], []
    items = listed if isinstance(listed, list) else [listed]
    for item in items:
        if isinstance(item, str):
            timed = len(items) == 1 and entry.get("offset") is not None
            range_ = {"offset": entry["offset"], "duration": entry.get("duration")} if timed else {}
            clips.append(clip_of({"path": item} | range_, "path", locate))
            continue
        named = json_object(item, f"an entry of {names[0]}")
        clip = recording_of(named, locate)
        if clip is None:
            raise ValueError(f"path is missing; found {reprlib.repr(sorted(named))} in {names[0]}")
        clips.append(clip)
    return clips


def conversation_turns(
    entry: dict[str, Any], locate: Locate, placeholder: str
) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
    """Returns the turns of `conversations` or `messages`, and the fields of messages that name recordings and
    are not read.

    A recording in audio_filepath that no placeholder stands for begins the first turn of the user, unless
    the line has other recordings.
    Raises ValueError for a line that cannot be used.
    """
    if others := other_modalities(entry):
        raise ValueError(
            f"{others[0]} is given; expected text and recordings alone: "
            f"drop it from the lines, or data.columns {others[0][:60]}= to leave it out"
        )
    messages, unread = [], list[str]()
    for role, parts, others in _messages(entry, locate, placeholder):
        messages.append((role, parts))
        unread += others
    listed = listed_recordings(entry, locate)
    is_path = not listed and bool(entry.get("audio_filepath"))
    if is_path:
        listed = [clip_of(entry, "audio_filepath", locate)]
    count = _placeholders(messages)
    if not count and listed:
        messages = _with_tags(messages)
        count = _placeholders(messages)
    if is_path and not count:
        first = next((parts for role, parts in messages if role == "user"), None)
        if any(isinstance(part, Clip) for _, parts in messages for part in parts):
            listed, unread = [], [*unread, "audio_filepath"]
        elif first is None:
            raise ValueError("audio_filepath is given and no turn of the user; expected one, to hold it")
        else:
            first.insert(0, None)
            count = 1
    if count != len(listed):
        raise ValueError(
            f"{count} audio placeholders ({placeholder}) but {len(listed)} clips listed in audio; "
            "expected one clip for each placeholder"
        )
    return _joined(messages, iter(listed)), tuple(unread)


def _placeholders(messages: list[tuple[Role, Parts]]) -> int:
    return sum(part is None for _, parts in messages for part in parts)


def _joined(messages: list[tuple[Role, Parts]], clips: Iterator[Clip]) -> tuple[Turn, ...]:
    """Returns the turns: consecutive messages of one role are one, joined by a space."""
    turns = []
    for role, group in groupby(messages, lambda message: message[0]):
        turn_parts: list[str | Clip] = []
        for _, parts in group:
            turn_parts += [
                *([" "] if turn_parts else []),
                *(next(clips) if part is None else part for part in parts),
            ]
        turns.append(Turn(role, merge_texts(turn_parts)))
    for turn in turns:
        if turn.role != "assistant":
            refuse_tags(turn.parts)
        elif any(isinstance(part, Clip) for part in turn.parts):
            raise ValueError("a recording in a turn of the assistant; expected text alone")
    return tuple(turns)


def refuse_tags(parts: Any) -> None:
    """Raises ValueError for a tag in a text that no recording stands for: it would be trained as text."""
    for part in parts:
        if isinstance(part, str) and ("<" in part or "[" in part) and (tag := _TAG.search(part)):
            raise ValueError(
                f"a text holds {tag[0]} and the line names no recording for it; expected one in audio, in "
                "order: name it, or take the tag away"
            )


def with_placeholder(text: str, placeholder: str) -> str:
    """Returns the text with `placeholder` where it has one of TAGS; unchanged if it has a placeholder."""
    if placeholder in text or not ("<" in text or "[" in text):
        return text
    return _TAG.sub(lambda tag: placeholder, text)


def _with_tags(messages: list[tuple[Role, Parts]]) -> list[tuple[Role, Parts]]:
    """Returns the messages with None in place of each of TAGS, but in the assistant's texts."""
    out, numbers = [], []
    for role, parts in messages:
        pieces: Parts = []
        for part in parts:
            if role == "assistant" or not isinstance(part, str):
                pieces.append(part)
                continue
            at = 0
            for tag in _TAG.finditer(part):
                numbers += [int(tag[1])] if tag[1] else []
                pieces += [part[at : tag.start()], None]
                at = tag.end()
            pieces.append(part[at:])
        out.append((role, pieces))
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(
            f"audio tags are numbered {reprlib.repr(numbers)}; expected 1, 2 and so on, in order"
        )
    return out


def _messages(
    entry: dict[str, Any], locate: Locate, placeholder: str
) -> Iterator[tuple[Role, Parts, tuple[str, ...]]]:
    """Yields (role, parts, fields that name recordings and are not read) of each message."""
    nemo = "conversations" in entry
    field = "conversations" if nemo else "messages"
    for count, item in enumerate(json_list(entry[field], field), start=1):
        try:
            message = json_object(item, "it")
            by_value = ("role" not in message) if nemo else ("from" in message and "role" not in message)
            speaker = "from" if by_value else "role"
            role = ROLES.get(string(message, speaker).lower())
            if role is None:
                found = reprlib.repr(message[speaker])
                raise ValueError(f"unknown role {found}; expected system, user or assistant (human, gpt)")
            contents = _nemo_contents(message) if by_value else _chat_contents(message)
            parts = [part for content in contents for part in _parts(content, locate, placeholder)]
            others = _in_message(message, role, parts, locate) if message.keys() - _PLAIN else ()
            if all(isinstance(part, str) and not part.strip() for part in parts):
                raise ValueError(f"an empty turn ({role}); expected text or a recording")
        except ValueError as error:
            raise ValueError(f"{field} {count}: {error}") from error
        yield role, parts, tuple(f"{field}.{name}" for name in others)


def _nemo_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    value = string(message, "value")
    if message.get("type", "text") != "audio":
        return [{"type": message.get("type", "text"), "text": value}]
    timed = {name: message[name] for name in ("offset", "duration") if name in message}
    return [{"type": "audio", "path": value, **timed}]


def _chat_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [json_object(item, "an item of content") for item in json_list(content, "content")]


def _in_message(message: dict[str, Any], role: Role, parts: Parts, locate: Locate) -> tuple[str, ...]:
    """Puts the recordings that a message lists itself into its parts, at its placeholders or else before
    them; returns its fields that name recordings and are not read. Those of an answer are not.
    """
    if others := other_modalities(message):
        raise ValueError(f"{others[0]} is given; expected text and recordings alone: drop it")
    if role == "assistant":
        return other_recordings(message, _PLAIN)
    listed = listed_recordings(message, locate)
    if not listed and message.get("audio_filepath"):
        listed = [clip_of(message, "audio_filepath", locate)]
    if listed:
        if None not in parts:
            ((_, tagged),) = _with_tags([("user", parts)])
            parts[:] = tagged if None in tagged else [*([None] * len(listed)), *parts]
        if parts.count(None) != len(listed):
            raise ValueError(
                f"{parts.count(None)} audio placeholders but {len(listed)} clips in the message; expected one "
                "clip for each placeholder"
            )
        clips = iter(listed)
        parts[:] = [next(clips) if part is None else part for part in parts]
    return other_recordings(message, _OF_MESSAGES)


def _parts(content: dict[str, Any], locate: Locate, placeholder: str) -> Parts:
    kind = content.get("type")
    if kind is None:
        kind = _kind_of(content)
    if kind in _TEXTS:
        if content.keys() - _TEXT and (others := other_recordings(content, frozenset(("type", "text")))):
            raise ValueError(f"a text part, and {refusal(others)}")
        before, *after = string(content, "text").split(placeholder)
        return [before, *(part for piece in after for part in (None, piece))]
    if kind in _AUDIO:
        return [recording_of(content, locate)]
    raise ValueError(f"type is {reprlib.repr(kind)}; expected text or audio")


def _kind_of(content: dict[str, Any]) -> str | None:
    """Returns the type of a part that does not say it, as Qwen writes {"audio": "a.wav"} and {"text": "a"}."""
    if any(content.get(name) for name in FIELD_OF_PATH if name not in ("path", "url")):
        return "audio"
    return "text" if isinstance(content.get("text"), str) else None
