"""What families of decoders read, write and refuse. What they compute is compared in test_families.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DeltaConfig, LLMConfig, ModelConfig, RopeConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.decoder import Decoder
from jaxthd.hf.deepseek_v3 import DEEPSEEK_V3
from jaxthd.hf.gpt_oss import GPT_OSS
from jaxthd.hf.qwen3 import QWEN3, QWEN3_MOE
from jaxthd.hf.qwen3_next import QWEN3_NEXT
from jaxthd.hf.registry import export_families
from tests.hf.published import REFERENCES, change_published, tensors, write_published

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED: dict[str, dict[str, Any]] = json.loads((REFERENCES / "published_configs.json").read_text())
"""Settings of published models, or like theirs, without what says nothing of the model."""
DECODERS: dict[str, Decoder] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "moonlight": DEEPSEEK_V3,
}


def read(name: str, **changed: Any) -> LLMConfig:
    return DECODERS[name].read(PUBLISHED[name] | changed, LLMConfig())


@pytest.mark.parametrize("name", DECODERS)
def test_settings_are_read_and_written_back(name: str):
    """The stage marks of a pattern stay."""
    llm = read(name)
    assert DECODERS[name].read(DECODERS[name].write(llm), LLMConfig()) == llm
    marked = replace(llm, pattern=f"{llm.pattern[:4]}|{llm.pattern[4:]}")
    assert DECODERS[name].read(PUBLISHED[name], marked).pattern == marked.pattern
    assert [x.title for x in export_families(ModelConfig(None, llm)).values()] == [DECODERS[name].title]


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "moonlight"])
def test_the_configs_are_those_of_the_published_models(name: str):
    llm = load_config(CONFIGS / f"{name}.py").model.llm
    assert replace(DECODERS[name].read(PUBLISHED[name], llm), mtp_pattern="") == llm


def test_what_qwen3s_settings_mean():
    llm = read("qwen3_moe")
    assert (llm.letters, llm.rope.theta, llm.router) == ("*-*E*-*-*-*E", 1e6, "softmax")
    assert (llm.shared_expert_dim, llm.tied_embedding) == (0, False)
    assert QWEN3_MOE.write(llm)["mlp_only_layers"] == [0, 2, 3, 4]
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 128}
    assert read("qwen3_moe", rope_theta=None, num_experts=None, **newer) == llm


def test_what_qwen3_nexts_settings_mean():
    llm = read("qwen3_next")
    assert (llm.letters, llm.rope) == ("DEDEDE*EDED-DE*E", RopeConfig(theta=1e7, fraction=0.25))
    assert llm.delta == DeltaConfig(16, 32, 128, 128, 4)
    assert (llm.experts, llm.experts_per_token, llm.expert_dim, llm.shared_expert_dim) == (512, 10, 512, 512)
    assert (llm.norm_zero_centred, llm.attention_gate, llm.shared_expert_gate, llm.qk_norm) == (True,) * 4
    again = QWEN3_NEXT.write(llm)
    assert (again["mlp_only_layers"], again["partial_rotary_factor"]) == ([5], 0.25)
    dense = read("qwen3_next", num_experts=0)
    assert dense.letters == "D-D-D-*-" * 2
    assert QWEN3_NEXT.read(QWEN3_NEXT.write(dense), LLMConfig()) == dense


def test_what_gpt_oss_settings_mean():
    llm = read("gpt_oss")
    rope = {"theta": 150000.0, "scaling": "yarn", "factor": 32.0, "original_positions": 4096}
    assert (llm.letters, llm.rope) == ("WE*E" * 12, RopeConfig(**rope, truncate=False))
    # The library's defaults.
    absent = ("layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias")
    assert read("gpt_oss", **dict.fromkeys(absent)) == read("gpt_oss", rope_theta=None) == llm
    other = read("gpt_oss", layer_types=["full_attention"] * 24, swiglu_limit=5.0)
    assert (other.letters, other.swiglu_limit) == ("*E" * 24, 5.0)


def test_what_deepseeks_settings_mean():
    """Its own settings are the library's defaults for what is absent; null is none."""
    llm = read("deepseek_v3")
    assert (llm.letters, llm.shared_expert_dim) == ("L-" * 3 + "LE" * 58, 2048)
    assert (read("moonlight").letters, read("moonlight").shared_expert_dim) == ("L-" + "LE" * 26, 2816)
    assert (llm.mtp_pattern, read("moonlight").mtp_pattern) == ("LE", "")
    assert DEEPSEEK_V3.write(read("moonlight"))["n_shared_experts"] == 2
    ungrouped = DEEPSEEK_V3.write(replace(llm, router_groups=1, router_groups_per_token=4))
    assert (ungrouped["n_group"], ungrouped["topk_group"]) == (1, 1)
    names = ("first_k_dense_replace", "n_group", "n_shared_experts", "q_lora_rank", "topk_group")
    absent = {name: x for name, x in PUBLISHED["deepseek_v3"].items() if name not in names}
    assert DEEPSEEK_V3.read(absent, LLMConfig()) == llm
    none = read("deepseek_v3", **dict.fromkeys(names))
    assert none.letters == "LE" * 61
    assert (none.router_groups, none.router_groups_per_token) == (1, 1)
    assert (none.shared_expert_dim, none.latent_attention.q_lora_rank) == (0, 0)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
        ("qwen3_moe", {"rope_scaling": {"rope_type": "yarn"}}, "without factor"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 6}, "layer_types: sliding_attention"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("qwen3_moe", {"hidden_size": None}, "no 'hidden_size'"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 7}, "num_hidden_layers 8, and 7 layer_types"),
        ("qwen3_next", {"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 24}, "24 layer_types: chunked_attention"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("gpt_oss", {"sliding_window": None}, "no 'sliding_window'"),
        *((name, {"attention_bias": True}, "attention_bias: True") for name in DECODERS if name != "gpt_oss"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        ("deepseek_v3", {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(name: str, changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        read(name, **changed)


OTHER_LATENTS = replace(read("deepseek_v3").latent_attention, norm_eps=1e-5)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        *((name, {"rope": RopeConfig()}, r"theta 0\.0") for name in DECODERS),
        *((n, {"rope": RopeConfig(1e6, 0.5)}, r"fraction 0\.5") for n in DECODERS if n != "qwen3_next"),
        ("qwen3_moe", {"pattern": "M*-"}, "pattern is 'M"),
        ("qwen3_moe", {"pattern": "*-M-"}, "pattern is"),
        ("qwen3_moe", {"qk_norm": False}, "qk_norm: False"),
        ("qwen3_moe", {"router": "sigmoid"}, "router: 'sigmoid'"),
        ("qwen3_moe", {"shared_expert_dim": 8}, "shared_expert_dim: 8"),
        ("qwen3_next", {"pattern": "DEM-"}, "pattern is 'DEM-'"),
        ("qwen3_next", {"norm_zero_centred": False}, "norm_zero_centred: False"),
        ("qwen3_next", {"shared_expert_gate": False}, "shared_expert_gate: False"),
        ("qwen3_next", {"shared_expert_dim": 0}, "shared_expert_dim is 0"),
        ("gpt_oss", {"pattern": "WE*-"}, r"with \*-; expected WE, \*E"),
        ("gpt_oss", {"attention_sinks": False}, "attention_sinks: False"),
        ("gpt_oss", {"ffn_form": "swiglu"}, "ffn_form: 'swiglu'"),
        ("deepseek_v3", {"pattern": "LEL-"}, "pattern is 'LEL-'"),
        ("deepseek_v3", {"pattern": "*-*E"}, "pattern is"),
        ("deepseek_v3", {"router": "softmax"}, "router: 'softmax'"),
        ("deepseek_v3", {"shared_expert_dim": 100}, "shared_expert_dim is 100"),
        ("deepseek_v3", {"ffn_form": "relu2"}, "ffn_form: 'relu2'"),
        ("deepseek_v3", {"latent_attention": OTHER_LATENTS}, "norm_eps is 1e-05"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(name: str, changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        DECODERS[name].write(replace(read(name), **changed))


def test_the_format_follows_from_the_blocks():
    """A Nemotron-H folder would be read as a model without positions and gates."""
    dense = QWEN3.read(PUBLISHED["qwen3_moe"] | {"num_experts": 0}, LLMConfig())
    assert export_families(ModelConfig(None, dense))[""].title == "Qwen3ForCausalLM"
    assert export_families(ModelConfig(encoder=None))[""].title == "NemotronHForCausalLM"
    with pytest.raises(UserError, match="qk_norm: False"):
        QWEN3.write(replace(dense, qk_norm=False))


def test_a_copy_of_a_tied_embedding_is_not_read(tmp_path: Path):
    """Published folders of the small models have one."""
    folder = write_published("qwen3", tmp_path / "tied")
    names = tensors(folder).keys()
    change_published(folder, lambda _, x: x.update({"lm_head.weight": x["model.embed_tokens.weight"]}))
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == names
    untied = write_published("qwen3_moe", tmp_path / "untied")
    change_published(untied, lambda _, x: x.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        import_weights([str(untied)], tmp_path / "not")
