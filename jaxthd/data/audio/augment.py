"""Augmentation of training recordings: speed, rooms, noise, low-pass. Worker processes import it.

Every draw is a function of the seed, the epoch, the document and the kind of change (document_rng), never of
ranks, workers or other changes.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import soxr
from jaxtyping import Float32

from jaxthd.config import AugmentConfig
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import MIN_SAMPLES, AudioError, load_audio
from jaxthd.data.example import Clip, document_rng

LOW_PASS_ORDER = 8
"""Order of the Butterworth filter: 48 dB an octave."""

Audio = Float32[np.ndarray, " _"]


@dataclass(frozen=True)
class Augmentation:
    """Changes a training recording as data.augment says: speed, then room, noise and low-pass.

    noises, rooms: the recordings that are drawn from, with their durations.
    """

    config: AugmentConfig
    noises: Sequence[Clip] = ()
    rooms: Sequence[Clip] = ()

    @functools.cached_property
    def _shares(self) -> dict[str, float]:
        """The share of the recordings for each kind of change. Raises UserError as config.probabilities."""
        return self.config.probabilities

    def __call__(
        self, samples: Audio, seed: int, epoch: int, key: str, *, changes_speed: bool = True
    ) -> Audio:
        """The changed recording, 16 kHz mono as before. key: names the recording; the draws depend on it.

        A speed that would make it shorter than two mel frames is not applied, and none without
        changes_speed. Nor is a noise or a room that cannot be decoded, which a line on stderr says once.
        """
        config = self.config

        def drawn(kind: str) -> np.random.Generator | None:
            """Returns the random numbers of a kind of change; None where it is not drawn."""
            rng = document_rng(seed, epoch, f"{key}/{kind}")
            return rng if rng.random() < self._shares[kind] else None

        if changes_speed:
            faster = change_speed(samples, drawn_speed(config, seed, epoch, key))
            if len(faster) >= MIN_SAMPLES:
                samples = faster
        if self.rooms and (rng := drawn("room")):
            room = self.rooms[int(rng.integers(len(self.rooms)))]
            if (response := _read(room)) is not None:
                samples = reverberate(samples, response)
        if self.noises and (rng := drawn("noise")):
            noise = self.noises[int(rng.integers(len(self.noises)))]
            decibels = float(rng.uniform(*config.noise_snr))
            if (excerpt := _excerpt(noise, len(samples), rng)) is not None:
                samples = add_noise(samples, excerpt, decibels)
        if rng := drawn("low_pass"):
            samples = low_pass(samples, float(rng.uniform(*config.low_pass_hz)))
        return samples


def _read(clip: Clip) -> Audio | None:
    """None for a recording that cannot be decoded."""
    try:
        return load_audio(clip.path, clip.offset, clip.duration, channels=clip.channels)
    except AudioError as error:
        _say_once(str(clip.path), str(error))
        return None


@functools.lru_cache(None)
def _say_once(path: str, reason: str) -> None:
    print(f"warning: {path} is not used as a noise or a room ({reason})", file=sys.stderr, flush=True)


def _excerpt(noise: Clip, samples: int, rng: np.random.Generator) -> Audio | None:
    """A random range of a noise, as long as the samples, or all of it. Only that range is decoded."""
    assert noise.duration is not None
    seconds = max(samples, MIN_SAMPLES) / SAMPLE_RATE
    start = float(rng.random()) * max(noise.duration - seconds, 0.0)
    return _read(replace(noise, offset=noise.offset + start, duration=min(seconds, noise.duration)))


def drawn_speed(config: AugmentConfig, seed: int, epoch: int, key: str) -> float:
    """The factor by which a recording is sped up in an epoch. key: names the recording."""
    if not config.speed:
        return 1.0
    rng = document_rng(seed, epoch, f"{key}/speed")
    rng.random()  # every kind of change draws first whether it is applied; a speed always is
    return config.speed[int(rng.integers(len(config.speed)))]


def change_speed(samples: Audio, speed: float) -> Audio:
    """Plays the samples `speed` times as fast, which raises the pitch as much. Source: Ko et al. (2015)."""
    return samples if speed == 1 else soxr.resample(samples, SAMPLE_RATE * speed, SAMPLE_RATE)


def reverberate(samples: Audio, impulse_response: Audio) -> Audio:
    """The samples as heard in a room: convolved with its impulse response, at the same length and power.

    The response's largest value is taken for the direct sound, which stays where it was.
    Source: Ko et al., A study on data augmentation of reverberant speech (2017).
    """
    from scipy.signal import oaconvolve

    direct = int(np.abs(impulse_response).argmax())
    heard = oaconvolve(samples, impulse_response)[direct : direct + len(samples)]
    power = _power(heard)
    return samples if not power else (heard * np.sqrt(_power(samples) / power)).astype(np.float32)


def add_noise(samples: Audio, noise: Audio, decibels: float) -> Audio:
    """The samples with noise at that ratio of the powers of signal and noise, each over the whole recording.

    A noise that is shorter is repeated. Digital silence, on either side, adds nothing.
    """
    noise = np.resize(noise, len(samples))
    power = _power(noise)
    if not power:
        return samples
    scale = np.sqrt(_power(samples) / power / 10 ** (decibels / 10))
    return (samples + scale * noise).astype(np.float32)


def low_pass(samples: Audio, hertz: float) -> Audio:
    """The samples without what lies above `hertz`, as in a narrow channel: -3 dB there, 48 dB an octave."""
    from scipy.signal import butter, sosfilt

    sections = butter(LOW_PASS_ORDER, round(hertz), fs=SAMPLE_RATE, output="sos")
    return sosfilt(sections, samples).astype(np.float32)


def _power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))
