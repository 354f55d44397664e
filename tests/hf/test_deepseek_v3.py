"""What DeepSeek-V3's family reads, writes and refuses. What it computes is compared in test_families.py."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.hf.deepseek_v3 import DEEPSEEK_V3
from jaxthd.hf.registry import export_families
from jaxthd.hf.safetensors_files import SafetensorsFolder, SafetensorsWriter
from jaxthd.planning.parameters import parameter_groups
from tests.hf.published import write_published

READ, WRITE = DEEPSEEK_V3.read, DEEPSEEK_V3.write
CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""DeepSeek-V3's, without what says nothing of the model."""
MOONLIGHT = PUBLISHED | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}


def parameters_by_hand(fields: dict[str, Any]) -> tuple[int, int]:
    """(all, those used for one token; one row of the embedding)."""
    f, dim = fields, fields["hidden_size"]
    heads, rope = f["num_attention_heads"], f["qk_rope_head_dim"]
    q_head = f["qk_nope_head_dim"] + rope
    q, kv = f["q_lora_rank"], f["kv_lora_rank"]
    queries = dim * q + q + q * heads * q_head if q else dim * heads * q_head
    expanded = kv * heads * (f["qk_nope_head_dim"] + f["v_head_dim"])
    attention = queries + dim * (kv + rope) + kv + expanded + heads * f["v_head_dim"] * dim
    layers, dense = f["num_hidden_layers"], f["first_k_dense_replace"]
    expert = 3 * dim * f["moe_intermediate_size"]
    others = layers * (attention + 2 * dim) + dim + dense * 3 * dim * f["intermediate_size"]
    others += (layers - dense) * (f["n_routed_experts"] * dim + f["n_shared_experts"] * expert)
    vocabulary = f["vocab_size"] * dim
    chosen, held = f["num_experts_per_tok"], f["n_routed_experts"]
    return (
        2 * vocabulary + others + (layers - dense) * held * expert,
        vocabulary + dim + others + (layers - dense) * chosen * expert,
    )


@pytest.mark.parametrize(
    ("name", "fields", "published"),
    [("deepseek_v3", PUBLISHED, 671_026_419_200), ("moonlight", MOONLIGHT, 15_960_110_208)],
)
def test_the_configs_have_the_parameters_of_the_published_models(
    name: str, fields: dict[str, Any], published: int
) -> None:
    """published: with the routers' correction biases, which are buffers here. Those used for a token are
    compared with a count by hand."""
    config = load_config(CONFIGS / f"{name}.py")
    read = READ(fields, replace(config.model.llm, pattern=""))
    assert read.mtp_pattern == "LE" * fields["num_nextn_predict_layers"]
    assert config.model.llm == replace(read, mtp_pattern="")
    counted = [
        group
        for group in parameter_groups(
            replace(config, adapt=replace(config.adapt, lora_rank=0, lora_targets=()))
        )
        if group.part == "LLM"
    ]
    every, used = (sum(getattr(group, what) for group in counted) for what in ("parameters", "active"))
    assert (every, used) == parameters_by_hand(fields)
    biases = config.model.llm.letters.count("E") * config.model.llm.experts
    assert every + biases == published


@pytest.mark.parametrize("fields", [PUBLISHED, MOONLIGHT], ids=["DeepSeek-V3", "Moonlight"])
def test_settings_are_read_and_written_back(fields: dict[str, Any]) -> None:
    llm = READ(fields, LLMConfig())
    layers, dense = fields["num_hidden_layers"], fields["first_k_dense_replace"]
    assert llm.letters == "L-" * dense + "LE" * (layers - dense)
    assert llm.shared_expert_dim == {61: 2048, 27: 2816}[layers]
    again = WRITE(llm)
    assert READ(again, LLMConfig()) == llm
    assert again["n_shared_experts"] == fields["n_shared_experts"]
    marked = replace(llm, pattern=f"{llm.pattern[:4]}|{llm.pattern[4:]}")
    assert READ(fields, marked).pattern == marked.pattern
    assert export_families(ModelConfig(encoder=None, llm=llm))[""].title == "DeepseekV3ForCausalLM"
    ungrouped = WRITE(replace(llm, router_groups=1, router_groups_per_token=4))
    assert (ungrouped["n_group"], ungrouped["topk_group"]) == (1, 1)


def test_what_is_absent_has_the_librarys_default_and_null_is_none() -> None:
    """DeepSeek-V3's own settings are the defaults."""
    names = ("first_k_dense_replace", "n_group", "n_shared_experts", "q_lora_rank", "topk_group")
    absent = {name: x for name, x in PUBLISHED.items() if name not in names}
    assert READ(absent, LLMConfig()) == READ(PUBLISHED, LLMConfig())
    none = READ(PUBLISHED | dict.fromkeys(names), LLMConfig())
    assert none.letters == "LE" * 61
    assert (none.router_groups, none.router_groups_per_token) == (1, 1)
    assert (none.shared_expert_dim, none.latent_attention.q_lora_rank) == (0, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_bias": True}, "attention_bias: True"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        ({"kv_lora_rank": None}, "no 'kv_lora_rank'"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        READ(PUBLISHED | changed, LLMConfig())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": "LEL-"}, "pattern is 'LEL-'"),
        ({"pattern": "*-*E"}, "pattern is"),
        ({"router": "softmax"}, "router: 'softmax'"),
        ({"shared_expert_dim": 100}, "shared_expert_dim is 100"),
        ({"ffn_form": "relu2"}, "ffn_form: 'relu2'"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(changed: dict[str, Any], said: str) -> None:
    llm = READ(PUBLISHED, LLMConfig())
    with pytest.raises(UserError, match=said):
        WRITE(replace(llm, **changed))
    with pytest.raises(UserError, match=r"norm_eps is 1e-05"):
        WRITE(replace(llm, latent_attention=replace(llm.latent_attention, norm_eps=1e-5)))
    for settings, what in (({"theta": 0.0}, r"theta 0\.0"), ({"fraction": 0.5}, r"fraction 0\.5")):
        with pytest.raises(UserError, match=what):
            WRITE(replace(llm, rope=replace(llm.rope, **settings)))


BLOCK = (8, 5)


def in_float8(folder: Path) -> dict[str, np.ndarray]:
    """Rewrites the folder's matrices of the layers in block-scaled FP8; returns what they then stand for."""
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, np.ndarray] = {}
    for name, x in tensors.items():
        stored[name] = x
        if x.ndim != 2 or ".layers." not in name or name.endswith("mlp.gate.weight"):
            continue
        edges = [np.arange(0, n, b) for n, b in zip(x.shape, BLOCK, strict=True)]
        largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), edges[0], 0), edges[1], 1)
        scale = (largest / 448).astype(np.float32)
        spread = scale[np.ix_(np.arange(x.shape[0]) // BLOCK[0], np.arange(x.shape[1]) // BLOCK[1])]
        stored[name] = (x / spread).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        tensors[name] = stored[name].astype(np.float32) * spread
    (folder / "model.safetensors").unlink()
    kinds = {name: (x.shape, str(x.dtype)) for name, x in stored.items()}
    with SafetensorsWriter(folder, kinds, 10**9) as writer:
        for name, x in stored.items():
            writer.write(name, x)
    fields = json.loads((folder / "config.json").read_text())
    about = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": about}))
    return tensors


def test_block_scaled_float8_is_decoded_as_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that divide no dim evenly."""
    folder = write_published("moonlight", tmp_path / "published")
    tensors = load_file(folder / "model.safetensors")
    want = in_float8(folder)
    import_weights([str(folder)], tmp_path / "imported")
    assert "matrices of block-scaled FP8" in capsys.readouterr().out
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == want.keys()
    assert all(np.array_equal(found[name], want[name]) for name in want)
    assert any(np.any(want[name] != tensors[name]) for name in tensors)
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
        with SafetensorsWriter(folder, kinds, 10**9) as writer:
            for name in kinds:
                writer.write(name, stored[name])
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
