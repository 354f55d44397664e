"""What GPT-OSS's family reads, writes and refuses. What it computes is compared in test_families.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxthd.config import Config, LLMConfig, ModelConfig, RopeConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.hf.gpt_oss import FAMILY, GPT_OSS
from jaxthd.hf.mxfp4 import decoded
from jaxthd.hf.registry import export_families
from jaxthd.planning.parameters import parameter_groups
from tests.hf.published import load_reference, shapes_of

READ, WRITE = GPT_OSS.read, GPT_OSS.write
CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_config_has_the_sizes_and_the_parameters_of_the_published_model():
    """By hand; the model card says 20.9B, of which a token uses 3.6B."""
    config = load_config(CONFIGS / "gpt_oss.py")
    llm = config.model.llm
    assert READ(PUBLISHED, llm) == llm
    matrix = 201088 * 2880
    attention = 2880 * 64 * (64 + 8 + 8 + 64) + 64 * (64 + 8 + 8) + 2880 + 64
    expert = 3 * 2880 * 2880 + 2 * 2880 + 2880
    layer = attention + 32 * expert + 33 * 2880 - 2880 + 32 + 2 * 2880
    plain = replace(config, adapt=replace(config.adapt, lora_rank=0, lora_targets=()))
    groups = [group for group in parameter_groups(plain) if group.part == "LLM"]
    total = sum(group.parameters for group in groups)
    assert total == 2 * matrix + 24 * layer + 2880
    assert round(total / 1e9, 1) == 20.9
    active = sum(group.active for group in groups)
    assert round(active / 1e9, 1) == 3.6


def test_settings_are_read_and_written_back():
    llm = READ(PUBLISHED, LLMConfig())
    assert llm.letters == "WE*E" * 12
    assert llm.rope == RopeConfig(
        theta=150000.0, scaling="yarn", factor=32.0, original_positions=4096, truncate=False
    )
    assert READ(WRITE(llm), LLMConfig()) == llm
    # The library's defaults.
    absent = ("layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias")
    assert READ({k: x for k, x in PUBLISHED.items() if k not in absent}, LLMConfig()) == llm
    assert READ({k: x for k, x in PUBLISHED.items() if k != "rope_theta"}, LLMConfig()) == llm
    other = READ(PUBLISHED | {"layer_types": ["full_attention"] * 24, "swiglu_limit": 5.0}, LLMConfig())
    assert (other.letters, other.swiglu_limit) == ("*E" * 24, 5.0)
    assert export_families(ModelConfig(encoder=None, llm=llm)) == {"": FAMILY}
    marked = replace(llm, pattern="WE*E|" + "WE*E" * 11)
    assert READ(PUBLISHED, marked).pattern == marked.pattern


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer_types": ["chunked_attention"] * 24}, "24 layer_types: chunked_attention"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers 24, and 1 layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"sliding_window": None}, "no 'sliding_window'"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        READ(PUBLISHED | changed, LLMConfig())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": "WE*-"}, r"with \*-; expected WE, \*E"),
        ({"attention_sinks": False}, "attention_sinks: False"),
        ({"ffn_form": "swiglu"}, "ffn_form: 'swiglu'"),
        ({"rope": RopeConfig()}, "theta 0.0"),
        ({"rope": RopeConfig(theta=15e4, fraction=0.5)}, "fraction 0.5"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        WRITE(replace(READ(PUBLISHED, LLMConfig()), **changed))


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
    config = Config(model=ModelConfig(encoder=None, llm=READ(fields, LLMConfig())))
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
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == meant.keys()
    assert all(np.array_equal(found[name], meant[name]) for name in meant)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_blocks_without_scales_are_refused(tmp_path: Path):
    in_mxfp4(tmp_path / "published")
    file = tmp_path / "published" / "model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if name.endswith("_scales"))
    save_file({name: x for name, x in tensors.items() if name != first}, file)
    with pytest.raises(UserError, match="_scales missing"):
        open_checkpoint(tmp_path / "published")
