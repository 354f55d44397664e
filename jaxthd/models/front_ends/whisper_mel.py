"""Log-mel features in NumPy, as Whisper computes them (Radford et al., 2022). The loader's workers do: no
jax.

Legend: S samples at 16 kHz, F mel frames (10 ms), M mel bands.
"""

import functools
from collections.abc import Iterator

import numpy as np
import scipy.sparse
from jaxtyping import Float32, Float64

from jaxthd.config.findings import Finding
from jaxthd.models.front_ends.log_mel import HOP, mel_filterbank

WINDOW = 400
"""Samples of a frame's window and of its FFT."""
RANGE = 8.0
"""Powers of ten below a recording's maximum at which its bands are cut off."""
_FLOOR = 1e-10


@functools.cache
def _filterbank(bands: int) -> scipy.sparse.csr_array:
    """The filters as a sparse matrix [M, bins]."""
    return scipy.sparse.csr_array(mel_filterbank(bands, WINDOW).T)


def log_mel(
    samples: Float32[np.ndarray, " S"], bands: int, frames: int, padded: int
) -> Float64[np.ndarray, "F M"]:
    """The first `frames` frames of log10 of the mel power, of the recording with zeros up to `padded`
    samples; finish() makes features of them. Frame f is centred on sample 160 f.

    The steps, in float64: the signal is reflected at either end; a periodic Hann window of 400 samples every
    160; the power of a 400-point FFT; `bands` Slaney bands; log10(max(x, 1e-10)).
    Raises ValueError for frames beyond padded // 160.
    """
    if frames > padded // HOP or padded < max(len(samples), WINDOW):
        raise ValueError(f"{frames} frames of {len(samples)} samples, padded to {padded}: too many")
    # Of zeros behind the recording as many as the frames see.
    seen = min(max(frames * HOP + WINDOW, len(samples), WINDOW), padded)
    signal = np.pad(samples, (0, seen - len(samples)))
    half = WINDOW // 2
    signal = np.concatenate([signal[half:0:-1], signal, signal[-2 : -half - 2 : -1]])
    windows = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(windows * hann)
    power = spectrum.real**2 + spectrum.imag**2
    found: Float64[np.ndarray, "F M"] = np.log10(np.maximum((_filterbank(bands) @ power.T).T, _FLOOR))
    return found


def finish(mel_FM: Float64[np.ndarray, "F M"], maximum: float | None = None) -> Float32[np.ndarray, "F M"]:
    """Features of log10 powers: values more than 8 below the maximum are raised to that, then (x + 4) / 4.

    maximum: of all frames; None: that of these.
    """
    floor = (mel_FM.max(initial=np.log10(_FLOOR)) if maximum is None else maximum) - RANGE
    return ((np.maximum(mel_FM, floor) + 4) / 4).astype(np.float32)


def filter_faults(setting: str, bands: int) -> Iterator[Finding]:
    """The fault of so many mel bands that one of them is always empty. setting: its path."""
    try:
        mel_filterbank(bands, WINDOW)
    except ValueError as error:
        yield Finding(str(error), "bands wide enough for the spectrum", f"set {setting} to 128")
