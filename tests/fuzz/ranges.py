"""Recordings in every format, whole and damaged: what is read equals one decode from the beginning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soxr

from jaxthd.data.audio.recordings import AudioError, load_audio, recording_length
from tests.data.sound_files import FORMATS, encoded, id3, mp3_frames, one_decode, speech

SLACK = 0.35
"""Seconds that may be missing at the end: the 0.25 s of load_audio, and a block of the codec."""
UNCOUNTED = ("IRCAM", "PAF", "PVF", "XI")
"""Formats whose header has no length: nothing tells where a file that is cut would have ended."""
NEAR = 1e-6


class Recording:
    """A sound file that the generator wrote. `whole`: its samples at `rate`, decoded before it was damaged.

    damage: in words. lost: whether its end is gone. is_counted: whether the file says how long it should be,
    so that it must not be used whole. before: how many samples come before those of `whole`. seconds: how
    long the file should be.
    """

    def __init__(self, rng: np.random.Generator, path: Path) -> None:
        data, self.path, self.damage, self.lost, self.before = None, path, "nothing", False, 0
        self.is_counted = True
        while data is None:
            # Half of them are MP3, the format in which the most can go wrong.
            kind, subtype = FORMATS[rng.integers(len(FORMATS))] if rng.random() < 0.5 else ("MP3", None)
            rate = int(rng.choice([8_000, 16_000, 16_000, 16_000, 22_050, 44_100, 48_000]))
            options: dict[str, Any] = {}
            if kind == "MP3" and subtype in (None, "MPEG_LAYER_III"):
                mode, level = rng.choice(["CONSTANT", "AVERAGE", "VARIABLE"]), rng.choice([0.0, 0.5, 0.99])
                options, subtype = {"bitrate_mode": str(mode), "compression_level": float(level)}, None
            wave = speech(float(rng.uniform(0.5, 4)), rate, int(rng.integers(1, 3)), int(rng.integers(99)))
            data = encoded(wave, rate, kind, subtype, **options)
        self.form = f"{kind} {subtype or options.get('bitrate_mode')} of {rate} Hz"
        path.write_bytes(data)
        self.whole, self.rate = one_decode(path)
        self.seconds = len(self.whole) / self.rate
        if rng.random() < 0.5:
            path.write_bytes(self._damaged(rng, data, kind))

    def _damaged(self, rng: np.random.Generator, data: bytes, kind: str) -> bytes:
        first, *frames = mp3_frames(data) if kind == "MP3" else [b""]
        tag = max(first.find(b"Xing"), first.find(b"Info"))
        # At other rates what is read would be resampled, and could not be compared with the decoded samples.
        if tag > 0 and self.rate == 16_000 and rng.random() < 0.5:
            self.damage = "no header that counts the frames"
            # The header also says how many samples come before the sound; without it they are read, too.
            self.before = (int.from_bytes(first[tag + 141 : tag + 144], "big") >> 12) + 529
            self.seconds = len(frames) * 576 / self.rate
            return (id3(12_800) if rng.random() < 0.5 else b"") + b"".join(frames)
        share = float(rng.uniform(0.3, 0.95))
        self.damage, self.lost = f"cut at {share:.3f} of its bytes", True
        self.is_counted = kind not in UNCOUNTED and (kind != "MP3" or tag > 0)
        return data[: int(len(data) * share)]


def wrong(rng: np.random.Generator, recording: Recording) -> Iterator[str]:
    """Says how what is read differs from the recording: whole, its length, and three ranges of it."""
    whole, rate, lost, before = recording.whole, recording.rate, recording.lost, recording.before
    for read in (load_audio, recording_length):
        try:
            found: Any = read(recording.path)
        except AudioError as error:
            if not lost:
                yield f"{read.__name__}: {error}"
            continue
        seconds = found.seconds if read is recording_length else len(found) / 16_000
        least = recording.seconds - (SLACK if lost else 1 / 16_000 + 1e-6)
        if seconds > recording.seconds + 1 / 16_000 + 1e-6 or (recording.is_counted and seconds < least):
            yield f"{read.__name__} gives {seconds:.6f} s of {recording.seconds:.6f} s"
        elif read is load_audio:
            yield from _unlike(found[before:], whole[: len(found) if before else None], recording)
    for _ in range(3):
        if len(whole) <= rate // 10:
            return
        start = int(rng.integers(len(whole) - rate // 10))
        count = int(rng.integers(rate // 20, len(whole) - start + 1))
        what = f"{count} samples from {start}: "
        try:
            found = load_audio(recording.path, (before + start) / rate, count / rate)
        except AudioError as error:
            if not lost:
                yield what + str(error)
            continue
        if len(found) < (count / rate - SLACK) * 16_000:
            yield f"{what}{len(found)} at 16 kHz"
        yield from (what + text for text in _unlike(found, whole[start : start + count], recording))


def _unlike(found: np.ndarray, whole: np.ndarray, recording: Recording) -> Iterator[str]:
    """Whether samples that were read differ from those of one decode."""
    there = whole if recording.rate == 16_000 else soxr.resample(whole, recording.rate, 16_000)
    same = min(len(found), len(there))
    if recording.lost:
        # The last samples of a file that is cut may be others, as may those that are resampled.
        same = max(same - 1_600, 0) if recording.rate == 16_000 else 0
    elif len(found) != len(there) and not recording.before:
        yield f"{len(found)} samples at 16 kHz of {len(there)}"
    if np.abs(found[:same] - there[:same]).max(initial=0) > NEAR:
        yield "other samples than in one decode"
