"""What a data set's lines become: turns of text and recordings, whatever form they were read from."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Shaped

Role = Literal["system", "user", "assistant"]


class Member(NamedTuple):
    """A file inside a tar file: `size` bytes from byte `start` on, as they are."""

    name: str
    start: int
    size: int


class Channels(NamedTuple):
    """The channels of a recording that are heard: places among the `total` it has.

    A file with as many channels as are heard holds those alone.
    """

    heard: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class Clip:
    """A recording, or a range of one.

    path: absolute, or relative to the working directory if the data set's path was.
    offset: seconds into the recording. duration: seconds from there; None means to its end.
    member: where in the file it lies, if that is a tar file. channels: None means all.
    """

    path: Path
    offset: float = 0.0
    duration: float | None = None
    member: Member | None = None
    channels: Channels | None = None


@dataclass(frozen=True, eq=False)
class Samples:
    """A recording in memory: samples in [-1, 1], [samples] or [samples, channels]; rate: of them a second."""

    samples: Shaped[np.ndarray, " samples *channels"]
    rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Turn:
    """What one speaker says before the other: texts and recordings in order, no two texts in a row."""

    role: Role
    parts: tuple[str | Clip | Samples, ...]


@dataclass(frozen=True)
class Example:
    """A conversation: one usable line of a data set, its last turn then being the assistant's. No assistant's
    turn has a recording.

    key: of a data set, "<line number>:<name>", the name being audio_filepath or id as written: unique there,
        the same wherever it lies; "<number of the data set>/" before it, unless that is 0.
    """

    key: str
    turns: tuple[Turn, ...]

    @property
    def clips(self) -> list[Clip | Samples]:
        """Its recordings, in order."""
        return [part for turn in self.turns for part in turn.parts if not isinstance(part, str)]

    @property
    def duration(self) -> float | None:
        """Seconds of its recordings; None where the data set does not tell one of them."""
        seconds = [clip.duration for clip in self.clips]
        return None if None in seconds else sum((s for s in seconds if s is not None), 0.0)

    @property
    def text(self) -> str:
        """What the assistant says, its turns joined by a space."""
        answers = (turn for turn in self.turns if turn.role == "assistant")
        return " ".join(str(part) for turn in answers for part in turn.parts)


def utterance(
    clip: Clip | Samples, text: str, prompt: str, placeholder: str, system_prompt: str = ""
) -> tuple[Turn, ...]:
    """The turns of a recording with its transcript: `prompt`, the clip for each placeholder, then the text.

    Raises ValueError for an empty text.
    """
    if not text.strip():
        raise ValueError("text is empty; expected a transcript")
    return (*asked(clip, prompt, placeholder, system_prompt), Turn("assistant", (text,)))


def asked(clip: Clip | Samples, prompt: str, placeholder: str, system_prompt: str = "") -> tuple[Turn, ...]:
    """The turns before the answer; none for empty prompts."""
    before, *after = prompt.split(placeholder)
    parts = joined([before, *(part for piece in after for part in (clip, piece))])
    system = (Turn("system", (system_prompt,)),) if system_prompt else ()
    return (*system, *((Turn("user", parts),) if parts else ()))


def joined(parts: Iterable[str | Clip | Samples]) -> tuple[str | Clip | Samples, ...]:
    """Texts in a row as one, empty ones left out."""
    joined: list[str | Clip | Samples] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return tuple(joined)
