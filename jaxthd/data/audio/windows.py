"""Windows of a recording that is longer than a model reads at once, cut where it is quietest.

A recording of 70 s in windows of at most 30 s: [0, 28.3), [28.3, 56.1), [56.1, 70). Where even the quietest
place is no pause, a word may be cut in two; there the next window begins 2 s before the end of the one
before, and what both hear is told once (jaxthd/data/text/joining.py).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import AudioError, clip_seconds, from_samples, load_audio
from jaxthd.data.example import Clip, Samples

SEARCHED = 5.0
"""Seconds at the end of a window in which the quietest place is looked for, or half of the longest window."""
PLACE = 0.2
"""Seconds of a place: about the shortest pause between words. Shorter ones are found inside of words."""
HOP = 0.01
"""Seconds from one place to the next."""
PAUSE = 0.01
"""Energy of a pause, at most, in that of the seconds around it: 20 dB below."""
OVERLAP = 2.0
"""Seconds that two windows share without a pause between them, or a quarter of the longest: several words."""
SHORTEST = 0.5
"""Least seconds of a window, or a quarter of the longest: nothing is said in less, and features need some."""


class Window(NamedTuple):
    """A part of a recording. begin, end: seconds from its beginning. overlap: seconds that the window before
    hears too."""

    recording: Clip | Samples
    begin: float
    end: float
    overlap: float = 0.0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


def in_windows(recording: Clip | Samples, most_seconds: float) -> list[Window]:
    """The recording itself, or windows of at most `most_seconds` that follow each other and together are it.

    Each window but the last ends in the middle of the quietest 0.2 s of its last 5 s, or where that is no
    pause, a second behind it, and the next one begins a second before. Only these 5 s are decoded. Windows of
    less than 10 s have less of each. Raises AudioError for a recording that cannot be read.
    """
    seconds = clip_seconds(recording, opened=True)
    if isinstance(seconds, str):
        raise AudioError(seconds)
    shortest = min(SHORTEST, most_seconds / 4)
    searched, half = min(SEARCHED, most_seconds / 2), min(OVERLAP, most_seconds / 4) / 2
    starts, ends = [0.0], list[float]()
    while seconds - starts[-1] > most_seconds:
        latest = min(starts[-1] + most_seconds, seconds - shortest)
        earliest = max(latest - searched, starts[-1] + 2 * half)  # no second is in three windows
        quietest, is_pause = _quietest(_part(recording, earliest, latest))
        around = 0.0 if is_pause else min(half, latest - earliest - quietest, quietest)
        ends.append(earliest + quietest + around)
        starts.append(earliest + quietest - around)
    overlaps = [0.0, *(end - start for start, end in zip(starts[1:], ends, strict=True))]
    # The last one has all that there is.
    parts = [_part(recording, *part) for part in zip(starts, [*ends, None], strict=True)]
    return list(map(Window, parts, starts, [*ends, seconds], overlaps))


def _part(recording: Clip | Samples, start: float, end: float | None) -> Clip | Samples:
    """The recording from second `start` to second `end`; None: to its end."""
    if isinstance(recording, Samples):
        at = slice(round(start * recording.rate), None if end is None else round(end * recording.rate))
        return Samples(recording.samples[at], recording.rate)
    whole = recording.duration
    until = whole if end is None else end
    return replace(
        recording, offset=recording.offset + start, duration=None if until is None else until - start
    )


def _quietest(recording: Clip | Samples) -> tuple[float, bool]:
    """(The second in the middle of the quietest place, the last one of those that are equally quiet; whether
    it is a pause)."""
    if isinstance(recording, Samples):
        samples = from_samples(recording)
    else:
        samples = load_audio(
            recording.path,
            recording.offset,
            recording.duration,
            member=recording.member,
            channels=recording.channels,
        )
    place, hop = min(round(PLACE * SAMPLE_RATE), len(samples)), round(HOP * SAMPLE_RATE)
    energies = np.concatenate([[0.0], np.cumsum(samples.astype(np.float64) ** 2)])
    of_places = (energies[place:] - energies[:-place])[::hop]
    # Of a silence, whose energies differ by rounding alone, the end.
    quiet = np.flatnonzero(of_places <= of_places.min() + 1e-9 * energies[-1])
    is_pause = of_places.min() <= PAUSE * energies[-1] * place / len(samples)
    return (hop * int(quiet[-1]) + place / 2) / SAMPLE_RATE, bool(is_pause)
