import tracemalloc

import numpy as np
import pytest
import soundfile

from jaxthd.data.audio.recordings import AudioError, from_samples, load_audio
from jaxthd.data.example import Samples
from jaxthd.models.front_ends import FastConformer


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize(
    ("name", "rate", "channels"),
    [
        ("a.wav", 16_000, 1),
        ("b.wav", 8_000, 2),
        ("c.flac", 44_100, 1),
        ("d.ogg", 22_050, 2),
        ("e.mp3", 48_000, 1),
    ],
)
def test_any_format_rate_and_channel_count_becomes_16_khz_mono(tmp_path, name, rate, channels):
    path = tmp_path / name
    soundfile.write(path, np.stack([tone(1.237, rate)] * channels, axis=1), rate)
    samples = load_audio(path)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) == pytest.approx(1.237 * 16_000, abs=1)
    middle = samples[2000:-2000]
    np.testing.assert_allclose(middle, tone(1.237, 16_000)[2000 : 2000 + len(middle)], atol=0.02)


@pytest.mark.parametrize(
    ("rate", "channels", "dtype"), [(16_000, 1, "f4"), (44_100, 2, "f8"), (8_000, 3, "f2")]
)
def test_samples_in_memory_are_heard_as_a_file_is(tmp_path, rate, channels, dtype):
    wave = np.random.default_rng(0).uniform(-1, 1, (rate, channels)).astype(dtype)
    soundfile.write(tmp_path / "a.wav", wave.astype(np.float32), rate, subtype="FLOAT")
    found = from_samples(Samples(wave, rate))
    np.testing.assert_allclose(found, load_audio(tmp_path / "a.wav"), atol=1e-6)
    if channels == 1:
        np.testing.assert_array_equal(from_samples(Samples(wave[:, 0], rate)), found)
    assert Samples(wave, rate).duration == 1.0


@pytest.mark.parametrize(
    ("samples", "rate", "cause"),
    [
        (
            np.zeros(1000, np.int16),
            16_000,
            r"samples of shape \(1000,\) and type int16; expected",
        ),
        (np.zeros((2, 2, 2)), 16_000, "expected floating-point numbers"),
        (np.zeros(0), 16_000, "expected floating-point numbers"),
        (np.zeros(1000), 0, "0 samples a second; expected 1000 to 1000000"),
        (np.full(1000, np.nan), 16_000, "1000 samples are not finite"),
        (np.full(1000, 1e7), 16_000, "samples as large as 1e"),
        (np.zeros(100), 16_000, "too short, 100 samples at 16 kHz"),
        (np.zeros(32_001), 16_000, "more than 2.0 s, which is all that data.audio_capacity holds"),
    ],
)
def test_samples_that_cannot_be_used_are_refused_with_the_cause(samples, rate, cause):
    with pytest.raises(AudioError, match=cause):
        from_samples(Samples(samples, rate), most_seconds=2.0)


def test_channels_are_averaged(tmp_path):
    left = tone(0.5, 16_000)
    soundfile.write(tmp_path / "a.wav", np.stack([left, -left, 0.5 * left], axis=1), 16_000, subtype="FLOAT")
    np.testing.assert_allclose(load_audio(tmp_path / "a.wav"), left / 6, atol=1e-7)


def test_a_range_is_that_slice_and_nothing_outside_it_is_read(tmp_path):
    wave = np.random.default_rng(0).uniform(-1, 1, 48_000).astype(np.float32)
    wave[[15_999, 24_000]] = np.nan
    soundfile.write(tmp_path / "a.wav", wave, 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(load_audio(tmp_path / "a.wav", 1.0, 0.5), wave[16_000:24_000])
    np.testing.assert_array_equal(load_audio(tmp_path / "a.wav", 2.0), wave[32_000:])
    with pytest.raises(AudioError, match=r"a\.wav: 2 samples are not finite"):
        load_audio(tmp_path / "a.wav")


def test_a_duration_may_end_a_little_past_the_file_but_not_a_lot(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(1.0, 16_000), 16_000)
    assert len(load_audio(tmp_path / "a.wav", 0.5, 0.6)) == 8_000
    with pytest.raises(AudioError, match=r"a\.wav: 0\.500 s from offset 0\.5 s, the manifest says 1\.5 s"):
        load_audio(tmp_path / "a.wav", 0.5, 1.5)


@pytest.mark.parametrize(
    ("make", "arguments", "cause"),
    [
        (lambda p: None, (), "no such file"),
        (lambda p: p.mkdir(), (), "no such file"),
        (lambda p: p.write_bytes(b""), (), "cannot read"),
        (lambda p: p.write_text("no audio"), (), "cannot read"),
        (lambda p: soundfile.write(p, np.zeros(0), 16_000, format="WAV"), (), "no samples"),
        (
            lambda p: soundfile.write(p, tone(1, 8_000), 8_000, format="WAV"),
            (1.0,),
            "past the end at 1.000 s",
        ),
        (lambda p: soundfile.write(p, tone(1, 8_000), 8_000, format="WAV"), (-0.5,), "offset -0.5 s"),
        (lambda p: soundfile.write(p, tone(1, 8_000), 8_000, format="WAV"), (0.0, 0.0), "duration 0.0 s"),
        (lambda p: soundfile.write(p, np.zeros(319), 16_000, format="WAV"), (), "too short, 319 samples"),
        (lambda p: soundfile.write(p, np.zeros(440), 44_100, format="WAV"), (), "too short, 160 samples"),
    ],
)
def test_a_recording_that_cannot_be_used_is_named_with_its_cause(tmp_path, make, arguments, cause):
    make(tmp_path / "clip")
    with pytest.raises(AudioError, match=rf"clip: .*{cause}"):
        load_audio(tmp_path / "clip", *arguments)


def wav_header(path, **fields: int) -> None:
    """Overwrites numbers in the header of a 44-byte-header WAV: rate, channels, size of the data."""
    data = bytearray(path.read_bytes())
    for name, (start, stop) in {"channels": (22, 24), "rate": (24, 28), "size": (40, 44)}.items():
        if name in fields:
            data[start:stop] = fields[name].to_bytes(stop - start, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"channels": 0}, "libsndfile cannot read it"),
        ({"rate": 0}, "libsndfile cannot read it|0 samples a second"),
        ({"rate": 3}, "3 samples a second; expected 1000 to 1000000"),
        ({"rate": 2**31 - 1}, "2147483647 samples a second"),
    ],
)
def test_a_header_gone_wrong_is_named_with_its_cause(tmp_path, fields, cause):
    soundfile.write(tmp_path / "clip.wav", tone(1.0, 16_000), 16_000)
    wav_header(tmp_path / "clip.wav", **fields)
    with pytest.raises(AudioError, match=rf"clip\.wav: .*({cause})"):
        load_audio(tmp_path / "clip.wav")


def test_a_header_that_claims_days_takes_no_memory(tmp_path):
    """FLAC keeps the number of samples in 36 bits of its first block: 68 billion here, 2^38 bytes."""
    soundfile.write(tmp_path / "a.flac", tone(1.0, 16_000), 16_000)
    data = bytearray((tmp_path / "a.flac").read_bytes())
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    (tmp_path / "a.flac").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(AudioError, match=r"a\.flac: libsndfile cannot read it"):
            load_audio(tmp_path / "a.flac")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_more_than_the_buffer_holds_is_refused_before_it_is_read(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.zeros(16_000 * 60), 16_000)
    assert len(load_audio(tmp_path / "a.flac", most_seconds=60.0)) == 16_000 * 60
    for duration in (None, 50.0):
        tracemalloc.start()
        try:
            with pytest.raises(
                AudioError, match=r"more than 2\.0 s, which is all that data\.audio_capacity holds"
            ):
                load_audio(tmp_path / "a.flac", 3.0, duration, most_seconds=2.0)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
    assert len(load_audio(tmp_path / "a.flac", 3.0, 2.0, most_seconds=2.0)) == 32_000


@pytest.mark.parametrize(("level", "cause"), [(1e7, "samples as large as 1e.07"), (3e38, "3e.38")])
def test_samples_out_of_all_scale_are_refused(tmp_path, level, cause):
    soundfile.write(tmp_path / "a.wav", np.full(1000, level), 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match=cause):
        load_audio(tmp_path / "a.wav")


def test_a_long_recording_is_read_whole(tmp_path):
    """Longer than a block of the reader."""
    wave = np.random.default_rng(0).uniform(-1, 1, (600_000, 2)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", wave, 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(load_audio(tmp_path / "a.wav"), wave.mean(axis=1))


def test_a_truncated_file_is_named_with_its_cause(tmp_path):
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 32_000)
    soundfile.write(tmp_path / "clip.flac", noise, 16_000)
    data = (tmp_path / "clip.flac").read_bytes()
    (tmp_path / "clip.flac").write_bytes(data[: len(data) // 2])
    with pytest.raises(AudioError, match=r"clip\.flac: "):
        load_audio(tmp_path / "clip.flac", 0.0, 2.0)


def test_two_mel_frames_are_enough(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(320), 16_000)
    assert len(load_audio(tmp_path / "a.wav")) == 320


@pytest.mark.parametrize("chunk", [2, 10, 30])
def test_chunks_lose_nothing_and_all_have_two_mel_frames(chunk):
    rng = np.random.default_rng(0)
    front_end = FastConformer(chunk_seconds=chunk / 100, num_mels=8)
    around = [
        160 * (n * chunk + more) + tail for n in (1, 2, 3) for more in (0, 1, 2) for tail in (0, 1, 159)
    ]
    for length in [320, 321, *around, *rng.integers(320, 20_000, 20).tolist()]:
        samples = rng.standard_normal(length).astype(np.float32)
        frames = [piece.frames for piece in front_end.pieces(length)]
        assert [len(run) for run in front_end.features(samples, None)] == frames
        assert frames[:-1] == [chunk] * (len(frames) - 1)
        assert 2 <= frames[-1] < chunk + 2
        assert frames[-1] <= chunk or (length // 160) % chunk < 2  # only a short tail is joined
        assert sum(frames) == length // 160
