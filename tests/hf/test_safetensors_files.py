"""Tensors of every dtype pass through files unchanged; what cannot is said."""

import json
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxthd.errors import UserError
from jaxthd.hf.safetensors_files import DTYPES, SafetensorsFolder, write_safetensors


def opened(files: list[Path]) -> list[Any]:
    return [safe_open(str(file), framework="np") for file in files]


@pytest.mark.parametrize("limit", [1, 10**6])
def test_every_dtype_is_written_and_read_back(limit: int, tmp_path: Path):
    """By one file, and by one a tensor; the safetensors library reads the same."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 2, size=(3, 5)).astype(getattr(ml_dtypes, name, name)) for name in DTYPES
    }
    kinds = {name: (x.shape, name) for name, x in tensors.items()}
    write_safetensors(tmp_path, kinds, tensors.values(), limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == (len(DTYPES) if limit == 1 else 1)
    folder = SafetensorsFolder(tmp_path)
    for name, x in tensors.items():
        assert folder.dtype(name) == name
        assert folder.read(name).dtype == x.dtype
        np.testing.assert_array_equal(folder.read(name), x)
    for name in (
        name for name in DTYPES if name != "float8_e4m3fn"
    ):  # which the library reads for torch alone
        (theirs,) = (file.get_tensor(name) for file in opened(files) if name in file.keys())  # noqa: SIM118
        assert theirs.dtype == tensors[name].dtype
        np.testing.assert_array_equal(theirs, tensors[name])


def test_a_write_that_fails_leaves_no_file(tmp_path: Path):
    def arrays() -> Iterator[np.ndarray]:
        yield np.zeros(4, np.float32)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_safetensors(tmp_path, {"a": ((4,), "float32"), "b": ((4,), "float32")}, arrays(), 1)
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_cannot_be_held_is_an_error_that_names_it(tmp_path: Path):
    header = json.dumps({"tower.w": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"tower.w in .* is stored as F8_E5M2; expected one of F64, .*BOOL"):
        SafetensorsFolder(tmp_path).dtype("tower.w")


def test_pickled_weights_are_refused_and_not_unpickled(tmp_path: Path):
    executed = tmp_path / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return executed.touch, ()

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"no \*\.safetensors in .*convert the weights to safetensors"):
        SafetensorsFolder(tmp_path)
    assert not executed.exists()


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_an_index_that_leaves_the_folder_is_refused(name: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="expected files in its own folder"):
        SafetensorsFolder(tmp_path)
