"""Recordings in the cells of tables, as sound files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from jaxthd.data.example import Cell
from jaxthd.data.tables import errors_of_tables, import_pyarrow, open_table, read_group

MOST_CHANNELS = 64
"""Most channels of a recording in a list of lists."""
EXPECTED_SHAPE = f"[samples], [channels, samples] or [samples, channels], of at most {MOST_CHANNELS} channels"


class CellError(ValueError):
    """A cell that holds no recording. The message says what is wrong with it."""


def open_cell(path: Path, cell: Cell) -> io.BufferedIOBase:
    """The recording of a cell as a sound file; samples become a WAV file of float32.

    A cell holds the bytes of a sound file; a struct of `bytes` and `path` (that of a file, from the table's
    folder, where there are no bytes); a struct of `array` and `sampling_rate`; a list of samples, with the
    rate in cell.rate_column; or the path of a file. Samples are floating-point numbers in [-1, 1] or 16-bit
    integers, of shape [samples], [channels, samples] or [samples, channels].
    Raises CellError for a cell that holds no recording, or cannot be read; UserError without pyarrow.
    Source: datasets.Audio (as it is stored).
    """
    import_pyarrow(path)
    try:
        names = (cell.column, *((cell.rate_column,) if cell.rate_column else ()))
        row = read_group(open_table(path), cell.group, names).slice(cell.row, 1)
        row.validate(full=True)
        rate = row.column(cell.rate_column)[0].as_py() if cell.rate_column else None
        return _sound_file(row.column(cell.column)[0], rate, path.parent)
    except CellError:
        raise
    except (*errors_of_tables(), soundfile.SoundFileError) as error:
        raise CellError(f"{cell.column} cannot be read ({error})") from error


def _sound_file(value: Any, rate: Any, folder: Path) -> io.BufferedIOBase:
    """value: a scalar of pyarrow's."""
    fields = {field.name for field in value.type} if is_struct(value.type) else set()
    if not value.is_valid or (fields and not fields & {"array", "bytes", "path"}):
        raise CellError(f"it holds no recording, but {value.type}; expected bytes, samples or a path")
    if "array" in fields:
        rate = value["sampling_rate"].as_py() if "sampling_rate" in fields else None
        return _sound_file(value["array"], rate, folder)
    if is_list(value.type):
        return _of_samples(value, rate)
    parts = [value[name] for name in ("bytes", "path") if name in fields] if fields else [value]
    held = next((part.as_py() for part in parts if part.is_valid), None)
    if isinstance(held, bytes) and held:
        return io.BytesIO(held)
    if not isinstance(held, str) or not held:
        raise CellError("it holds no recording; expected bytes, samples or a path")
    if not (folder / held).is_file():
        raise CellError(f"there is no file {folder / held}; expected the recording there, or its bytes")
    return (folder / held).open("rb")


def _of_samples(value: Any, rate: Any) -> io.BufferedIOBase:
    """A WAV file of a list of samples."""
    if not isinstance(rate, int | float) or not 0 < rate < 2**31:
        raise CellError(f"samples with a sampling_rate of {rate!r}; expected a number of Hz")
    samples = _array(value)
    if samples.dtype.kind != "f" and samples.dtype != np.int16:
        raise CellError(
            f"samples of type {samples.dtype}; expected floating-point numbers, or int16: convert the "
            "column, or write sound files as bytes"
        )
    with np.errstate(over="ignore"):  # what is not finite in float32 is refused by the reader
        scaled = samples.astype(np.float32) / (2**15 if samples.dtype == np.int16 else 1)
    file = io.BytesIO()
    soundfile.write(file, scaled, round(rate), format="WAV", subtype="FLOAT")
    file.seek(0)
    return file


def _array(value: Any) -> np.ndarray:
    """Samples of a list, or of a list of lists, as [samples, channels].

    Lists of lists are channels of samples, unless there are more of them than recordings have channels
    (MOST_CHANNELS), and each is as short as that: then they are samples of channels.
    """
    import pyarrow.compute  # its package is there where a table was read

    inner = value.values
    lengths = []
    if is_list(value.type.value_type):
        lengths = sorted(set(pyarrow.compute.list_value_length(inner).to_pylist()), key=str)
        if len(lengths) > 1:
            raise CellError(
                f"lists of {lengths[0]} and of {lengths[1]} samples; expected as many in each channel"
            )
    flat = inner.flatten() if lengths else inner
    if is_list(flat.type):
        raise CellError(f"samples of type {value.type}; expected {EXPECTED_SHAPE}")
    if not len(flat):
        raise CellError(f"it holds no samples; expected {EXPECTED_SHAPE}")
    array = flat.to_numpy(zero_copy_only=False).reshape(len(inner), -1)
    if not lengths or (len(array) > MOST_CHANNELS and array.shape[1] <= MOST_CHANNELS):
        return array
    if len(array) > MOST_CHANNELS:
        raise CellError(f"samples of shape {list(array.shape)}; expected {EXPECTED_SHAPE}: transpose them")
    return array.T


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow's is that of lists."""
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def is_struct(kind: Any) -> bool:
    """Whether a type of pyarrow's is that of structs."""
    return str(kind).startswith("struct<")
