"""What families of decoders read, write and refuse. What they compute is compared in test_families.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import LLMConfig, ModelConfig, RopeConfig
from jaxthd.config.listing import value_at
from jaxthd.config.values import with_value
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.decoder import Decoder
from jaxthd.hf.deepseek_v3 import DEEPSEEK_V3
from jaxthd.hf.gpt_oss import GPT_OSS
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.qwen3 import QWEN3, QWEN3_MOE
from jaxthd.hf.qwen3_next import QWEN3_NEXT
from jaxthd.hf.registry import export_families
from jaxthd.models.blocks import GatedDelta, Router
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
WITHOUT_BIASES = ("qwen3_next", "deepseek_v3", "moonlight")
"""Those whose attention has none, whatever the settings."""


def of_blocks(llm: LLMConfig, *paths: str) -> tuple[Any, ...]:
    """Settings of the decoder's blocks, by their paths below these."""
    return tuple(value_at(llm, f"blocks.{path}") for path in paths)


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
    assert (llm.letters, llm.tied_embedding) == ("*-*E*-*-*-*E", False)
    assert of_blocks(llm, "*.rope.theta", "E.router.scores", "E.shared_inner") == (1e6, "softmax", 0)
    assert QWEN3_MOE.write(llm)["mlp_only_layers"] == [0, 2, 3, 4]
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "num_local_experts": 128}
    assert read("qwen3_moe", rope_theta=None, num_experts=None, **newer) == llm


def test_what_qwen3_nexts_settings_mean():
    llm = read("qwen3_next")
    assert llm.letters == "DEDEDE*EDED-DE*E"
    assert of_blocks(llm, "*.rope") == (RopeConfig(theta=1e7, fraction=0.25),)
    delta = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4)
    assert llm.blocks["D"] == delta
    sizes = of_blocks(llm, "E.experts", "E.experts_per_token", "E.inner", "E.shared_inner")
    assert sizes == (512, 10, 512, 512)
    assert llm.norm_zero_centred
    assert of_blocks(llm, "*.gate", "E.shared_gate", "*.qk_norm") == (True,) * 3
    again = QWEN3_NEXT.write(llm)
    assert (again["mlp_only_layers"], again["partial_rotary_factor"]) == ([5], 0.25)
    dense = read("qwen3_next", num_experts=0)
    assert dense.letters == "D-D-D-*-" * 2
    assert QWEN3_NEXT.read(QWEN3_NEXT.write(dense), LLMConfig()) == dense


def test_what_gpt_oss_settings_mean():
    llm = read("gpt_oss")
    rope = {"theta": 150000.0, "scaling": "yarn", "factor": 32.0, "original_positions": 4096}
    assert llm.letters == "WE*E" * 12
    assert of_blocks(llm, "*.rope", "W.rope") == (RopeConfig(**rope, truncate=False),) * 2
    # The library's defaults.
    absent = ("layer_types", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias")
    assert read("gpt_oss", **dict.fromkeys(absent)) == read("gpt_oss", rope_theta=None) == llm
    other = read("gpt_oss", layer_types=["full_attention"] * 24, swiglu_limit=5.0)
    assert (other.letters, *of_blocks(other, "E.limit")) == ("*E" * 24, 5.0)
    windows = read("gpt_oss", layer_types=["sliding_attention"] * 24)
    assert GPT_OSS.read(GPT_OSS.write(windows), LLMConfig()) == windows


def test_what_deepseeks_settings_mean():
    """Its own settings are the library's defaults for what is absent; null is none."""
    llm, moonlight = read("deepseek_v3"), read("moonlight")
    assert (llm.letters, *of_blocks(llm, "E.shared_inner")) == ("L-" * 3 + "LE" * 58, 2048)
    assert (moonlight.letters, *of_blocks(moonlight, "E.shared_inner")) == ("L-" + "LE" * 26, 2816)
    assert (llm.mtp_pattern, moonlight.mtp_pattern) == ("LE", "")
    assert DEEPSEEK_V3.write(moonlight)["n_shared_experts"] == 2
    one_group = {"groups": 1, "groups_per_token": 4}
    ungrouped = DEEPSEEK_V3.write(with_value(llm, "blocks.E.router", one_group))
    assert (ungrouped["n_group"], ungrouped["topk_group"]) == (1, 1)
    names = ("first_k_dense_replace", "n_group", "n_shared_experts", "q_lora_rank", "topk_group")
    absent = {name: x for name, x in PUBLISHED["deepseek_v3"].items() if name not in names}
    assert DEEPSEEK_V3.read(absent, LLMConfig()) == llm
    none = read("deepseek_v3", **dict.fromkeys(names))
    assert none.letters == "LE" * 61
    assert of_blocks(none, "E.router.groups", "E.router.groups_per_token") == (1, 1)
    assert of_blocks(none, "E.shared_inner", "L.q_lora_rank") == (0, 0)


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
        *((name, {"attention_bias": True}, "attention_bias: True") for name in WITHOUT_BIASES),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        ("deepseek_v3", {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(name: str, changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        read(name, **changed)


ATTENTION = {name: "".join(sorted({*"*WL"} & {*read(name).letters})) for name in DECODERS}
"""The letters of each model's attention."""


@pytest.mark.parametrize(
    ("name", "letters", "changed", "said"),
    [
        *((name, ATTENTION[name], {"rope": RopeConfig()}, r"theta 0\.0") for name in DECODERS),
        *(
            (name, ATTENTION[name], {"rope": RopeConfig(1e6, 0.5)}, r"fraction 0\.5")
            for name in DECODERS
            if name != "qwen3_next"
        ),
        ("qwen3_moe", "", {"pattern": "M*-"}, "pattern is 'M"),
        ("qwen3_moe", "", {"pattern": "*-M-"}, "pattern is"),
        ("qwen3_moe", "*", {"qk_norm": False}, r"blocks\.\*\.qk_norm: False"),
        ("qwen3_moe", "E", {"router": Router()}, r"blocks\.E\.router\.scores: 'sigmoid'"),
        ("qwen3_moe", "E", {"shared_inner": 8}, r"blocks\.E\.shared_inner: 8"),
        ("qwen3_next", "", {"pattern": "DEM-"}, "pattern is 'DEM-'"),
        ("qwen3_next", "", {"norm_zero_centred": False}, "norm_zero_centred: False"),
        ("qwen3_next", "E", {"shared_gate": False}, "shared_gate: False"),
        ("qwen3_next", "E", {"shared_inner": 0}, "shared_inner is 0"),
        ("gpt_oss", "", {"pattern": "WE*-"}, r"with \*-; expected WE, \*E"),
        ("gpt_oss", "*W", {"sinks": False}, r"blocks\.[*W]\.sinks: False"),
        ("gpt_oss", "W", {"head_dim": 32}, "one head_dim for all kinds of blocks"),
        ("gpt_oss", "E", {"form": "swiglu"}, "form: 'swiglu'"),
        ("deepseek_v3", "", {"pattern": "LEL-"}, "pattern is 'LEL-'"),
        ("deepseek_v3", "", {"pattern": "*-*E"}, "pattern is"),
        ("deepseek_v3", "E", {"router": Router(scores="softmax")}, "scores: 'softmax'"),
        ("deepseek_v3", "E", {"shared_inner": 100}, "shared_inner is 100"),
        ("deepseek_v3", "-E", {"form": "relu2"}, "form: 'relu2'"),
        ("deepseek_v3", "L", {"norm_eps": 1e-5}, r"blocks\.L\.norm_eps: 1e-05"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(
    name: str, letters: str, changed: dict[str, Any], said: str
):
    """letters: of the blocks whose settings change; "": the decoder's do."""
    llm = read(name)
    other = llm.with_settings(letters, **changed) if letters else replace(llm, **changed)
    with pytest.raises(UserError, match=said):
        DECODERS[name].write(other)


def test_the_format_follows_from_the_blocks():
    """A Nemotron-H folder would be read as a model without positions and gates."""
    dense = QWEN3.read(PUBLISHED["qwen3_moe"] | {"num_experts": 0}, LLMConfig())
    assert export_families(ModelConfig(None, dense))[""].title == "Qwen3ForCausalLM"
    assert export_families(ModelConfig(encoder=None))[""].title == "NemotronHForCausalLM"
    with pytest.raises(UserError, match="qk_norm: False"):
        QWEN3.write(dense.with_settings("*", qk_norm=False))


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


def test_nothing_of_another_checkpoints_decoder_stays_that_no_field_holds():
    """A speech model's folder read first, whose decoder ties its embedding, and a hybrid's after it."""
    tied = replace(LLMConfig(), tied_embedding=True, norm_zero_centred=True)
    found = NEMOTRON_H.read(NEMOTRON_H.write(LLMConfig(pattern="M*-")), tied)
    assert not found.tied_embedding
    assert not found.norm_zero_centred
    assert found.pattern == "M*-"
