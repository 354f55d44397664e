"""Sound files and tar files of them, undamaged and damaged."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.fuzz.damage import damaged_bytes

FORMATS: dict[str, dict[str, Any]] = {
    "s16.wav": {"subtype": "PCM_16"},
    "f32.wav": {"subtype": "FLOAT"},
    "s24.flac": {"subtype": "PCM_24"},
    "vorbis.ogg": {"subtype": "VORBIS"},
    "opus.ogg": {"subtype": "OPUS"},
    "layer3.mp3": {},
    "gsm.wav": {"subtype": "GSM610"},
    "variable.mp3": {"bitrate_mode": "VARIABLE", "compression_level": 0.5},
    "adpcm.wav": {"subtype": "MS_ADPCM"},
}


def make_recordings(folder: Path) -> None:
    """Writes the undamaged recordings: 0.8 s of noise in every format, two channels in some."""
    rng = np.random.default_rng(0)
    for number, (name, options) in enumerate(FORMATS.items()):
        rate = (16_000, 44_100, 48_000, 8_000)[number % 4]
        soundfile.write(folder / name, rng.normal(0, 0.1, (rate * 4 // 5, 1 + number % 2)), rate, **options)


def damaged_file(rng: np.random.Generator, folder: Path, name: str) -> str:
    """Writes a damaged file, or none; returns its name."""
    source = folder / str(rng.choice(list(FORMATS)))
    path = (
        folder / f"{name}{source.suffix if rng.random() < 0.8 else rng.choice(['.raw', '.wav', '.flac', ''])}"
    )
    match rng.integers(8):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(rng.choice(["nowhere", path.name, "/dev/zero", "s16.wav"]))
        case 2:
            path.write_bytes(rng.choice([b"", b"\x00" * 5000, b"RIFF", b"fLaC", b"OggS", rng.bytes(3000)]))
        case 3 if source.suffix == ".flac":
            data = bytearray(source.read_bytes())
            data[18:26] = rng.bytes(8)  # rate, channels, bits and number of samples
            path.write_bytes(data)
        case 3 if source.suffix == ".wav":
            data = bytearray(source.read_bytes())
            start, size = ((4, 4), (20, 2), (22, 2), (24, 4), (32, 2), (34, 2), (40, 4))[rng.integers(7)]
            data[start : start + size] = rng.choice([rng.bytes(size), bytes(size), b"\xff" * size])
            path.write_bytes(data)
        case _:
            path.write_bytes(damaged_bytes(rng, source.read_bytes()))
    return path.name


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def damaged_tar(rng: np.random.Generator, folder: Path, path: Path) -> None:
    """Writes a tar file of the recordings, one with a long name, damaged in its headers or anywhere."""
    files = {name: (folder / name).read_bytes() for name in FORMATS} | {"long" * 40: b"x"}
    names = list(files)
    rng.shuffle(names)
    write_tar(path, {name: files[name] for name in names})
    if rng.random() < 0.3:
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
        return
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = int(rng.choice([info.offset for info in tar.getmembers()]))
    # Name, size, checksum, type, name of the link's target, magic.
    start, size = ((0, 100), (124, 12), (148, 8), (156, 1), (157, 100), (257, 8))[rng.integers(6)]
    number = int(rng.choice([-1, -512, 0, 1, 2**20, 2**33, 2**40, 2**62])).to_bytes(12, "big", signed=True)
    signed = (b"\xff" if number[0] else b"\x80") + number[1:]
    strange = [rng.bytes(size), bytes(size), b"../" * 40, rng.choice(list(b"012345678gxLKSXVD")), signed]
    kept = strange[rng.integers(len(strange))]
    data[at + start : at + start + size] = bytes([kept] if isinstance(kept, np.integer) else kept)[
        :size
    ].ljust(size, b"\0")
    if rng.random() < 0.8:
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    path.write_bytes(data)


def strange_samples(rng: np.random.Generator, folder: Path, name: str) -> str:
    """Writes a sound file in a valid format whose samples no recording should have."""
    channels = int(rng.choice([1, 2, 255, 1024]))
    rate = int(rng.choice([1, 999, 1001, 11_025, 16_000, 16_000, 44_100, 655_350, 2**31 - 1]))
    wave = rng.normal(0, 0.1, (int(rng.choice([0, 1, 159, 320, 4000])), channels)).astype(np.float32)
    if wave.size:
        strange = [0.0, 1.0, np.nan, np.inf, -np.inf, 1e6, 1e30, 3.4e38, 1e-42][rng.integers(9)]
        wave[(slice(None) if rng.random() < 0.5 else int(rng.integers(len(wave))))] = strange
    soundfile.write(folder / f"{name}.wav", wave, rate, subtype="FLOAT")
    return f"{name}.wav"
