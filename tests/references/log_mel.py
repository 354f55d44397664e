"""Writes tests/references/log_mel.npz: ParakeetFeatureExtractor's features of generated waveforms.

    python -m tests.references.log_mel

Needs torch and transformers (made with 2.13 and 5.23), not jaxthd. Features are computed twice for each
waveform: by the extractor as it is, in float32 ("shipped"), and with its FFT, filters and statistics in
float64 ("exact"). The printed difference between the two is the extractor's own rounding error, which
limits how closely anything can be compared with it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ParakeetFeatureExtractor

OUT = Path(__file__).parent / "log_mel.npz"


class ExactExtractor(ParakeetFeatureExtractor):
    """The same steps in float64 from the FFT on (its window needs float64 as torch's default dtype)."""

    def __init__(self, feature_size: int) -> None:
        super().__init__(feature_size=feature_size)
        self.mel_filters: torch.Tensor = self.mel_filters.double()

    def _torch_extract_fbank_features(self, waveform, device="cpu"):
        return super()._torch_extract_fbank_features(waveform.double(), device)


def waveforms() -> dict[str, np.ndarray]:
    """Ragged int16 waveforms at 16 kHz; the shortest has 320 samples, the fewest that give statistics."""
    rng = np.random.default_rng(0)
    out: dict[str, np.ndarray] = {}
    for name, length in {
        "two_frames": 320,
        "noise": 479,
        "chirp": 3999,
        "voice": 8003,
        "faint": 1601,
    }.items():
        t = np.arange(length) / 16_000
        noise = rng.standard_normal(length)
        if name == "chirp":
            wave = 0.5 * np.sin(2 * np.pi * (100 + 7000 * t / t[-1] / 2) * t) + 0.003 * noise
        elif name == "voice":  # harmonics of a gliding pitch in syllables, over a noise floor
            phase = 2 * np.pi * np.cumsum(120 + 40 * np.sin(9 * t)) / 16_000
            harmonics = sum(np.sin(k * phase) / k for k in range(1, 30))
            wave = 0.2 * harmonics * np.maximum(0, np.sin(2 * np.pi * 4 * t)) + 0.001 * noise
        else:
            wave = (0.001 if name == "faint" else 0.1) * noise
        out[name] = np.round(wave.clip(-1, 1) * 32767).astype(np.int16)
    return out


def features(extractor: ParakeetFeatureExtractor, wave: np.ndarray) -> np.ndarray:
    out = extractor([wave.astype(np.float32) / 32768], sampling_rate=16_000, return_tensors="np")
    return out["input_features"][0][out["attention_mask"][0].astype(bool)].astype(np.float32)


def main() -> None:
    arrays: dict[str, Any] = {}
    for name, wave in waveforms().items():
        arrays[f"{name}/wave"] = wave
        for mels in (80, 128):
            torch.set_default_dtype(torch.float32)
            shipped = features(ParakeetFeatureExtractor(feature_size=mels), wave)
            torch.set_default_dtype(torch.float64)
            exact = features(ExactExtractor(feature_size=mels), wave)
            arrays[f"{name}/{mels}/shipped"], arrays[f"{name}/{mels}/exact"] = shipped, exact
            print(
                f"{name:12} {mels:4} {exact.shape!s:12} shipped - exact: {np.abs(shipped - exact).max():.1e}"
            )
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
