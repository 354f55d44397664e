"""Log-mel features in NumPy, as NeMo computes them. The loader's workers do: no jax.

Legend: S samples at 16 kHz, F mel frames (10 ms), W window samples, B bins of the spectrum, M mel bands.
"""

import functools

import ml_dtypes
import numpy as np
import scipy.sparse
from jaxtyping import Float32, Float64

from jaxthd.config.front_end import SAMPLE_RATE

HOP = 160
"""Hop: samples from one mel frame to the next (10 ms)."""
DITHER = 1e-5
"""Amplitude of the training dither."""

_WINDOW = 400
_FFT = 512
_PREEMPHASIS = 0.97
_LOG_FLOOR = 2.0**-24
_STD_FLOOR = 1e-5
_BLOCK = 4096
"""Frames whose spectra are computed at once: those of an hour are 1.5 GB."""


@functools.cache
def mel_filterbank(bands: int, fft: int = _FFT) -> Float64[np.ndarray, "B M"]:
    """Triangular filters of unit area (per Hz) from 0 to 8000 Hz, for the B = fft / 2 + 1 bins of an FFT of
    fft points, read-only.

    The scale is linear below 1000 Hz (200/3 Hz a mel) and logarithmic above (a factor of 6.4 every 27 mels).
    Raises ValueError for so many bands that one falls between two bins and would always be empty.
    Source: M. Slaney, Auditory Toolbox, version 2 (1998).
    """
    knee_mel, step = 1000 * 3 / 200, np.log(6.4) / 27
    top_mel = knee_mel + np.log(SAMPLE_RATE / 2 / 1000) / step
    mels = np.linspace(0, top_mel, bands + 2)
    edges = np.where(mels < knee_mel, mels * 200 / 3, 1000 * np.exp(step * (mels - knee_mel)))
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    bins_B1 = np.linspace(0, SAMPLE_RATE / 2, fft // 2 + 1)[:, None]
    rise_BM = (bins_B1 - low) / (centre - low)
    fall_BM = (high - bins_B1) / (high - centre)
    filters_BM = np.maximum(0, np.minimum(rise_BM, fall_BM)) * 2 / (high - low)
    empty = np.flatnonzero(filters_BM.max(axis=0) == 0)
    if len(empty):
        raise ValueError(
            f"{bands} mel bands leave bands {empty.tolist()} without a bin of the {fft}-point spectrum; "
            "use 80 or 128"
        )
    filters_BM.flags.writeable = False
    return filters_BM


@functools.cache
def window(rounded: bool = False) -> Float64[np.ndarray, " W"]:
    """The symmetric Hann window, read-only. rounded: as a checkpoint that stores it in bfloat16 has it."""
    window_W = np.hanning(_WINDOW)
    window_W = _in_bfloat16(window_W) if rounded else window_W
    window_W.flags.writeable = False
    return window_W


@functools.cache
def filters(bands: int, rounded: bool = False) -> scipy.sparse.csr_array:
    """Returns the filters as a sparse matrix [M, B]: a bin is in two bands at most.

    rounded: as a checkpoint that stores them in bfloat16 has them.
    The features of two seconds of speech take 0.5 ms with it. They took 7 ms with a dense product, for which
    BLAS starts threads.
    """
    filters_BM = mel_filterbank(bands)
    return scipy.sparse.csr_array((_in_bfloat16(filters_BM) if rounded else filters_BM).T)


def _in_bfloat16(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    """Rounds x to float32 and then to bfloat16, as checkpoints are rounded."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def log_mel(
    samples: Float32[np.ndarray, " S"],
    bands: int,
    dither: float = 0.0,
    rng: np.random.Generator | None = None,
    rounded: bool = False,
) -> Float32[np.ndarray, "F M"]:
    """Normalised log-mel features of one utterance: `normalised` of `raw_log_mel`, whose arguments it takes.

    Source: NeMo's AudioToMelSpectrogramPreprocessor. The result is within 1e-6 of transformers'
    ParakeetFeatureExtractor with its FFT in float64. As shipped, that computes in float32, and its rounding
    shifts values of quiet bands by up to 6e-4.
    """
    return normalised(raw_log_mel(samples, bands, dither, rng, rounded)).astype(np.float32)


def normalised(mel_FM: Float64[np.ndarray, "F M"]) -> Float64[np.ndarray, "F M"]:
    """Each band over the F frames: minus the mean, divided by the standard deviation (with F - 1) plus
    1e-5."""
    centred_FM = mel_FM - mel_FM.mean(axis=0)
    return centred_FM / (mel_FM.std(axis=0, ddof=1) + _STD_FLOOR)


def raw_log_mel(
    samples: Float32[np.ndarray, " S"],
    bands: int,
    dither: float = 0.0,
    rng: np.random.Generator | None = None,
    rounded: bool = False,
) -> Float64[np.ndarray, "F M"]:
    """Log-mel features of one utterance, F = S // 160 frames; frame f is centred on sample 160 f.

    The steps: pre-emphasis 0.97; a symmetric Hann window of 400 samples every 160, with zeros beyond either
    end; power of a 512-point FFT; `bands` Slaney bands; log(x + 2^-24). All steps from the FFT on are in
    float64.
    dither: amplitude of Gaussian noise that training adds to the samples, drawn from `rng` (document_rng).
    rounded: whether window and bands are rounded to bfloat16.
    Raises ValueError for fewer than 320 samples (one frame has no deviation), and for dither without rng.
    """
    frames = len(samples) // HOP
    if frames < 2:
        raise ValueError(
            f"{len(samples)} samples make {frames} mel frames; expected at least 2 ({2 * HOP} samples)"
        )
    signal = samples.copy()
    if dither:
        if rng is None:
            raise ValueError(f"dither={dither} without rng; pass rng=document_rng(seed, epoch, key)")
        signal += dither * rng.standard_normal(len(signal), dtype=np.float32)
    signal[1:] -= _PREEMPHASIS * signal[:-1]  # in float32; rounding by 4e-8 shifts quiet bands by 1e-4
    # rfft pads the 400 points to 512. Where the window lies among them changes only phases.
    padded = np.pad(signal, _WINDOW // 2)
    frames_FW = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][:frames]
    found_FM = np.empty((frames, bands))
    for begin in range(0, frames, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        spectrum_FB = np.fft.rfft(frames_FW[block] * window(rounded), _FFT)
        power_FB = spectrum_FB.real**2 + spectrum_FB.imag**2
        found_FM[block] = np.log((filters(bands, rounded) @ power_FB.T).T + _LOG_FLOOR)
    return found_FM
