"""Tensors of every dtype pass through files unchanged; what cannot is said."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxthd.errors import UserError
from jaxthd.hf.safetensors_files import DTYPES, SafetensorsFolder, SafetensorsWriter


@pytest.mark.parametrize("limit", [1, 10**6])
def test_every_dtype_is_written_and_read_back(limit: int, tmp_path: Path):
    """By one file, and by one a tensor; the safetensors library reads the same."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 2, size=(3, 5)).astype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
        for name in DTYPES
    }
    kinds = {name: (x.shape, name) for name, x in tensors.items()}
    with SafetensorsWriter(tmp_path, kinds, limit) as writer:
        for name, x in tensors.items():
            writer.write(name, x)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == (len(DTYPES) if limit == 1 else 1)
    theirs = {name: x for file in files for name, x in load_file(file).items()}
    folder = SafetensorsFolder(tmp_path)
    for name, x in tensors.items():
        assert folder.dtype(name) == name
        assert folder.read(name).dtype == theirs[name].dtype == x.dtype
        np.testing.assert_array_equal(folder.read(name), x)
        np.testing.assert_array_equal(theirs[name], x)


def test_a_dtype_that_cannot_be_held_is_an_error_that_names_it(tmp_path: Path):
    header = json.dumps({"tower.w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"tower.w in .* is stored as F8_E4M3; expected one of F64, .*BOOL"):
        SafetensorsFolder(tmp_path).dtype("tower.w")
