"""What Qwen3's family reads, writes and refuses. What it computes is compared in test_families.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxthd.config import LLMConfig, ModelConfig, RopeConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.qwen3 import FAMILIES, QWEN3, QWEN3_MOE
from jaxthd.hf.registry import export_families
from jaxthd.planning.parameters import parameter_groups
from tests.hf.published import write_published

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "tie_word_embeddings": False,
}


def test_the_config_has_the_parameters_of_the_published_model():
    """By hand, without LoRA's; the model card says 1.7B, of them 1.4B without the embedding."""
    embedding, attention = 151936 * 2048, 2048 * 128 * (16 + 8 + 8 + 16) + 2 * 128
    others = 28 * (attention + 3 * 2048 * 6144 + 2 * 2048) + 2048
    assert round(others / 1e9, 1) == 1.4
    config = load_config(CONFIGS / "qwen3.py")
    groups = parameter_groups(replace(config, adapt=replace(config.adapt, lora_rank=0, lora_targets=())))
    assert sum(group.parameters for group in groups if group.part == "LLM") == embedding + others


def test_settings_are_read_and_written_back():
    llm = QWEN3.read(PUBLISHED, LLMConfig())
    assert (llm.letters, llm.rope.theta, llm.router, llm.shared_expert_dim) == (
        "*-*E*-*-*-*E",
        1e6,
        "softmax",
        0,
    )
    assert not llm.tied_embedding
    again = QWEN3_MOE.write(llm)
    assert QWEN3.read(again, LLMConfig()) == llm
    assert again["mlp_only_layers"] == [0, 2, 3, 4]
    newer = {
        name: x for name, x in PUBLISHED.items() if name not in ("rope_theta", "rope_scaling", "num_experts")
    }
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 128}
    assert QWEN3.read(newer, LLMConfig()) == llm
    marked = replace(llm, pattern="*-*E*-|*-*-*E")
    assert QWEN3.read(PUBLISHED, marked).pattern == marked.pattern


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "without factor"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types: sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window: True"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        QWEN3.read(PUBLISHED | changed, LLMConfig())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pattern": "M*-"}, "pattern is 'M"),
        ({"pattern": "*-M-"}, "pattern is"),
        ({"qk_norm": False}, "qk_norm: False"),
        ({"rope": RopeConfig()}, "theta 0.0"),
        ({"rope": RopeConfig(theta=1e6, fraction=0.5)}, "fraction 0.5"),
        ({"rope": RopeConfig(theta=1e6, fraction=0.5), "pattern": "*-*E"}, "fraction 0.5"),
        ({"pattern": "*-*E", "router": "sigmoid"}, "router: 'sigmoid'"),
        ({"pattern": "*-*E", "shared_expert_dim": 8}, "shared_expert_dim: 8"),
    ],
)
def test_a_model_that_a_format_cannot_hold_is_refused(changed: dict[str, Any], said: str):
    llm = replace(
        QWEN3.read(PUBLISHED | {"num_experts": 0}, LLMConfig()), router="softmax", shared_expert_dim=0
    )
    with pytest.raises(UserError, match=said):
        (QWEN3_MOE if "E" in changed.get("pattern", "") else QWEN3).write(replace(llm, **changed))


def test_the_format_follows_from_the_blocks():
    """A Nemotron-H folder would be read as a model without positions and gates."""
    titles = {family.title: family for family in FAMILIES}
    for experts, title in ((0, "Qwen3ForCausalLM"), (128, "Qwen3MoeForCausalLM")):
        llm = QWEN3.read(PUBLISHED | {"num_experts": experts}, LLMConfig())
        found = export_families(ModelConfig(encoder=None, llm=llm))
        assert found == {"": titles[title]}
    assert export_families(ModelConfig(encoder=None))[""].title == "NemotronHForCausalLM"


def test_a_copy_of_a_tied_embedding_is_not_read(tmp_path: Path):
    """Published folders of the small models have one."""
    folder = write_published("qwen3", tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors"
    )
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    untied = write_published("qwen3_moe", tmp_path / "untied")
    tensors = load_file(untied / "model.safetensors")
    save_file({k: x for k, x in tensors.items() if k != "lm_head.weight"}, untied / "model.safetensors")
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        import_weights([str(untied)], tmp_path / "not")
