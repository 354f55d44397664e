"""Sound files in every format that libsndfile writes, whole and damaged, and their samples in one decode."""

import io
import struct
from pathlib import Path

import numpy as np
import soundfile

HEADERLESS = ("RAW", "SD2")
"""RAW has no header; SD2 keeps it in another file."""
FORMATS = [
    (kind, subtype)
    for kind in soundfile.available_formats()
    if kind not in HEADERLESS
    for subtype in soundfile.available_subtypes(kind)
]


class _OneDecode(soundfile.SoundFile):
    """soundfile seeks after each read of a seekable file, which fails for some formats."""

    def seekable(self) -> bool:
        return False


def speech(seconds: float, rate: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Bursts of noise and tones between silences, [samples, channels]: the bit rate of a codec varies."""
    rng, count, step = np.random.default_rng(seed), round(seconds * rate), max(rate // 4, 1)
    levels = np.repeat(rng.choice([0, 0, 1e-3, 0.05, 0.3], count // step + 1), step)[:count]
    tones = np.repeat(rng.choice([0, 0, 0.3], count // step + 1), step)[:count]
    noise = rng.normal(0, 0.5, (count, channels)) * levels[:, None]
    return np.clip(noise + (tones * np.sin(1300 * np.arange(count) / rate))[:, None], -1, 1)


def encoded(wave: np.ndarray, rate: int, kind: str, subtype: str | None = None, **options) -> bytes | None:
    """The bytes of a sound file; None where libsndfile does not write this subtype, rate or channels."""
    file = io.BytesIO()
    try:
        soundfile.write(file, wave, rate, format=kind, subtype=subtype, **options)
    except soundfile.LibsndfileError:
        return None
    return file.getvalue()


def one_decode(path: Path) -> tuple[np.ndarray, int]:
    """The mean of the channels, from the first sample to the last in one read, and the rate."""
    with _OneDecode(path) as file:
        return file.read(file.frames, dtype="float32", always_2d=True).mean(
            1, dtype=np.float32
        ), file.samplerate


def mp3_frames(data: bytes) -> list[bytes]:
    """The frames of an MP3 file without tags, that of the Xing or Info header first."""
    frames, at = [], 0
    while at + 4 <= len(data):
        first = data[at + 1] >> 3 & 3 == 3
        version = data[at + 1] >> 3 & 3
        rate = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}[version]
        bits_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
        bits_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
        bits = (bits_1 if first else bits_2)[data[at + 2] >> 4]
        size = (144 if first else 72) * 1000 * bits // rate[data[at + 2] >> 2 & 3] + (data[at + 2] >> 1 & 1)
        frames.append(data[at : at + size])
        at += size
    return frames


def id3(size: int) -> bytes:
    """An ID3v2 tag with so many bytes of padding, under 16,384, as where a cover picture is."""
    return b"ID3\x03\0\0\0\0" + bytes([size >> 7, size & 0x7F]) + bytes(size)


def replaced(data: bytes, mark: bytes, offset: int, form: str, value: int) -> bytes:
    """The bytes with the number `offset` bytes after `mark` replaced. form: struct's."""
    at, changed = data.index(mark) + offset, bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)
