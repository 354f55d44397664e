"""Block-scaled FP8 is decoded as it is read, and other quantized weights are refused."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.hf.safetensors_files import SafetensorsFolder, write_safetensors
from tests.hf.published import assert_identical, tensors, write_published

BLOCK = (8, 5)


def in_float8(folder: Path) -> dict[str, np.ndarray]:
    """Rewrites the folder's matrices of the layers in block-scaled FP8; returns what they then stand for."""
    meant, stored = tensors(folder), dict[str, np.ndarray]()
    for name, x in list(meant.items()):
        stored[name] = x
        if x.ndim != 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
            continue
        edges = [np.arange(0, n, b) for n, b in zip(x.shape, BLOCK, strict=True)]
        largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), edges[0], 0), edges[1], 1)
        scale = (largest / 448).astype(np.float32)
        spread = scale[np.ix_(np.arange(x.shape[0]) // BLOCK[0], np.arange(x.shape[1]) // BLOCK[1])]
        stored[name] = (x / spread).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        meant[name] = stored[name].astype(np.float32) * spread
    (folder / "model.safetensors").unlink()
    kinds = {name: (x.shape, str(x.dtype)) for name, x in stored.items()}
    write_safetensors(folder, kinds, stored.values(), 10**9)
    fields = json.loads((folder / "config.json").read_text())
    about = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": about}))
    return meant


def test_block_scaled_float8_is_decoded_as_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that divide no dim evenly."""
    folder = write_published("moonlight", tmp_path / "published")
    plain = tensors(folder)
    want = in_float8(folder)
    import_weights([str(folder)], tmp_path / "imported")
    assert "matrices of block-scaled FP8" in capsys.readouterr().out
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    assert_identical(tensors(tmp_path / "out"), want)
    assert any(np.any(want[name] != plain[name]) for name in plain)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written
    export_weights(tmp_path / "imported", tmp_path / "halved", like=folder, dtype="bfloat16")
    halved = SafetensorsFolder(tmp_path / "halved")
    for name in want:
        if want[name].ndim == 2:
            assert halved.dtype(name) == "bfloat16", name
            assert np.array_equal(halved.read(name), want[name].astype(ml_dtypes.bfloat16))


def test_float8_and_scales_without_each_other_are_refused(tmp_path: Path) -> None:
    folder = write_published("moonlight", tmp_path / "published")
    in_float8(folder)
    whole = SafetensorsFolder(folder)
    stored = {name: whole.read(name) for name in whole.shapes}
    matrix = next(name for name in stored if f"{name}_scale_inv" in stored)
    for lacking, said in (
        (f"{matrix}_scale_inv", f"{matrix} in float8_e4m3fn without {matrix}_scale_inv"),
        (matrix, f"{matrix}_scale_inv without {matrix};"),
    ):
        kinds = {name: (x.shape, str(x.dtype)) for name, x in stored.items() if name != lacking}
        write_safetensors(folder, kinds, (stored[name] for name in kinds), 10**9)
        with pytest.raises(UserError, match=re.escape(said)):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [8, 5]}, "fmt 'e4m3'"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [5, 8]}, r"scale_inv in .* is \["),
    ],
)
def test_other_quantized_weights_are_refused(tmp_path: Path, about: dict[str, Any], said: str) -> None:
    folder = write_published("moonlight", tmp_path / "published")
    in_float8(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": about}))
    with pytest.raises(UserError, match=said):
        open_checkpoint(folder)
