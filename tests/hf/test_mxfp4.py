"""MXFP4 is decoded as it is read."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxthd.config import Config, LLMConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.hf.gpt_oss import FAMILY, GPT_OSS
from jaxthd.hf.mxfp4 import decoded
from tests.hf.published import assert_identical, load_reference, shapes_of, tensors


def test_mxfp4_is_what_the_library_makes_of_it():
    reference = load_reference("gpt_oss")
    found = decoded(reference["fp4.blocks"], reference["fp4.scales"])
    np.testing.assert_array_equal(found, reference["fp4.values"])


def in_mxfp4(folder: Path) -> dict[str, np.ndarray]:
    """Writes a random checkpoint whose experts are MXFP4; returns the tensors that it stands for. Numbers are
    decoded here one by one."""
    rng = np.random.default_rng(0)
    fields = json.loads(str(load_reference("gpt_oss")["config"]))
    fields |= {"hidden_size": 32, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    config = Config(model=ModelConfig(encoder=None, llm=GPT_OSS.read(fields, LLMConfig())))
    stored, meant = {}, {}
    for tensor in FAMILY.tensors(config.model, fields, shapes_of(config)):
        meant[tensor.name] = stored[tensor.name] = rng.normal(size=tensor.shape).astype(np.float32)
        if tensor.name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[tensor.name]
            experts, width, out = tensor.shape
            blocks = rng.integers(0, 256, (experts, out, width // 32, 16), dtype=np.uint8)
            scales = rng.integers(118, 126, blocks.shape[:3], dtype=np.uint8)
            stored |= {f"{tensor.name}_blocks": blocks, f"{tensor.name}_scales": scales}
            for at in np.ndindex(*tensor.shape):
                e, i, o = at
                byte = int(blocks[e, o, i // 32, i % 32 // 2])
                bits = byte >> 4 if i % 2 else byte & 15
                exponent, mantissa = bits >> 1 & 3, bits & 1
                number = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
                sign = -1.0 if bits & 8 else 1.0
                meant[tensor.name][at] = sign * number * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return meant


def test_mxfp4_is_decoded_as_it_is_read_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    meant = in_mxfp4(tmp_path / "published")
    import_weights([str(tmp_path / "published")], tmp_path / "imported")
    assert "decoded as they were read: 6 stacks of matrices of MXFP4" in capsys.readouterr().out
    export_weights(tmp_path / "imported", tmp_path / "out", like=tmp_path / "published")
    assert_identical(tensors(tmp_path / "out"), meant)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_blocks_without_scales_are_refused(tmp_path: Path):
    in_mxfp4(tmp_path / "published")
    file = tmp_path / "published" / "model.safetensors"
    stored = tensors(file.parent)
    del stored[next(name for name in stored if name.endswith("_scales"))]
    save_file(stored, file)
    with pytest.raises(UserError, match="_scales missing"):
        open_checkpoint(tmp_path / "published")
