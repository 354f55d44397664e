"""Preference lines: answers to one prompt, and which of them are preferred.

A pair, as TRL writes one. An answer is a string, or a list of messages of which the last is the assistant's:
    {"audio_filepath": "a.wav", "chosen": "one two", "rejected": "won too"}
    {"audio": ["a.wav"], "prompt": [{"role": "user", "content": "{audio} What is said?"}],
        "chosen": [{"role": "assistant", "content": "One two."}], "rejected": "Won too."}
One answer, and whether it is preferred, as TRL's KTO takes it:
    {"audio_filepath": "a.wav", "completion": "one two", "label": true}
"""

import reprlib
from typing import Any

from jaxthd.data.example import Alternative
from jaxthd.data.sources.lines import Entry, json_object, string

PAIR, LABELLED = ("chosen", "rejected"), ("completion", "label")
OF_PREFERENCES = frozenset((*PAIR, *LABELLED))
"""Fields without which a line is not about preferences."""
_OF_OTHERS = ("text", "conversations", "messages")
"""Fields of lines for which a label is no preference."""


def is_preference(entry: Entry) -> bool:
    """Whether a line is about preferences. Fields that are null are absent."""
    if isinstance(entry.get("label"), bool) and not any(name in entry for name in _OF_OTHERS):
        return True
    return any(entry.get(name) is not None for name in (*PAIR, "completion"))


def alternatives_of(entry: Entry) -> tuple[Alternative, ...]:
    """The answers of a line, the preferred one first; none for a line that is not about preferences.

    Raises ValueError for a field that is missing, of another type or empty, for fields of both kinds, and for
    two answers that are the same.
    """
    if not is_preference(entry):
        return ()
    pair, labelled = ([n for n in names if entry.get(n) is not None] for names in (PAIR, LABELLED))
    if pair and labelled:
        raise ValueError(
            f"{pair[0]} is given with {labelled[0]}; expected chosen and rejected, or completion and label"
        )
    if labelled:
        text, label = _answer(entry, "completion"), entry.get("label")
        if label is None:
            raise ValueError(f"label is missing; found {reprlib.repr(sorted(entry))}")
        if not isinstance(label, bool):
            raise ValueError(f"label is {reprlib.repr(label)}; expected true or false")
        return (Alternative(text, 1.0 if label else -1.0),)
    chosen, rejected = (_answer(entry, name) for name in PAIR)
    if chosen.strip() == rejected.strip():
        raise ValueError(f"chosen and rejected are both {reprlib.repr(chosen)}; expected two answers")
    return Alternative(chosen, 1.0), Alternative(rejected, -1.0)


def history_of(entry: Entry, name: str) -> list[Any]:
    """The messages before an answer that is a list of messages; none for a string."""
    return entry[name][:-1] if isinstance(entry.get(name), list) else []


def _answer(entry: Entry, name: str) -> str:
    value = entry.get(name)
    if value is None:
        raise ValueError(f"{name} is missing; found {reprlib.repr(sorted(entry))}")
    if isinstance(value, list) and value:
        text = _of_message(value[-1], name)
    elif isinstance(value, str):
        text = string(entry, name)
    else:
        raise ValueError(
            f"{name} is {reprlib.repr(value)}; expected a string, or a list with a message of the assistant"
        )
    if not text.strip():
        raise ValueError(f"{name} is empty; expected the text of an answer")
    return text


def _of_message(value: Any, name: str) -> str:
    """The text of a message of the assistant."""
    message = json_object(value, f"the last message of {name}")
    speaker, field = ("from", "value") if "from" in message else ("role", "content")
    role, content = message.get(speaker), message.get(field)
    if not isinstance(role, str) or role.lower() not in ("assistant", "gpt"):
        raise ValueError(f"the last message of {name} has {speaker} {reprlib.repr(role)}; expected assistant")
    if isinstance(content, list) and len(content) == 1:
        content = json_object(content[0], f"the content of {name}").get("text")
    if not isinstance(content, str):
        raise ValueError(f"{field} of {name} is {reprlib.repr(message.get(field))}; expected a text")
    return string({name: content}, name)
