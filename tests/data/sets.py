"""Data sets that tests make: recordings in tar files and tables. Manifests read by themselves."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.source import SourceSetting


def read_manifest(
    path: str | Path,
    *,
    tarred_audio: str = "",
    prompt: str = "{audio}",
    placeholder: str = "{audio}",
    prompts: bool = False,
) -> tuple[list[Example], list[Skipped]]:
    """Reads a manifest. tarred_audio, prompts: as in SourceSetting. prompt, placeholder: of DataConfig."""
    source = ManifestSource(SourceSetting(str(path), tarred_audio=tarred_audio, prompts=prompts))
    return source.read(DataConfig(prompt=prompt, audio_placeholder=placeholder))


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


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], group: int = 3) -> Path:
    """group: rows of a row group."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def write_arrow(path: Path, rows: Sequence[dict[str, Any]], group: int = 3, *, stream: bool = True) -> Path:
    """stream: in the format of streams, as datasets writes it; else in that of files."""
    import pyarrow.ipc

    table = pyarrow.Table.from_pylist(list(rows))
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)
    return path
