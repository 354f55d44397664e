"""Waveforms for tests and their references, from numpy alone: environments without jaxthd make the same."""

import numpy as np


def talk(seed: int, samples: int, speakers: int = 3) -> np.ndarray:
    """Int16 samples at 16 kHz: stretches of one, several or none of some voices, each a pitch and its
    harmonics, over noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / 16_000
    wave = 0.01 * rng.standard_normal(samples)
    for _ in range(speakers):
        pitch, begin = rng.uniform(90, 400), 0
        phase = 2 * np.pi * pitch * (time + 0.02 * np.sin(2 * np.pi * rng.uniform(1, 4) * time))
        voice = sum(rng.uniform(0.2, 1) * np.sin(k * phase) / k for k in range(1, 20))
        loud = np.zeros(samples)
        while begin < samples:
            length = int(rng.uniform(1600, 24_000))
            loud[begin : begin + length] = rng.choice([0.0, 0.05, 0.2])
            begin += length
        wave += loud * voice
    return np.round(wave.clip(-1, 1) * 32767).astype(np.int16)
