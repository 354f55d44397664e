"""Preference lines from hypotheses: the best and the worst of an item's, by word error rate."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.data.example import Example
from jaxthd.data.sources.recordings import LISTS, in_folder
from jaxthd.inference.generator import Answer
from jaxthd.inference.wer import Errors, errors_of

Line = dict[str, Any]
ITEM = "item"
"""The field of a line that names the item it was made of, by its key."""


class Item(NamedTuple):
    """An item of a manifest. example: its conversation, which ends with the reference. entry: its line.

    folder: that of the manifest, from which paths in the entry are taken.
    """

    example: Example
    entry: Line
    folder: Path

    @property
    def prompt(self) -> Example:
        """The conversation without the reference."""
        return Example(self.example.key, self.example.turns[:-1])

    @property
    def reference(self) -> str:
        return str(self.example.turns[-1].parts[0])


class Hypothesis(NamedTuple):
    """A hypothesis with its word errors. ended: whether it ended by itself; else it was cut off."""

    text: str
    errors: Errors
    ended: bool

    @property
    def is_answer(self) -> bool:
        """Whether it can be trained on: it is not empty, and its end is its own."""
        return self.ended and bool(self.text.strip())

    def line(self) -> Line:
        return {"text": self.text, "wer": self.errors.rate, "ended": self.ended}


def measured(reference: str, answers: Sequence[Answer], normalise: Callable[[str], str]) -> list[Hypothesis]:
    """The answers with their word errors against the reference, both normalised."""
    texts = [normalise(answer.text) for answer in answers]
    errors = errors_of([normalise(reference)] * len(answers), texts)
    return [Hypothesis(a.text, e, a.end == "stop") for a, e in zip(answers, errors, strict=True)]


def best_and_worst(hypotheses: Sequence[Hypothesis]) -> tuple[Hypothesis, Hypothesis] | None:
    """The hypotheses of the lowest and of the highest word error rate, of equals the first; None where all
    have the same, or fewer than two can be trained on.
    """
    answers = [hypothesis for hypothesis in hypotheses if hypothesis.is_answer]
    if not answers:
        return None
    best, worst = (choose(answers, key=lambda h: h.errors.wrong) for choose in (min, max))
    return (best, worst) if best.errors.wrong < worst.errors.wrong else None


def preference_line(item: Item, hypotheses: Sequence[Hypothesis], out: Path) -> Line | None:
    """The line of an item, with the fields that it had; None where its hypotheses have no spread.

    out: the file that the line is for: its paths are taken from that file's folder.
    """
    found = best_and_worst(hypotheses)
    if found is None:
        return None
    chosen, rejected = found
    return {
        **_prompt_fields(item, out.parent),
        ITEM: item.example.key,
        "chosen": chosen.text,
        "rejected": rejected.text,
        "chosen_wer": chosen.errors.rate,
        "rejected_wer": rejected.errors.rate,
        "hypotheses": [hypothesis.line() for hypothesis in hypotheses],
    }


def without_spread_line(item: Item, hypotheses: Sequence[Hypothesis]) -> Line:
    """The line of an item whose hypotheses have no spread."""
    found = [hypothesis.line() for hypothesis in hypotheses]
    return {ITEM: item.example.key, "reference": item.reference, "hypotheses": found}


def _prompt_fields(item: Item, folder: Path) -> Line:
    """The entry's fields, a conversation without its answer as the field prompt."""
    entry = dict(item.entry)
    is_conversation = "conversations" in entry or "messages" in entry
    if entry.get("audio_filepath") and not is_conversation:
        path = in_folder(item.folder)(entry["audio_filepath"]).path
        return entry | {"audio_filepath": _from(path, folder)}
    for name in ("conversations", "messages", "audio_filepath", *LISTS):
        entry.pop(name, None)
    messages = [
        {"role": turn.role, "content": [_content(part, folder) for part in turn.parts]}
        for turn in item.prompt.turns
    ]
    return entry | {"prompt": messages}


def _content(part: Any, folder: Path) -> Line:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    timed = {"offset": part.offset} if part.offset else {}
    timed |= {} if part.duration is None else {"duration": part.duration}
    return {"type": "audio", "path": _from(part.path, folder), **timed}


def _from(path: Path, folder: Path) -> str:
    """A path as it is written in a file of that folder. An absolute one stays."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)
