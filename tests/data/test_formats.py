"""Ranges of recordings against one decode of the whole, in every format; headers that mislead."""

import struct
import tarfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from jaxthd.data.audio.recordings import AudioError, from_samples, load_audio, recording_length
from jaxthd.data.example import Clip, Member, Samples
from jaxthd.planning.lengths import clip_samples
from tests.data.sound_files import (
    FORMATS,
    HEADERLESS,
    encoded,
    id3,
    mp3_frames,
    one_decode,
    replaced,
    speech,
)

MODES = ("CONSTANT", "AVERAGE", "VARIABLE")


@pytest.fixture(autouse=True)
def unchanged_rate(monkeypatch):
    """Samples are compared at the file's own rate: resampling differs at a range's ends."""
    monkeypatch.setattr(soxr, "resample", lambda samples, *_: samples)


def check_ranges(path: Path, *, offsets: int, member: Member | None = None, reference: Path | None = None):
    """Whole and in ranges, the file equals its one decode."""
    whole, rate = one_decode(reference or path)
    np.testing.assert_allclose(load_audio(path, member=member), whole, atol=1e-6)
    assert recording_length(path, member).seconds == pytest.approx(len(whole) / rate, abs=1e-6)
    some = np.random.default_rng(len(whole)).integers(0, len(whole) - 1000, offsets).tolist()
    for start in (*some, 1, len(whole) // 2 + 1, max(len(whole) - rate, 0), len(whole) - 500):
        part = load_audio(path, start / rate, min(1000, len(whole) - start) / rate, member=member)
        np.testing.assert_allclose(part, whole[start : start + 1000], atol=1e-6, err_msg=f"{start}")
    np.testing.assert_allclose(load_audio(path, 1000 / rate, member=member), whole[1000:], atol=1e-6)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in FORMATS}))
def test_a_range_of_any_format_is_that_of_the_whole(tmp_path, kind):
    written = 0
    for subtype, channels in product([s for k, s in FORMATS if k == kind], (1, 2)):
        data = encoded(speech(0.8, 16_000, channels, seed=channels), 16_000, kind, subtype)
        if data is not None:
            (tmp_path / "a").write_bytes(data)
            check_ranges(tmp_path / "a", offsets=1)
            written += 1
    assert written


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
def test_many_ranges_of_any_format_at_any_rate(tmp_path, kind, subtype):
    for rate, channels in product((8_000, 48_000), (1, 2)):
        data = encoded(speech(5, rate, channels, seed=rate + channels), rate, kind, subtype)
        if data is not None:
            (tmp_path / "a").write_bytes(data)
            check_ranges(tmp_path / "a", offsets=8)


def test_a_format_without_a_header_is_refused(tmp_path):
    for kind in HEADERLESS:
        (tmp_path / f"a.{kind.lower()}").write_bytes(bytes(32_000))
        assert_refused(tmp_path / f"a.{kind.lower()}", "libsndfile cannot read it")


def in_tar(path: Path) -> tuple[Path, Member]:
    """The file as the second member of a tar file."""
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        tar.add(path, "before")
        tar.add(path, "this")
    with tarfile.open(path.with_suffix(".tar")) as tar:
        info = tar.getmember("this")
    return path.with_suffix(".tar"), Member("this", info.offset_data, info.size)


def check_mp3(folder: Path, wave: np.ndarray, rate: int, offsets: int, **options) -> None:
    """An MP3 file with its Xing or Info header, and without, with tags before and after, in a tar file."""
    data = encoded(wave, rate, "MP3", **options)
    assert data is not None
    path, plain = folder / "a.mp3", folder / "plain.mp3"
    path.write_bytes(data)
    first, *frames = mp3_frames(data)
    if tagged := b"Xing" in first or b"Info" in first:
        check_ranges(path, offsets=offsets)
        whole = one_decode(path)[0]
        tag = first.index(b"Xing" if b"Xing" in first else b"Info")
        delay = int.from_bytes(first[tag + 141 : tag + 144], "big") >> 12
    else:
        frames = [first, *frames]
    plain.write_bytes(b"".join(frames))
    found = load_audio(plain)
    assert len(found) == len(frames) * (1152 if rate >= 32_000 else 576)
    assert recording_length(plain).seconds * rate == pytest.approx(len(found))
    assert clip_samples(Clip(plain, 0.25)) == pytest.approx((len(found) / rate - 0.25) * 16_000, abs=1)
    if tagged:  # which says how many samples come before the sound, and those are not read
        np.testing.assert_allclose(found[delay + 529 :][: len(whole)], whole, atol=1e-6)
    for before, after in ((b"", b""), (id3(12_800), b""), (b"", b"TAG" + bytes(125))):
        path.write_bytes(before + b"".join(frames) + after)
        at = in_tar(path)
        for start in np.random.default_rng(1).integers(0, len(found) - 1000, offsets).tolist():
            part = load_audio(path, start / rate, 1000 / rate)
            np.testing.assert_allclose(part, found[start : start + 1000], atol=1e-6)
            np.testing.assert_array_equal(load_audio(at[0], start / rate, 1000 / rate, member=at[1]), part)
        np.testing.assert_allclose(load_audio(path), found, atol=1e-6)


@pytest.mark.parametrize(("rate", "channels"), [(44_100, 2), (24_000, 1), (8_000, 1)])
def test_mp3_is_exact_with_and_without_its_header(tmp_path, rate, channels):
    """MPEG 1, 2 and 2.5. At 24 kHz the bit reservoir reaches far back."""
    check_mp3(tmp_path, speech(5, rate, channels), rate, 2, bitrate_mode="VARIABLE", compression_level=0.5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100])
def test_mp3_of_any_rate_and_bit_rate_is_exact(tmp_path, rate, mode):
    for channels, level in product((1, 2), (0.0, 0.5, 0.99)):
        wave = speech(12, rate, channels, seed=channels)
        check_mp3(tmp_path, wave, rate, 6, bitrate_mode=mode, compression_level=level)


@pytest.mark.parametrize(
    "mode", ["VARIABLE", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in MODES[:2])]
)
def test_a_long_mp3_is_read_whole(tmp_path, mode):
    """Longer than a block of the reader, 2^20 samples: soundfile seeks between two blocks."""
    wave = np.tile(speech(9, 16_000), (9, 1))
    data = encoded(wave, 16_000, "MP3", bitrate_mode=mode, compression_level=0.9)
    (tmp_path / "a.mp3").write_bytes(data or b"")
    assert len(wave) > 2**20
    check_ranges(tmp_path / "a.mp3", offsets=4)


def test_joined_mp3_is_read_to_its_end(tmp_path):
    waves = [speech(3, 16_000, seed=n) for n in (1, 2)]
    parts = [encoded(w, 16_000, "MP3", bitrate_mode="VARIABLE", compression_level=0.5) or b"" for w in waves]
    alone = []
    for part in parts:
        (tmp_path / "a.mp3").write_bytes(part)
        alone.append(load_audio(tmp_path / "a.mp3"))
    (tmp_path / "a.mp3").write_bytes(parts[0] + id3(1280) + parts[1])
    found = load_audio(tmp_path / "a.mp3")
    np.testing.assert_allclose(found[: 3 * 16_000 - 1000], alone[0][:-1000], atol=1e-6)
    assert len(found) == pytest.approx(6 * 16_000, abs=4000)
    tail = found[3 * 16_000 + 4000 :]
    best = max(
        abs(np.corrcoef(tail[4000:24_000], alone[1][k : k + 20_000])[0, 1]) for k in range(4000, 12_000)
    )
    assert best > 0.99, "the second recording is heard"
    assert recording_length(tmp_path / "a.mp3").seconds == pytest.approx(len(found) / 16_000)
    part = load_audio(tmp_path / "a.mp3", 5.0, 0.5)
    np.testing.assert_allclose(part, found[80_000:88_000], atol=1e-6)


def test_the_count_of_an_mp3_header_is_checked(tmp_path):
    data = encoded(speech(5, 16_000), 16_000, "MP3", bitrate_mode="VARIABLE", compression_level=0.5) or b""
    path = tmp_path / "a.mp3"
    path.write_bytes(data)
    whole = load_audio(path)
    count = len(mp3_frames(data)) - 1
    path.write_bytes(replaced(data, b"Xing", 8, ">I", count // 2))
    np.testing.assert_allclose(load_audio(path)[: len(whole)], whole, atol=1e-6)
    np.testing.assert_allclose(load_audio(path, 4.0, 0.5), whole[64_000:72_000], atol=1e-6)
    assert recording_length(path).seconds == pytest.approx(5.0, abs=0.15)
    path.write_bytes(replaced(data, b"Xing", 8, ">I", 2 * count))
    assert_refused(path, "cut short: its header says 10")
    path.write_bytes(data[: len(data) // 2])
    assert_refused(path, "cut short: its header says 5")
    np.testing.assert_allclose(load_audio(path, 0.5, 1.0), whole[8000:24_000], atol=1e-6)


def assert_refused(path: Path, why: str, member: Member | None = None) -> None:
    """Both the reader and the measure of durations refuse the file, and `jaxthd plan` leaves it out."""
    for read in (load_audio, recording_length):
        with pytest.raises(AudioError, match=why):
            read(path, member=member)
    assert clip_samples(Clip(path, member=member)) == 0


WAVE = speech(3, 16_000)
CUT = [
    ("WAV", "PCM_16"), ("WAV", "GSM610"), ("WAV", "IMA_ADPCM"), ("WAVEX", "PCM_24"), ("RF64", "PCM_16"),
    ("AIFF", "PCM_16"), ("AIFF", "GSM610"), ("AU", "PCM_16"), ("CAF", "PCM_16"), ("W64", "PCM_16"),
    ("W64", "GSM610"), ("NIST", "PCM_16"), ("MP3", None), ("OGG", "VORBIS"), ("OGG", "OPUS"),
    ("AVR", "PCM_16"), ("MAT4", "PCM_16"), ("MAT5", "PCM_16"), ("MPC2K", "PCM_16"), ("SDS", "PCM_16"),
    ("SVX", "PCM_16"), ("VOC", "PCM_16"), ("WVE", "ALAW"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "subtype"), CUT)
def test_a_file_cut_short_is_refused_but_by_the_ranges_that_are_there(tmp_path, kind, subtype):
    wave = speech(12, 16_000) if kind == "OGG" else WAVE  # of several pages
    rate = 8_000 if kind == "WVE" else 16_000
    data = encoded(wave, rate, kind, subtype) or b""
    (tmp_path / "a").write_bytes(data)
    whole = load_audio(tmp_path / "a")
    (tmp_path / "a").write_bytes(data[: len(data) // 2])
    assert_refused(tmp_path / "a", "cut short: ")
    path, member = in_tar(tmp_path / "a")
    assert_refused(path, "cut short: ", member)
    part = whole[round(0.2 * rate) :][: rate // 2]
    np.testing.assert_allclose(load_audio(tmp_path / "a", 0.2, 0.5), part, atol=1e-6)
    with pytest.raises(AudioError, match=r"past the end|the manifest says 3\.0 s"):
        load_audio(tmp_path / "a", 0.4 * len(wave) / rate, 3.0)


def test_apple_lossless_that_is_cut_short_is_refused(tmp_path):
    """libsndfile would read noise from its last packet, which is not whole."""
    (tmp_path / "a").write_bytes((encoded(WAVE, 16_000, "CAF", "ALAC_32") or b"")[:-2000])
    assert_refused(tmp_path / "a", "libsndfile cannot read it")
    with pytest.raises(AudioError, match="libsndfile cannot read it"):
        load_audio(tmp_path / "a", 0.2, 2.5)


@pytest.mark.parametrize("name", ["a.au", "a.snd"])
def test_a_file_that_is_au_by_its_name_alone_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>404</html>" * 1000)
    assert_refused(tmp_path / name, "it has no header of AU")


@pytest.mark.parametrize("stated", [0, 48_000, 96_000])
def test_a_flac_file_is_cut_short_wherever_its_header_says_it_ends(tmp_path, stated):
    data = encoded(WAVE, 16_000, "FLAC") or b""
    (tmp_path / "a.flac").write_bytes(flac_of(data[: len(data) // 2], stated))
    assert_refused(tmp_path / "a.flac", "libsndfile cannot read it|cut short")


def flac_of(data: bytes, frames: int) -> bytes:
    """The file with this number of frames in its header; 0 for unknown."""
    return (
        data[:21]
        + bytes([data[21] & 0xF0 | frames >> 32])
        + struct.pack(">I", frames & 2**32 - 1)
        + data[26:]
    )


def test_flac_of_unknown_length_is_read_to_its_end(tmp_path):
    data = encoded(WAVE, 16_000, "FLAC") or b""
    for name, frames in (("a.flac", 48_000), ("b.flac", 0)):
        (tmp_path / name).write_bytes(flac_of(data, frames))
    whole = load_audio(tmp_path / "a.flac")
    for path, member in ((tmp_path / "b.flac", None), in_tar(tmp_path / "b.flac")):
        np.testing.assert_array_equal(load_audio(path, member=member), whole)
        np.testing.assert_array_equal(load_audio(path, 1.25, 0.5, member=member), whole[20_000:28_000])
        np.testing.assert_array_equal(load_audio(path, 2.5, member=member), whole[40_000:])
        assert recording_length(path, member).seconds == 3.0
        with pytest.raises(AudioError, match=r"past the end at 3\.000 s"):
            load_audio(path, 3.5, member=member)
    (tmp_path / "b.flac").write_bytes(flac_of(data, 16_000))
    assert_refused(tmp_path / "b.flac", r"its header says 1\.000 s, 3\.000 s are there")
    (tmp_path / "b.flac").write_bytes(flac_of(data, 96_000))
    assert_refused(tmp_path / "b.flac", r"cut short: its header says 6\.000 s, 3\.000 s are there")


STREAMED = {
    "WAV": (b"data", 4, "<I", (0, 2**32 - 1, 2**31 - 4096, 2**31)),
    "AU": (b".snd", 8, ">I", (0, 2**32 - 1)),
    "CAF": (b"data", 4, ">q", (-1,)),
    "W64": (b"data", 16, "<q", (-1, 0)),
    "AIFF": (b"SSND", 4, ">I", (0, 2**32 - 1)),
}


@pytest.mark.parametrize("kind", STREAMED)
def test_a_length_that_streams_leave_open_is_that_of_what_is_there(tmp_path, kind):
    mark, offset, form, values = STREAMED[kind]
    data = encoded(WAVE, 16_000, kind, "PCM_16") or b""
    (tmp_path / "a").write_bytes(data)
    whole = load_audio(tmp_path / "a")
    for value in values:
        (tmp_path / "a").write_bytes(replaced(data, mark, offset, form, value))
        for path, member in ((tmp_path / "a", None), in_tar(tmp_path / "a")):
            np.testing.assert_array_equal(load_audio(path, member=member), whole)
            np.testing.assert_array_equal(load_audio(path, 2.5, 0.25, member=member), whole[40_000:44_000])
            assert recording_length(path, member).seconds == 3.0


@pytest.mark.parametrize("kind", ["WAV", "AU", "CAF", "AIFF"])
def test_a_header_that_says_less_than_there_is_is_refused(tmp_path, kind):
    mark, offset, form, _ = STREAMED[kind]
    data = encoded(WAVE, 16_000, kind, "PCM_16") or b""
    (tmp_path / "a").write_bytes(replaced(data, mark, offset, form, 32_000))
    assert_refused(tmp_path / "a", r"its header says 1\.\d+ s, 3\.\d+ s are there|its header says 0\.999")


@pytest.mark.parametrize("size", [9, 10])
def test_chunks_after_the_samples_are_no_samples(tmp_path, size):
    data = encoded(WAVE, 16_000, "WAV") or b""
    (tmp_path / "a.wav").write_bytes(data + b"LIST" + struct.pack("<I", size) + b"INFO" + bytes(6))
    assert len(load_audio(tmp_path / "a.wav")) == 48_000
    assert recording_length(tmp_path / "a.wav").seconds == 3.0


@pytest.mark.parametrize(("kind", "subtype"), [("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", "PCM_16")])
def test_joined_streams_are_refused_where_only_the_first_is_read(tmp_path, kind, subtype):
    data = encoded(WAVE, 16_000, kind, subtype) or b""
    (tmp_path / "a").write_bytes(data + data)
    assert_refused(tmp_path / "a", "it holds several streams, of which the first alone would be read")
    assert len(load_audio(tmp_path / "a", 0.5, 1.0)) == 16_000


def test_an_ogg_stream_without_its_last_page_is_read(tmp_path):
    """A stream that was recorded until it was stopped is such: nothing marks its end."""
    data = encoded(speech(8, 16_000), 16_000, "OGG", "VORBIS") or b""
    (tmp_path / "a.ogg").write_bytes(data)
    whole = load_audio(tmp_path / "a.ogg")
    (tmp_path / "a.ogg").write_bytes(data[: data.rindex(b"OggS")])
    found = load_audio(tmp_path / "a.ogg")
    assert 0.7 * len(whole) < len(found) < len(whole)
    np.testing.assert_allclose(found[:-2000], whole[: len(found) - 2000], atol=1e-6)


@pytest.mark.parametrize("gain", [1.0, 0.99])
def test_channels_in_opposite_phase_are_refused(tmp_path, gain):
    left = speech(2, 16_000)[:, 0]
    soundfile.write(tmp_path / "a.wav", np.stack([left, -gain * left], 1), 16_000)
    with pytest.raises(AudioError, match="its channels cancel: they are in opposite phase"):
        load_audio(tmp_path / "a.wav")
    with pytest.raises(AudioError, match="its channels cancel"):
        from_samples(Samples(np.stack([left, -gain * left], 1), 16_000))


def test_channels_that_differ_and_silence_are_no_opposite_phase(tmp_path):
    rng, left = np.random.default_rng(0), speech(2, 16_000)[:, 0]
    pairs = [(left, 0 * left), (left, -0.9 * left), (rng.normal(0, 0.1, (2, 32_000))), (0 * left, 0 * left)]
    for pair in pairs:
        soundfile.write(tmp_path / "a.wav", np.stack([*pair], 1), 16_000, subtype="FLOAT")
        expected = np.stack([*pair], 1).astype(np.float32).mean(1, dtype=np.float32)
        np.testing.assert_allclose(load_audio(tmp_path / "a.wav"), expected, atol=1e-7)


def test_an_mp3_file_that_stops_decoding_in_the_middle_is_refused(tmp_path):
    """mpg123 gives up after 1,024 bytes that are no frames."""
    data = encoded(WAVE, 16_000, "MP3", bitrate_mode="VARIABLE", compression_level=0.5) or b""
    frames = mp3_frames(data)
    for first in (0, 1):  # with the Xing header, and without
        (tmp_path / "a.mp3").write_bytes(b"".join([*frames[first:40], bytes(3000), *frames[40:]]))
        with pytest.raises(AudioError, match=r"cut short|libsndfile cannot read it"):
            load_audio(tmp_path / "a.mp3")
