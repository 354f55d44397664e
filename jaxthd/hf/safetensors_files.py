"""Folders of safetensors files, read and written one tensor at a time.

A checkpoint is model.safetensors, or several files with an index, model.safetensors.index.json.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open

from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
}
"""NumPy's name of a dtype -> the format's, for all that is read and written."""


class SafetensorsFolder:
    """The tensors in the folder `path`, by name. beside: a file that is read too, if it is there.

    Raises UserError for files that are missing or damaged.
    """

    def __init__(self, path: Path, beside: str = "") -> None:
        self.path = path
        self._open: tuple[Path, Any] | None = None
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        more = [path / beside] if beside and (path / beside).is_file() else []
        for file in dict.fromkeys((*self._listed(), *more)):
            reader = self._reader(file)
            for name in reader.keys():  # noqa: SIM118 (it is no dict)
                if name in self._files:
                    raise UserError(
                        f"{name} is in {self._files[name].name} and in {file.name} of {path}; expected it "
                        "once: remove the files of the other checkpoint"
                    )
                self._files[name], self.shapes[name] = file, tuple(reader.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's dtype, one of DTYPES. Reads the header only. Raises UserError for another dtype."""
        found = self._reader(self._files[name]).get_slice(name).get_dtype()
        names = {theirs: numpys for numpys, theirs in DTYPES.items()}
        if found not in names:
            raise UserError(
                f"{name} in {self._files[name]} is stored as {found}; expected one of {', '.join(names)}: "
                "convert it to bfloat16"
            )
        return names[found]

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One tensor, from the disk."""
        try:
            if self.dtype(name) == "float8_e4m3fn":
                return self._read_float8(name)
            return self._reader(self._files[name]).get_tensor(name)
        except (SafetensorError, OSError, TypeError, AttributeError) as error:
            raise UserError(
                f"{name} in {self._files[name]} cannot be read ({error}): copy the file anew"
            ) from error

    def _read_float8(self, name: str) -> Shaped[np.ndarray, "..."]:
        """A tensor of float8, which the library reads for torch alone."""
        file = self._files[name]
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            start, end = json.loads(stream.read(size))[name]["data_offsets"]
            stream.seek(8 + size + start)
            elements = np.frombuffer(stream.read(end - start), _numpy("float8_e4m3fn"))
        return elements.reshape(self.shapes[name])

    def _listed(self) -> list[Path]:
        """The files that the index names; without an index, every safetensors file."""
        index = self.path / INDEX
        if not index.is_file():
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise UserError(
                    f"no *.safetensors in {self.path}; expected {SINGLE}, or several files and {INDEX}: "
                    "correct the path, or convert the weights to safetensors"
                )
            return files
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index} cannot be read as an index of safetensors files ({error!r}): copy it anew"
            ) from error
        outside = [str(name) for name in names if Path(str(name)).name != name]
        if outside:
            raise UserError(f"{index} names {outside[0]!r}; expected files in its own folder: copy it anew")
        missing = sorted(name for name in names if not (self.path / name).is_file())
        if missing:
            raise UserError(
                f"{self.path} lacks {', '.join(missing)}, which {INDEX} names: copy what is missing"
            )
        return [self.path / name for name in sorted(names)]

    def _reader(self, file: Path) -> Any:
        """Keeps one file open: tensors are asked for file by file."""
        if self._open is None or self._open[0] != file:
            try:
                self._open = file, safe_open(str(file), framework="np")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file} is no whole safetensors file ({error}); it may be cut short: copy it anew"
                ) from error
        return self._open[1]

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names in the order in which their tensors are best read."""
        return sorted(names, key=lambda name: (str(self._files[name]), name))


def write_safetensors(
    folder: Path,
    kinds: Mapping[str, tuple[Shape, str]],
    arrays: Iterable[Shaped[np.ndarray, "..."]],
    limit: int,
    single: str = SINGLE,
) -> None:
    """Writes tensors into files of at most `limit` bytes, and their index where there are several; one alone
    has the name `single`.

    kinds: each tensor's (shape, dtype of DTYPES) by name. arrays: the tensors in that order; one is held at a
    time, where safetensors.save_file would need all of a file. The files get their names when all are
    written; where something fails, none is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Path, list[str]] = {}
    remaining = iter(arrays)
    try:
        for number, group in enumerate(_groups(kinds, limit), 1):
            path = folder / f".model-{number:05}.tmp"
            files[path] = group
            with path.open("wb") as file:
                file.write(_header({name: kinds[name] for name in group}))
                for name in group:
                    array, (shape, dtype) = next(remaining), kinds[name]
                    assert array.shape == shape, name
                    np.ascontiguousarray(array, _numpy(dtype)).reshape(-1).view(np.uint8).tofile(file)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        raise
    weight_map: dict[str, str] = {}
    for number, (path, group) in enumerate(files.items(), 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else single
        path.rename(folder / name)
        weight_map |= dict.fromkeys(group, name)
    if len(files) > 1:
        total = sum(_size(*kind) for kind in kinds.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header(kinds: Mapping[str, tuple[Shape, str]]) -> bytes:
    """The beginning of a file of these tensors: the length of the JSON that describes them, and that."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in kinds.items():
        start, end = end, end + _size(shape, dtype)
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _numpy(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def _size(shape: Shape, dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * _numpy(dtype).itemsize


def _groups(kinds: Mapping[str, tuple[Shape, str]], limit: int) -> Iterator[list[str]]:
    """The names of the tensors in each file."""
    group: list[str] = []
    size = 0
    for name, kind in kinds.items():
        if group and size + _size(*kind) > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += _size(*kind)
    yield group
