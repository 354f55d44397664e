"""Windows of a recording that is longer than a model reads at once, cut where it is quietest.

A recording of 70 s in windows of at most 30 s: [0, 28.3), [28.3, 56.1), [56.1, 70). They do not overlap.
"""

from dataclasses import replace

import numpy as np

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import AudioError, clip_seconds, from_samples, load_audio
from jaxthd.data.example import Clip, Samples

SEARCHED = 5.0
"""Seconds at the end of a window in which the quietest place is looked for."""
PLACE = 0.2
"""Seconds of a place: about the shortest pause between words. Shorter ones are found inside of words."""
HOP = 0.01
"""Seconds from one place to the next."""
SHORTEST = 0.5
"""Least seconds of a window, or a quarter of the longest: nothing is said in less, and features need some."""


def in_windows(recording: Clip | Samples, most_seconds: float) -> list[Clip | Samples]:
    """The recording itself, or windows of at most `most_seconds` that follow each other and together are it.

    Each window but the last ends in the middle of the quietest 0.2 s of its last 5 s. Only these are decoded.
    Raises AudioError for a recording that cannot be read.
    """
    seconds = clip_seconds(recording, opened=True)
    if isinstance(seconds, str):
        raise AudioError(seconds)
    shortest = min(SHORTEST, most_seconds / 4)
    starts = [0.0]
    while seconds - starts[-1] > most_seconds:
        latest = min(starts[-1] + most_seconds, seconds - shortest)
        earliest = max(latest - SEARCHED, starts[-1] + shortest)
        starts.append(earliest + _quietest(_part(recording, earliest, latest)))
    ends = [*starts[1:], None]
    return [_part(recording, start, end) for start, end in zip(starts, ends, strict=True)]


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


def _quietest(recording: Clip | Samples) -> float:
    """The second in the middle of the quietest place, the last one of those that are equally quiet."""
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
    return (hop * int(quiet[-1]) + place / 2) / SAMPLE_RATE
