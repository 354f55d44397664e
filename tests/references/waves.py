"""Recordings that references and tests make alike, from a seed and a length. NumPy alone."""

import numpy as np

RATE = 16_000


def wave(seed: int, seconds: float) -> np.ndarray:
    """Harmonics of a gliding pitch in syllables over noise, as 16 bits at 16 kHz; a number of samples that
    no frame divides."""
    rng = np.random.default_rng(seed)
    samples = round(RATE * seconds) + 7 * (seed + 1)
    t = np.arange(samples) / RATE
    phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin((5 + seed) * t)) / RATE
    harmonics = sum(np.sin(k * phase) / k for k in range(1, 20))
    voice = 0.1 * harmonics * np.maximum(0.05, np.sin(2 * np.pi * 3 * t))
    noise = 0.01 * rng.standard_normal(samples)
    return (np.round((voice + noise).clip(-1, 1) * 32767) / 32768).astype(np.float32)
