"""Conversations as turns of text and recordings: what every data source makes of its items."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

from jaxthd.config.front_end import SpeakerSegment
from jaxthd.errors import UserError

Role = Literal["system", "user", "assistant"]
Fields = Mapping[str, Any]
"""Fields of a manifest's line, by name."""
NO_FIELDS: Fields = {}


class Member(NamedTuple):
    """A file inside a tar file: `size` bytes from byte `start` on, uncompressed."""

    name: str
    start: int
    size: int


class Cell(NamedTuple):
    """A recording in a table: row `row` of row group (record batch) `group` of a parquet or arrow file.

    column: what holds the recording. rate_column: what holds its sampling rate; "" if the recording itself
    does. name: for messages.
    """

    name: str
    column: str
    group: int
    row: int
    rate_column: str = ""


class Channels(NamedTuple):
    """The channels of a recording that are used: their indices among the `total` that it has.

    A file that has exactly as many channels as are used holds only those.
    """

    used: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class Clip:
    """A recording, or a range of one.

    path: absolute; relative to the working directory if the data set's path is relative.
    offset: seconds into the recording. duration: seconds from there; None: to its end.
    member: where the recording lies in the file, if that is a tar file or a table. channels: those used;
        None: all. speakers: who speaks when in the clip; None: the data does not say.
    """

    path: Path
    offset: float = 0.0
    duration: float | None = None
    member: Member | Cell | None = None
    channels: Channels | None = None
    speakers: tuple[SpeakerSegment, ...] | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """A recording in memory: samples in [-1, 1], of shape [samples] or [samples, channels]. rate: in Hz."""

    samples: Shaped[np.ndarray, " samples *channels"]
    rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Turn:
    """One message of a conversation: texts and recordings in order, no two texts in a row."""

    role: Role
    parts: tuple[str | Clip | Samples, ...]


def with_texts(turn: Turn, change: Callable[[str], str]) -> Turn:
    """The turn with its texts changed."""
    return replace(turn, parts=tuple(change(x) if isinstance(x, str) else x for x in turn.parts))


class Alternative(NamedTuple):
    """One of the answers to a conversation. preference: 1.0 if it is preferred, -1.0 if not, 0.0 if it is an
    answer to another conversation (jaxthd.data.mismatched)."""

    text: str
    preference: float


@dataclass(frozen=True)
class Example:
    """A conversation. In a data set its last turn is the assistant's, or the user's if it is to be answered
    alone (is_unanswered). Assistant turns have no recordings.

    alternatives: answers to the conversation, whose last turn is then the user's: two, the preferred one
        first, or one that is preferred or not.
    key: "NUMBER:NAME", the item's number and name (for a manifest line its audio_filepath or id, as written).
        It is unique in the data set and does not depend on where the data set lies. In a run "SET/", the
        number of the data set, precedes it unless that number is 0.
    fields: of the manifest's line, those that are not read as turns or recordings; for reward functions.
    """

    key: str
    turns: tuple[Turn, ...]
    alternatives: tuple[Alternative, ...] = ()
    fields: Fields = field(default_factory=dict)

    @property
    def clips(self) -> list[Clip | Samples]:
        """The recordings, in order."""
        return [part for turn in self.turns for part in turn.parts if not isinstance(part, str)]

    @property
    def is_unanswered(self) -> bool:
        """Whether it has no answer: a prompt, to which answers can be drawn and nothing else."""
        return not self.alternatives and (not self.turns or self.turns[-1].role != "assistant")

    @property
    def duration(self) -> float | None:
        """Seconds of all recordings; None if the data set does not give the duration of one of them."""
        seconds = [clip.duration for clip in self.clips]
        return None if None in seconds else sum((s for s in seconds if s is not None), 0.0)

    @property
    def text(self) -> str:
        """The texts of the assistant's turns, joined by a space."""
        answers = (turn for turn in self.turns if turn.role == "assistant")
        return " ".join(str(part) for turn in answers for part in turn.parts)


def utterance(
    clip: Clip | Samples, text: str, prompt: str, placeholder: str, system_prompt: str = ""
) -> tuple[Turn, ...]:
    """The turns of a recording with its transcript: the user's turn is `prompt`, the assistant's is `text`.

    The clip replaces each placeholder of the prompt.

    Raises ValueError for an empty text.
    """
    if not text.strip():
        raise ValueError("text is empty; expected a transcript")
    return (*question(clip, prompt, placeholder, system_prompt), Turn("assistant", (text,)))


def question(
    clip: Clip | Samples, prompt: str, placeholder: str, system_prompt: str = ""
) -> tuple[Turn, ...]:
    """The system turn and the user turn of an utterance; empty ones are dropped."""
    before, *after = prompt.split(placeholder)
    parts = merge_texts([before, *(part for text_after in after for part in (clip, text_after))])
    system = (Turn("system", (system_prompt,)),) if system_prompt else ()
    return (*system, *((Turn("user", parts),) if parts else ()))


def user_turn(text: str, recordings: Sequence[Path | Clip | Samples], placeholder: str) -> Turn:
    """The user's turn. Each placeholder stands for a recording; without placeholders, recordings come first.

    Raises UserError if placeholders and recordings differ in number, and for a turn without content.
    """
    if placeholder not in text:
        text = placeholder * len(recordings) + text
    before, *after = text.split(placeholder)
    if len(after) != len(recordings):
        raise UserError(
            f"{len(recordings)} recordings for {len(after)} placeholders ({placeholder}) in {text!r}; "
            "expected one for each: correct one of them"
        )
    parts: list[str | Clip | Samples] = [before]
    for recording, rest in zip(recordings, after, strict=True):
        parts += [Clip(recording) if isinstance(recording, Path) else recording, rest]
    turn = Turn("user", tuple(part for part in parts if part != ""))
    if not turn.parts:
        raise UserError("the prompt is empty; expected text or a recording")
    return turn


def merge_texts(parts: Iterable[str | Clip | Samples]) -> tuple[str | Clip | Samples, ...]:
    """Joins consecutive texts into one and drops empty ones."""
    merged: list[str | Clip | Samples] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part:
            merged.append(part)
    return tuple(merged)


def document_rng(seed: int, epoch: int, key: str) -> np.random.Generator:
    """Returns a generator seeded by the three arguments alone: every worker, rank or slot draws the same.

    The seed is their BLAKE2b hash. Python's own hash changes with every process.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{key}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
