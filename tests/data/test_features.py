"""tests/references/log_mel.npz is made by tests/references/log_mel.py, which tells what is in it."""

from pathlib import Path

import numpy as np
import pytest

from jaxthd.config import SpecAugmentConfig
from jaxthd.data.audio.spec_augment import spec_augment
from jaxthd.data.example import document_rng
from jaxthd.models.front_ends.log_mel import DITHER, log_mel, mel_filterbank

REFERENCES = np.load(Path(__file__).parents[1] / "references" / "log_mel.npz")
WAVES = ["two_frames", "noise", "chirp", "voice", "faint"]


def reference(name: str, mels: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    samples = REFERENCES[f"{name}/wave"].astype(np.float32) / 32768
    return log_mel(samples, mels), REFERENCES[f"{name}/{mels}/{kind}"]


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("name", WAVES)
def test_equal_to_parakeets_extractor_with_its_fft_in_float64(name, mels):
    ours, theirs = reference(name, mels, "exact")
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)  # values up to 6, rounded to float32


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("name", WAVES)
def test_equal_to_parakeets_extractor_as_it_ships(name, mels):
    ours, theirs = reference(name, mels, "shipped")
    # The chirp leaves most bands near the floor, where their float32 FFT alone is off by 2.8e-4.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-4 if name == "chirp" else 1e-4)
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 5e-5


@pytest.mark.parametrize("length", [320, 479, 480, 641, 16_000, 48_119])
def test_frames_are_samples_over_160_with_mean_0_and_deviation_1(length):
    noise = 0.1 * np.random.default_rng(length).standard_normal(length).astype(np.float32)
    features = log_mel(noise, 80)
    assert features.shape == (length // 160, 80)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-6)
    # The 1e-5 added shows in bands that hardly vary: over two frames a deviation of 1e-2 is common.
    np.testing.assert_allclose(features.std(axis=0, ddof=1), 1, atol=1e-2 if length < 480 else 1e-3)


def test_samples_past_the_last_frame_and_its_window_change_nothing():
    noise = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    whole = log_mel(noise, 80)  # 12 frames; the last is centred on 1760 and ends before 1960
    noise[1960:] = 9.0
    np.testing.assert_array_equal(log_mel(noise, 80), whole)
    noise[1958] = 9.0
    assert np.abs(log_mel(noise, 80) - whole)[-1].max() > 0


@pytest.mark.parametrize("level", [1.0, -0.37, 1e6, 1e-40])
def test_a_constant_is_finite(level):
    assert np.isfinite(log_mel(np.full(1000, level, np.float32), 80)).all()


def test_digital_silence_is_finite():
    np.testing.assert_array_equal(log_mel(np.zeros(1000, np.float32), 80), np.zeros((6, 80), np.float32))


def test_the_input_is_left_alone():
    samples = np.ones(400, np.float32)
    log_mel(samples, 80, dither=1.0, rng=document_rng(0, 0, "a"))
    np.testing.assert_array_equal(samples, 1)


def test_dither_is_a_function_of_seed_epoch_and_key():
    noise = 1e-4 * np.random.default_rng(0).standard_normal(1700).astype(np.float32)

    def dithered(seed: int, epoch: int, key: str) -> np.ndarray:
        return log_mel(noise, 80, DITHER, document_rng(seed, epoch, key))

    first = dithered(1, 2, "3:a.wav")
    np.testing.assert_array_equal(first, dithered(1, 2, "3:a.wav"))
    for other in [(2, 2, "3:a.wav"), (1, 3, "3:a.wav"), (1, 2, "4:a.wav"), (12, 0, "3:a.wav")]:
        assert np.abs(first - dithered(*other)).max() > 1e-3
    assert 1e-3 < np.abs(first - log_mel(noise, 80)).max() < 2


def test_document_rng_is_the_same_in_every_process():
    assert document_rng(0, 1, "7:clips/é.wav").integers(2**32) == 1685271000


def test_dither_without_a_generator_is_refused():
    with pytest.raises(ValueError, match="document_rng"):
        log_mel(np.zeros(400, np.float32), 80, dither=DITHER)


@pytest.mark.parametrize("length", [0, 159, 319])
def test_under_two_frames_is_refused(length):
    with pytest.raises(ValueError, match=f"{length} samples make"):
        log_mel(np.zeros(length, np.float32), 80)


@pytest.mark.parametrize("mels", [80, 128])
def test_filters_have_unit_area_and_cannot_be_overwritten(mels):
    filters = mel_filterbank(mels)
    assert filters.shape == (257, mels)
    wide = filters[:, -20:]  # ten bins or more under the triangle: their sum is the integral
    np.testing.assert_allclose(wide.sum(axis=0) * 31.25, 1, atol=0.02)
    assert filters is mel_filterbank(mels)
    with pytest.raises(ValueError, match="read-only"):
        filters[0, 0] = 1


def test_more_bands_than_the_spectrum_can_fill_are_refused():
    with pytest.raises(ValueError, match="400 mel bands leave bands"):
        mel_filterbank(400)


MASKS = SpecAugmentConfig(freq=(2, 5), time=(3, 0.1))


def augmented(lengths: list[int], masks: SpecAugmentConfig, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(features, what became of them) [frames, 16], of a recording in chunks of these lengths."""
    rng = np.random.default_rng(9)
    chunks = [rng.uniform(1, 2, (n, 16)).astype(np.float32) for n in lengths]
    out = spec_augment(chunks, masks, document_rng(0, seed, "a"), chunks[0].shape[1])
    assert [chunk.shape for chunk in out] == [chunk.shape for chunk in chunks]
    assert all(chunk.all() for chunk in chunks), "the input is left alone"
    return np.concatenate(chunks), np.concatenate(out)


def test_masks_are_bands_and_spans_of_zeros_and_all_else_is_left_alone():
    most_bands = most_frames = 0
    for seed in range(60):
        before, after = augmented([100, 37, 3], MASKS, seed)
        masked = after == 0
        np.testing.assert_array_equal(after[~masked], before[~masked])
        bands, frames = masked.all(axis=0), masked.all(axis=1)
        np.testing.assert_array_equal(masked, bands | frames[:, None])
        assert bands.sum() <= 2 * 5
        assert frames.sum() <= 3 * 14
        most_bands, most_frames = max(most_bands, bands.sum()), max(most_frames, frames.sum())
    assert most_bands >= 8, "widths up to the widest are drawn"
    assert most_frames >= 28, "and up to the longest"


def test_every_band_and_every_frame_is_masked_now_and_then():
    once = SpecAugmentConfig(freq=(1, 16), time=(1, 1.0))
    shares = [
        np.mean([augmented([9, 4], m, seed)[1] == 0 for seed in range(300)], axis=0) for m in (once, MASKS)
    ]
    assert all(share.min() > 0.05 and share.max() < 0.95 for share in shares)


def test_a_recording_of_several_chunks_is_masked_as_one():
    whole, cut = (augmented(lengths, MASKS, seed=3)[1] for lengths in ([140], [100, 37, 3]))
    np.testing.assert_array_equal(whole == 0, cut == 0)
    across = [augmented([20, 20], SpecAugmentConfig(time=(1, 0.5)), s)[1] for s in range(20)]
    assert any((features[19:21] == 0).all() for features in across), "no span crossed the chunks' border"


def test_no_masks_change_nothing():
    np.testing.assert_array_equal(*augmented([50, 2], SpecAugmentConfig(), 0))
