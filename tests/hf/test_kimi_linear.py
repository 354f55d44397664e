"""Kimi-Linear in the form of its published folder: layers by their numbers, dense MLPs apart from experts.
What it computes is compared in test_families.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.config.listing import value_at
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config
from jaxthd.hf.kimi_linear import KIMI_LINEAR
from jaxthd.hf.registry import export_families
from tests.hf.published import assert_identical, change_published, tensors, write_published

TEXT = ModelConfig(encoder=None)
PUBLISHED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "head_dim": 72,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [x for x in range(1, 27) if x % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
"""Settings like those of the published model; others are the library's defaults."""


def as_published(folder: Path) -> Path:
    """The reference's checkpoint in the published form."""

    def change(settings: dict[str, Any], named: dict[str, np.ndarray]) -> None:
        for x in [x for x in named if "layers.0.block_sparse_moe." in x]:
            named[x.replace("block_sparse_moe", "mlp")] = named.pop(x)
        types = settings.pop("layer_types")
        settings.pop("mlp_layer_types")
        names = {
            "head_dim": "head_dim",
            "num_heads": "num_heads",
            "conv_kernel_dim": "short_conv_kernel_size",
        }
        settings["linear_attn_config"] = {new: settings.pop(f"linear_{old}") for old, new in names.items()}
        for name, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention")):
            settings["linear_attn_config"][name] = [n for n, x in enumerate(types, 1) if x == kind]
        settings |= {"first_k_dense_replace": 1, "mla_use_nope": True}

    return change_published(write_published("kimi_linear", folder), change)


def test_both_forms_come_back_bit_identical(tmp_path: Path):
    """They are one model; without an original the export has the published form."""
    saved, published = (
        write_published("kimi_linear", tmp_path / "saved"),
        as_published(tmp_path / "published"),
    )
    assert model_config(saved, model=TEXT) == model_config(published, model=TEXT)
    import_weights([str(saved)], tmp_path / "imported")
    for like, want in ((None, published), (published, published), (saved, saved)):
        out = tmp_path / f"out-{like and like.name}"
        export_weights(tmp_path / "imported", out, like=like)
        assert_identical(tensors(out), tensors(want))
        assert model_config(out, model=TEXT) == model_config(saved, model=TEXT)
        read, back = (json.loads((x / "config.json").read_text()) for x in (want, out))
        if like is not None:
            assert back.items() >= {x: y for x, y in read.items() if x != "dtype"}.items()


def test_what_the_settings_mean():
    """The numbers of layers begin with 1; what is absent is the library's default."""
    llm = KIMI_LINEAR.read(PUBLISHED, LLMConfig())
    assert llm.letters == "K-KEKELE" + "KEKEKELE" * 5 + "KEKELE"
    sizes = ("K.heads", "K.head_dim", "K.conv", "L.qk_rope_head_dim", "L.rope.theta", "E.router.scale")
    assert [value_at(llm, f"blocks.{x}") for x in sizes] == [32, 128, 4, 64, 0.0, 2.446]
    assert value_at(llm, "blocks.E.shared_inner") == 1024
    assert KIMI_LINEAR.read(KIMI_LINEAR.write(llm), LLMConfig()) == llm
    assert KIMI_LINEAR.write(llm)["linear_attn_config"] == PUBLISHED["linear_attn_config"]
    assert [x.title for x in export_families(ModelConfig(None, llm)).values()] == ["KimiLinearForCausalLM"]
    bare = KIMI_LINEAR.read({"num_hidden_layers": 6}, LLMConfig())
    assert bare.letters == "K-KEKEKELEKE"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3]}},
            "each of the layers 1 to 27",
        ),
        ({"mla_use_nope": False}, "mla_use_nope: False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: 'softmax'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        ({"mlp_layer_types": ["dense"] * 26}, "26 mlp_layer_types"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(changed: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        KIMI_LINEAR.read(PUBLISHED | changed, LLMConfig())
