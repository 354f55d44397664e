"""Manifests: one JSON object a line, an utterance or a conversation, read as turns of text and recordings.

An utterance, as NeMo's speech recognition writes it:
    {"audio_filepath": "a.wav", "text": "one two", "offset": 0.5, "duration": 1.5}
A conversation, as NeMo's speechlm2 writes it; its entries of type text may also hold placeholders:
    {"id": "c", "conversations": [{"from": "User", "type": "text", "value": "What is said?"},
        {"from": "User", "type": "audio", "value": "a.wav", "offset": 0.5, "duration": 1.5},
        {"from": "Assistant", "type": "text", "value": "One two."}]}
Texts with a placeholder for each recording listed beside them (roles of ShareGPT: human, gpt):
    {"audio": ["a.wav"], "conversations": [{"from": "human", "value": "{audio} What is said?"}, ...]}
Chat messages, as OpenAI and Hugging Face write them; content may be a string, with placeholders or without:
    {"messages": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"},
        {"type": "text", "text": "What is said?"}]}, {"role": "assistant", "content": "One two."}]}
"""

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from jaxthd.data.audio import Samples
from jaxthd.data.faults import Fault
from jaxthd.errors import UserError

Role = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


@dataclass(frozen=True)
class Clip:
    """A recording, or a range of one.

    path: absolute, or relative to the working directory if the manifest's path was.
    offset: seconds into the file. duration: seconds from there; None means to the end of the file.
    """

    path: Path
    offset: float = 0.0
    duration: float | None = None


@dataclass(frozen=True)
class Turn:
    """What one speaker says before the other: texts and recordings in order, no two texts in a row."""

    role: Role
    parts: tuple[str | Clip | Samples, ...]


@dataclass(frozen=True)
class Example:
    """A conversation: one usable line of a manifest, its last turn then being the assistant's. No assistant's
    turn has a recording.

    key: of a manifest, "<line number>:<name>", the name being audio_filepath or id as written: unique there,
        the same wherever it lies; "<manifest number>/" before it, unless that is 0.
    """

    key: str
    turns: tuple[Turn, ...]

    @property
    def clips(self) -> list[Clip | Samples]:
        """Its recordings, in order."""
        return [part for turn in self.turns for part in turn.parts if not isinstance(part, str)]

    @property
    def duration(self) -> float | None:
        """Seconds of its recordings; None where the manifest does not tell one of them."""
        seconds = [clip.duration for clip in self.clips]
        return None if None in seconds else sum((s for s in seconds if s is not None), 0.0)

    @property
    def text(self) -> str:
        """What the assistant says, its turns joined by a space."""
        answers = (turn for turn in self.turns if turn.role == "assistant")
        return " ".join(str(part) for turn in answers for part in turn.parts)


def read_manifest(
    path: str | Path,
    setting: str = "data.manifest",
    *,
    prompt: str = "{audio}",
    placeholder: str = "{audio}",
    number: int = 0,
) -> tuple[list[Example], list[Fault]]:
    """Reads a manifest of utterances and conversations, in any mixture of the formats above.

    A relative path is taken from the manifest's folder. Recordings are not opened. Every line that is not
    blank becomes an Example or a Fault, in order. An utterance is a conversation: the user's turn is
    `prompt`, its text the assistant's. Entries of one role in a row are one turn, joined by a space.
    setting: what the path was given as, for the messages. number: of the manifest, among several.
    placeholder: stands for a recording in the prompt and in the texts of conversations, not in transcripts.
    Raises FileNotFoundError when there is no such file, UserError when it holds no usable line.
    Source: NeMo's documentation (ASR and speechlm2 datasets), transformers' (chat templates).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no manifest at {path}; expected a JSONL file of utterances or conversations: correct {setting}"
        )
    examples: list[Example] = []
    faults: list[Fault] = []
    with path.open("rb") as lines:  # bytes, so that one badly encoded line is one fault
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            key = f"{number}/{line_number}:" if number else f"{line_number}:"
            try:
                entry = _parse(line)
                key += _name(entry)
                if _is_conversation(entry):
                    turns = _conversation(entry, path.parent, placeholder)
                else:
                    turns = _utterance(entry, path.parent, prompt, placeholder)
            except ValueError as error:
                faults.append(Fault(key, str(error)))
            else:
                examples.append(Example(key, turns))
    if not examples:
        listed = "".join(f"\n  line {fault.key} {fault.reason}" for fault in faults[:5])
        raise UserError(
            f"{path} ({setting}) has no usable line ({len(faults)} faulty); expected one JSON object a line "
            f"with audio_filepath and text, conversations or messages: correct the file{listed}"
        )
    return examples, faults


def _parse(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    return _object(entry, "the line")


def _name(entry: dict[str, Any]) -> str:
    if not _is_conversation(entry):
        return _string(entry, "audio_filepath")
    name = entry.get("id")
    return "" if name is None else str(name) if isinstance(name, int) else _string(entry, "id")


def _is_conversation(entry: dict[str, Any]) -> bool:
    return "conversations" in entry or "messages" in entry


def _utterance(entry: dict[str, Any], folder: Path, prompt: str, placeholder: str) -> tuple[Turn, ...]:
    clip, text = _clip(entry, "audio_filepath", folder), _string(entry, "text")
    if not text.strip():
        raise ValueError("text is empty; expected a transcript")
    return (*_asked(clip, prompt, placeholder), Turn("assistant", (text,)))


def _asked(clip: Clip, prompt: str, placeholder: str) -> tuple[Turn, ...]:
    """The user's turn; none for an empty prompt."""
    before, *after = prompt.split(placeholder)
    asked = _joined([before, *(part for piece in after for part in (clip, piece))])
    return (Turn("user", asked),) if asked else ()


def read_chats(path: str | Path, *, prompt: str = "{audio}", placeholder: str = "{audio}") -> list[Example]:
    """Reads conversations to be answered, in the formats of a manifest: each ends with a turn of the user's.

    An utterance needs no text, and one that it has is left aside. prompt, placeholder: as read_manifest.
    Raises FileNotFoundError when there is no such file, UserError where a line cannot be used.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected a JSONL file of conversations: correct --chat")
    chats = []
    for line_number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = _parse(line)
            if _is_conversation(entry):
                turns = _turns(entry, path.parent, placeholder)
            else:
                turns = _asked(_clip(entry, "audio_filepath", path.parent), prompt, placeholder)
            if not turns or turns[-1].role != "user":
                found = f"the {turns[-1].role}'s" if turns else "none, data.prompt being empty"
                raise ValueError(f"the last turn is {found}; expected the user's, to be answered")
            chats.append(Example(f"{line_number}:{_name(entry)}", turns))
        except ValueError as error:
            raise UserError(f"{path}, line {line_number}: {error}; correct the line") from error
    if not chats:
        raise UserError(f"{path} is empty; expected a conversation a line: correct --chat")
    return chats


def _conversation(entry: dict[str, Any], folder: Path, placeholder: str) -> tuple[Turn, ...]:
    turns = _turns(entry, folder, placeholder)
    if all(turn.role != "assistant" for turn in turns):
        raise ValueError("no turn of the assistant; expected one, because nothing else is learnt")
    if turns[-1].role != "assistant":
        raise ValueError(f"the last turn is the {turns[-1].role}'s; expected the assistant's, to be learnt")
    return turns


def _turns(entry: dict[str, Any], folder: Path, placeholder: str) -> tuple[Turn, ...]:
    messages, listed = list(_messages(entry, folder, placeholder)), _listed(entry, folder)
    places = sum(part is None for _, parts in messages for part in parts)
    if places != len(listed):
        raise ValueError(
            f"{places} audio placeholders ({placeholder}) but {len(listed)} clips listed in audio; "
            "expected one clip for each placeholder"
        )
    clips = iter(listed)
    turns = []
    for role, group in groupby(messages, lambda message: message[0]):
        said: list[str | Clip] = []
        for _, parts in group:
            said += [*([" "] if said else []), *(next(clips) if part is None else part for part in parts)]
        turns.append(Turn(role, _joined(said)))
    answers = (turn for turn in turns if turn.role == "assistant")
    if any(isinstance(part, Clip) for turn in answers for part in turn.parts):
        raise ValueError("a recording in a turn of the assistant; expected text alone, to be learnt")
    return tuple(turns)


def _messages(
    entry: dict[str, Any], folder: Path, placeholder: str
) -> Iterator[tuple[Role, list[str | Clip | None]]]:
    """(role, parts) of each entry; a part that is None is the next of the recordings listed beside them."""
    nemo = "conversations" in entry
    field, speaker = ("conversations", "from") if nemo else ("messages", "role")
    for count, item in enumerate(_list(entry[field], field), start=1):
        try:
            message = _object(item, "it")
            role = _ROLES.get(_string(message, speaker).lower())
            if role is None:
                found = reprlib.repr(message[speaker])
                raise ValueError(f"unknown role {found}; expected system, user or assistant (human, gpt)")
            contents = _nemo_contents(message) if nemo else _chat_contents(message)
            parts = [part for content in contents for part in _parts(content, folder, placeholder)]
            if all(isinstance(part, str) and not part.strip() for part in parts):
                raise ValueError(f"nothing is said ({role}); expected text or a recording")
        except ValueError as error:
            raise ValueError(f"{field} {count}: {error}") from error
        yield role, parts


def _nemo_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    value = _string(message, "value")
    return [{**message, "type": message.get("type", "text"), "path": value, "text": value}]


def _chat_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_object(item, "an item of content") for item in _list(content, "content")]


def _parts(content: dict[str, Any], folder: Path, placeholder: str) -> list[str | Clip | None]:
    if content.get("type") == "text":
        before, *after = _string(content, "text").split(placeholder)
        return [before, *(part for piece in after for part in (None, piece))]
    if content.get("type") == "audio":
        path = _path_field(content)
        return [_clip(content, path, folder) if path else None]
    raise ValueError(f"type is {reprlib.repr(content.get('type'))}; expected text or audio")


def _listed(entry: dict[str, Any], folder: Path) -> list[Clip]:
    """The recordings beside the texts: "audio", or "sound" as NeMo's ShareGPT reader has it."""
    listed = entry.get("audio", entry.get("sound"))
    items = listed if isinstance(listed, list) else [] if listed is None else [listed]
    clips = []
    for item in items:
        named = {"path": item} if isinstance(item, str) else _object(item, "an entry of audio")
        clips.append(_clip(named, _path_field(named) or "path", folder))
    return clips


def _path_field(entry: dict[str, Any]) -> str | None:
    return next((name for name in ("path", "audio_filepath", "audio") if name in entry), None)


def _joined(parts: list[str | Clip]) -> tuple[str | Clip, ...]:
    """Texts in a row as one, empty ones left out."""
    joined: list[str | Clip] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return tuple(joined)


def _clip(entry: dict[str, Any], name: str, folder: Path) -> Clip:
    path = _string(entry, name)
    if not path:
        raise ValueError(f"{name} is empty; expected the path of a recording")
    duration = _seconds(entry, "duration")
    if duration == 0:
        raise ValueError("duration is 0; expected more than 0 seconds, or no duration to read the whole file")
    return Clip(folder / path, _seconds(entry, "offset") or 0.0, duration)  # absolute: replaces the folder


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}; expected an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} is {reprlib.repr(value)}; expected a list that is not empty")
    return value


def _string(entry: dict[str, Any], name: str) -> str:
    if name not in entry:
        raise ValueError(f"{name} is missing; found {reprlib.repr(sorted(entry))}")
    value = entry[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a string")
    value.encode()  # half a surrogate pair is valid JSON and no text: a UnicodeEncodeError, a ValueError
    return value


def _seconds(entry: dict[str, Any], name: str) -> float | None:
    """A finite number of seconds >= 0; None where the field is absent or null."""
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a number of seconds")
    if not 0 <= value < 1e9:  # NaN too; and an integer may be too large for a float
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a number of seconds from 0 to 1e9")
    return float(value)
