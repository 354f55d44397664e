"""Data sets that tests make: recordings in tar files."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import soundfile


def sound(seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0, kind: str = "wav") -> bytes:
    """A file of noise."""
    noise = np.random.default_rng(seed).normal(0, 0.1, (round(seconds * rate), channels))
    file = io.BytesIO()
    soundfile.write(file, noise, rate, format=kind)
    return file.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files.items():
            add(tar, name, data)
    return path


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
