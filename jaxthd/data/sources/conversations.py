"""Conversations of a manifest's line: messages with recordings in their places, as turns.

A recording is named by a part of a message, by the message, or by a list of the line (audio, audios, sound,
sounds), from which placeholders in the texts take theirs in order. The placeholder is data.audio_placeholder;
where no text holds that and the line lists recordings, it is one of TAGS.
"""

import re
import reprlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from jaxthd.data.example import Clip, Role, Turn, merge_texts
from jaxthd.data.sources.lines import Entry, json_list, json_object, string
from jaxthd.data.sources.recordings import (
    FIELD_OF_PATH,
    LISTS,
    RANGE,
    Locate,
    clip_of,
    listed_recordings,
    names_recording,
    other_modalities,
    other_recordings,
    recording_of,
)

Parts = list[str | Clip | None]
"""Texts and recordings of a message; None stands for the next recording of the line's list."""

TAGS = {
    "<audio>": "ms-swift, LLaMA-Factory, MiniCPM-o",
    "<sound>": "NeMo, VILA, Audio Flamingo",
    "<speech>": "LLaMA-Omni",
    "<|audio|>": "Ultravox, Granite Speech",
    "<|AUDIO|>": "Qwen2-Audio's processor",
    "<|audio_bos|><|AUDIO|><|audio_eos|>": "Qwen2-Audio's chat template",
    "<|audio_pad|>": "Qwen3-ASR's processor",
    "<|audio_start|><|audio_pad|><|audio_end|>": "Qwen3-ASR, Qwen3-Omni",
    "<|audio_bos|><|audio_pad|><|audio_eos|>": "Qwen2.5-Omni",
    "<audio_soft_token>": "Gemma 3n",
    "<SpeechHere>": "MERaLiON",
    "<Speech><SpeechHere></Speech>": "SALMONN",
    "[AUDIO]": "Voxtral",
    "<|audioplaceholder|>": "Canary-Qwen",
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
_PLAIN = frozenset({"role", "content", "from", "value", "type", *RANGE})
"""Fields of a message that name no recording of its own."""
_TEXT = frozenset({"type", "text"})
_OF_MESSAGES = frozenset({"role", "content", "from", "value", "type", *RANGE, "audio_filepath", *LISTS})


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
    messages: list[tuple[Role, Parts]] = []
    unread: list[str] = []
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
        elif len(turn.parts) != 1 or not isinstance(turn.parts[0], str):
            raise ValueError("a recording in a turn of the assistant; expected text alone")
    return tuple(turns)


def refuse_tags(parts: Any) -> None:
    """Raises ValueError for a text that would be trained in place of a recording: a tag for which there is
    none, or nothing but the name of a file."""
    for part in parts:
        if isinstance(part, str) and len(words := part.split(None, 1)) == 1 and names_recording(words[0]):
            raise ValueError(
                f"a text is {reprlib.repr(words[0])}, which names a recording; expected it in a part of type "
                "audio, or in the line's audio"
            )
        if isinstance(part, str) and ("<" in part or "[" in part) and (tag := _TAG.search(part)):
            raise ValueError(
                f"a text holds {tag[0]} and the line names no recording for it; expected one in audio, in "
                "order: name it, or take the tag away"
            )


def own_prompt(entry: Entry, prompt: str, placeholder: str) -> tuple[str, str]:
    """Returns (user turn, system turn) of an utterance, which may have its own, as in NeMo's speechlm2.

    `context` replaces `prompt`: the user's text before the recording, or around it if it has the placeholder
    or one of TAGS. `system_prompt` is the system turn; "" for none. Raises ValueError if a field is no text.
    """
    context, system = (
        string(entry, n) if entry.get(n) is not None else "" for n in ("context", "system_prompt")
    )
    if placeholder not in context and ("<" in context or "[" in context):
        context = _TAG.sub(lambda tag: placeholder, context)
    if context:
        prompt = context if placeholder in context else f"{context} {placeholder}"
    return prompt, system


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
            others = _in_message(message, role, parts, locate) if not _PLAIN.issuperset(message) else ()
            if all(isinstance(part, str) and not part.strip() for part in parts):
                raise ValueError(f"an empty turn ({role}); expected text or a recording")
        except ValueError as error:
            raise ValueError(f"{field} {count}: {error}") from error
        yield role, parts, tuple(f"{field}.{name}" for name in others) if others else ()


def _nemo_contents(message: dict[str, Any]) -> list[dict[str, Any]]:
    value = string(message, "value")
    if message.get("type", "text") != "audio":
        return [{"type": message.get("type", "text"), "text": value}]
    timed: dict[str, Any] = {name: message[name] for name in RANGE if name in message}
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
                f"{parts.count(None)} audio placeholders but {len(listed)} clips in the message; expected "
                "one clip for each placeholder"
            )
        clips = iter(listed)
        parts[:] = [next(clips) if part is None else part for part in parts]
    return other_recordings(message, _OF_MESSAGES)


def _parts(content: dict[str, Any], locate: Locate, placeholder: str) -> Parts:
    kind = content.get("type")
    if kind is None:
        kind = _kind_of(content)
    if kind in _TEXTS:
        if not _TEXT.issuperset(content) and (others := other_recordings(content, _TEXT)):
            raise ValueError(
                f"a text part with {others[0][:60]}, which names a recording; expected a part of type audio"
            )
        text = string(content, "text")
        if placeholder not in text:
            return [text]
        before, *after = text.split(placeholder)
        return [before, *(part for piece in after for part in (None, piece))]
    if kind in _AUDIO:
        return [recording_of(content, locate)]
    raise ValueError(f"type is {reprlib.repr(kind)}; expected text or audio")


def _kind_of(content: dict[str, Any]) -> str | None:
    """Returns the type of a part that does not say it: Qwen writes {"audio": "a.wav"} and {"text": "a"}."""
    if any(content.get(name) for name in FIELD_OF_PATH if name not in ("path", "url")):
        return "audio"
    return "text" if isinstance(content.get("text"), str) else None
