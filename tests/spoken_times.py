"""Synthetic speech whose word times are known: each word is said by itself, cut at its own sound, and joined
to the next after a known pause."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.sources.synthetic import Say, _espeak
from jaxthd.files.jsonl import write_lines

VOICES = ("roa/es", "roa/it")
VARIANTS = ("m1", "m3", "m4", "f1", "f2", "f4", "klatt", "Alicia", "Andy", "Denis", "ed", "linda")
NEW_VARIANTS = ("m2", "f3", "f5", "m5")
"""Of recordings that are measured; the others are trained on."""
CONSONANTS, VOWELS = "bdfklmnprst", "aeiou"
PAUSE = 0.2
"""Most seconds between two words; the least is none."""


class Spoken(NamedTuple):
    """A word and where it sounds. start, end: seconds."""

    text: str
    start: float
    end: float


def made_up_words(seed: int, number: int) -> list[str]:
    """Different words of two to four syllables, some with an n or s behind."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < number:
        syllables = [
            rng.choice(list(CONSONANTS)) + rng.choice(list(VOWELS)) for _ in range(rng.integers(2, 5))
        ]
        found["".join(syllables) + str(rng.choice(["", "", "n", "s"]))] = None
    return list(found)


def write_spoken(
    folder: Path, name: str, words: list[str], recordings: int, variants: tuple[str, ...], seed: int
) -> tuple[Path, dict[str, list[Spoken]]]:
    """(The manifest of `recordings` recordings of one to six of the words, the words and times of each, by
    its name in the manifest.)"""
    rng, lines, times = np.random.default_rng(seed), [], {}
    (folder / name).mkdir(parents=True, exist_ok=True)
    with _espeak() as say:
        for number in range(recordings):
            file = f"{name}/{number:05}.flac"
            drawn = [str(rng.choice(words)) for _ in range(rng.integers(1, 7))]
            voice = f"{rng.choice(VOICES)}+{rng.choice(variants)}"
            sound, times[file] = _said(say, drawn, voice, rng)
            soundfile.write(folder / file, sound, SAMPLE_RATE, subtype="PCM_16")
            seconds = len(sound) / SAMPLE_RATE
            lines.append({"audio_filepath": file, "duration": round(seconds, 4), "text": " ".join(drawn)})
    write_lines(folder / f"{name}.jsonl", lines)
    return folder / f"{name}.jsonl", times


def _said(
    say: Say, words: list[str], voice: str, rng: np.random.Generator
) -> tuple[np.ndarray, list[Spoken]]:
    speed, pitch = int(rng.integers(130, 180)), int(rng.integers(30, 70))
    parts, times = [_silence(rng, 0.1, 0.4)], []
    at = len(parts[0])
    for word in words:
        sound = _trimmed(say(word, voice, speed, pitch))
        times.append(Spoken(word, at / SAMPLE_RATE, (at + len(sound)) / SAMPLE_RATE))
        parts += [sound, _silence(rng, 0.0, PAUSE)]
        at += len(parts[-2]) + len(parts[-1])
    parts.append(_silence(rng, 0.1, 0.4))
    joined = np.concatenate(parts)
    noise = rng.normal(0, 10 ** rng.uniform(-4.0, -2.5), len(joined))
    return 0.5 * joined / np.abs(joined).max() + noise, times


def _silence(rng: np.random.Generator, least: float, most: float) -> np.ndarray:
    return np.zeros(round(SAMPLE_RATE * rng.uniform(least, most)), np.float32)


def _trimmed(sound: np.ndarray) -> np.ndarray:
    """The sound from its first to its last 5 ms within 30 dB of its loudest: a tenth of a second after a
    vowel espeak-ng often has something that is hardly heard."""
    hop = SAMPLE_RATE // 200
    blocks = np.abs(sound[: len(sound) // hop * hop]).reshape(-1, hop).max(1)
    (loud,) = np.nonzero(blocks > 0.03 * blocks.max())
    return sound[loud[0] * hop : (loud[-1] + 1) * hop]
