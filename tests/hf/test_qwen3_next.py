"""What Qwen3-Next's family reads, writes and refuses. What it computes is compared in test_families.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DeltaConfig, LLMConfig, ModelConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.qwen3_next import QWEN3_NEXT
from jaxthd.hf.registry import export_families
from jaxthd.planning.parameters import parameter_groups

READ, WRITE = QWEN3_NEXT.read, QWEN3_NEXT.write
CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.25,
    "vocab_size": 151936,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "mlp_only_layers": [5],
    "tie_word_embeddings": False,
}


def test_the_config_has_the_parameters_of_the_published_model():
    """By hand; the model card says 80B, of them 79B without the embeddings and 3B active."""
    dim, embeddings = 2048, 2 * 151936 * 2048
    delta = dim * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 2 * 32 + 128 + 4096 * dim
    attention = dim * 256 * (2 * 16 + 2 * 2) + 2 * 256 + 16 * 256 * dim
    expert = 3 * dim * 512
    around = 48 * (dim * 512 + expert + dim + 2 * dim) + dim + 36 * delta + 12 * attention
    groups = [g for g in parameter_groups(load_config(CONFIGS / "qwen3_next.py")) if g.part == "LLM"]
    assert sum(g.parameters for g in groups) == embeddings + around + 48 * 512 * expert
    active = sum(g.active for g in groups if g.name not in ("embedding", "head"))
    assert active == around + 48 * 10 * expert
    assert round((around + 48 * 512 * expert) / 1e9) == 79
    assert round(active / 1e9) == 3


def test_settings_are_read_and_written_back():
    llm = READ(PUBLISHED, LLMConfig())
    assert llm.letters == "DEDEDE*EDED-DE*E"
    assert llm.rope == RopeConfig(theta=1e7, fraction=0.25)
    assert llm.delta == DeltaConfig(16, 32, 128, 128, 4)
    assert (llm.experts, llm.experts_per_token, llm.expert_dim, llm.shared_expert_dim) == (512, 10, 512, 512)
    assert (llm.norm_zero_centred, llm.attention_gate, llm.shared_expert_gate, llm.qk_norm) == (True,) * 4
    again = WRITE(llm)
    assert READ(again, LLMConfig()) == llm
    assert (again["mlp_only_layers"], again["partial_rotary_factor"]) == ([5], 0.25)
    dense = READ(PUBLISHED | {"num_experts": 0}, LLMConfig())
    assert dense.letters == "D-D-D-*-" * 2
    assert READ(WRITE(dense), LLMConfig()) == dense
    assert [f.title for f in export_families(ModelConfig(None, llm)).values()] == ["Qwen3NextForCausalLM"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types: sliding_attention"),
        ({"layer_types": ["full_attention"] * 7}, "num_hidden_layers 8, and 7 layer_types"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        READ(PUBLISHED | changed, LLMConfig())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": "DEM-"}, "pattern is 'DEM-'"),
        ({"rope": RopeConfig()}, "theta 0.0"),
        ({"norm_zero_centred": False}, "norm_zero_centred: False"),
        ({"shared_expert_gate": False}, "shared_expert_gate: False"),
        ({"shared_expert_dim": 0}, "shared_expert_dim is 0"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        WRITE(replace(READ(PUBLISHED, LLMConfig()), **changed))
