"""Log-mel features in NumPy, as Granite Speech computes them. The loader's workers do: no jax.

Legend: S samples at 16 kHz, F mel frames (10 ms), M mel bands.
"""

import functools

import numpy as np
import scipy.sparse
from jaxtyping import Float32

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.models.front_ends.log_mel import HOP

FFT, WINDOW = 512, 400
_FLOOR, _RANGE = 1e-10, 8.0


@functools.cache
def _filterbank(bands: int) -> scipy.sparse.csr_array:
    """Triangular filters of height 1 from 0 to 8000 Hz on the scale 2595 log10(1 + f / 700), [M, bins]. Low
    bands may hold no bin. Source: torchaudio's melscale_fbanks."""
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    bins = np.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1)[:, None]
    rise, fall = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return scipy.sparse.csr_array(np.maximum(0, np.minimum(rise, fall)).T)


def log_mel(samples: Float32[np.ndarray, " S"], bands: int) -> Float32[np.ndarray, "F M"]:
    """Log-mel features of one recording, F = S // 160 + 1; frame f is centred on sample 160 f.

    The steps, in float64: the signal is reflected at either end; a periodic Hann window of 400 samples; the
    power of a 512-point FFT; `bands` filters; log10(max(x, 1e-10)); values more than 8 below the maximum are
    raised to that; x / 4 + 1. Raises ValueError for so few samples that they cannot be reflected.
    """
    half = FFT // 2
    if len(samples) <= half:
        raise ValueError(
            f"{len(samples)} samples; expected more than {half}, which are reflected at its ends"
        )
    signal = np.pad(samples, half, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    window = np.pad(hann, (FFT - WINDOW) // 2)
    spectrum = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(signal, FFT)[::HOP] * window)
    power = spectrum.real**2 + spectrum.imag**2
    mel = np.log10(np.maximum((_filterbank(bands) @ power.T).T, _FLOOR))
    return (np.maximum(mel, mel.max() - _RANGE) / 4 + 1).astype(np.float32)
