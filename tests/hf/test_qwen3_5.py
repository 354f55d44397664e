"""Qwen3.5 in the form of its published folders: around a vision tower, experts in one tensor, multi-token
prediction. What it computes is compared in test_families.py."""

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
from jaxthd.hf.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from jaxthd.hf.registry import export_families
from tests.hf.published import assert_identical, change_published, tensors, write_published
from tests.hf.test_mtp import qwen_tensors

TEXT = ModelConfig(encoder=None)
AXES = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_type": "default"}


def as_published(name: str, folder: Path) -> Path:
    """The reference's checkpoint in the published form, with random numbers in what it lacks."""

    def change(settings: dict[str, Any], named: dict[str, np.ndarray]) -> None:
        qwen_tensors(settings, named)
        named |= {
            x: named.pop(x) for x in sorted(named) if ".experts." not in x or x.startswith("mtp.")
        } | packed(named)
        for x in [x for x in named if x.startswith("model.")]:
            named[x.replace("model.", "model.language_model.", 1)] = named.pop(x)
        rng = np.random.default_rng(0)
        for x in ("blocks.0.attn.qkv.weight", "merger.norm.bias"):
            named[f"model.visual.{x}"] = rng.normal(size=(3, 2)).astype(np.float32)
        text = dict(settings, mtp_num_hidden_layers=1, attn_output_gate=True)
        kind = text["model_type"].removesuffix("_text")
        title = text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
        settings.clear()
        settings |= {"architectures": [title], "model_type": kind, "text_config": text}
        settings |= {"vision_config": {"depth": 7}, "image_token_id": 9}
        settings["tie_word_embeddings"] = text["tie_word_embeddings"]

    return change_published(write_published(name, folder), change)


def packed(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Takes the experts of the model's layers out of `named`, and returns those of a layer in one."""
    found: dict[str, np.ndarray] = {}
    for layer in {x.split(".experts.")[0] for x in named if ".experts." in x and not x.startswith("mtp.")}:
        experts = 1 + max(int(x.split(".")[-3]) for x in named if x.startswith(f"{layer}.experts."))
        gate, up, down = (
            np.stack([named.pop(f"{layer}.experts.{n}.{part}_proj.weight") for n in range(experts)])
            for part in ("gate", "up", "down")
        )
        found |= {
            f"{layer}.experts.gate_up_proj": np.concatenate([gate, up], 1),
            f"{layer}.experts.down_proj": down,
        }
    return found


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_published_folder_comes_back_bit_identical(name: str, tmp_path: Path):
    """With its vision tower; and the decoder is that of the folder that holds it alone."""
    alone, folder = write_published(name, tmp_path / "alone"), as_published(name, tmp_path / "published")
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    assert_identical(tensors(tmp_path / "out"), tensors(folder))
    read, back = (json.loads((x / "config.json").read_text()) for x in (folder, tmp_path / "out"))
    assert back.pop("dtype") == "float32"
    assert back["text_config"].items() >= read["text_config"].items()
    assert {x: y for x, y in back.items() if x != "text_config"} == {
        x: y for x, y in read.items() if x not in ("text_config", "dtype")
    }
    llm = model_config(folder, model=TEXT).llm
    assert llm.mtp_pattern == ("*E" if "moe" in name else "*-")
    assert llm.without_mtp() == model_config(alone, model=TEXT).llm

    export_weights(tmp_path / "imported", tmp_path / "text", form="llm", like=alone)
    own, want = tensors(tmp_path / "text"), tensors(alone)
    assert_identical({x: own[x] for x in want}, want)


def test_what_the_settings_mean():
    """Absent ones are the library's defaults; the axes of positions are none of ours."""
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    dense = QWEN3_5.read({"num_hidden_layers": 8, "rope_parameters": rope | AXES}, LLMConfig())
    assert dense.letters == "D-D-D-*-" * 2
    assert (dense.dim, dense.vocab_size, dense.norm_zero_centred) == (4096, 248320, True)
    sizes = ("D.key_heads", "D.value_heads", "D.value_dim", "*.heads", "*.kv_heads", "*.head_dim", "-.inner")
    assert [value_at(dense, f"blocks.{x}") for x in sizes] == [16, 32, 128, 16, 4, 256, 12288]
    assert value_at(dense, "blocks.*.rope.theta") == 1e7
    assert value_at(dense, "blocks.*.rope.fraction") == 0.25
    moe = QWEN3_5_MOE.read({"num_hidden_layers": 4, "full_attention_interval": 2}, LLMConfig())
    assert (moe.letters, moe.dim) == ("DE*E" * 2, 2048)
    assert value_at(moe, "blocks.E.experts_per_token") == 8
    for decoder, llm in ((QWEN3_5, dense), (QWEN3_5_MOE, moe)):
        assert decoder.read(decoder.write(llm), LLMConfig()) == llm
        assert decoder.read(decoder.write(llm) | {"mtp_num_hidden_layers": 0}, LLMConfig()).mtp_pattern == ""
    # The library has no dense Qwen3-Next; of those with experts the two are the same decoder.
    titles = [export_families(ModelConfig(None, llm.without_mtp()))[""].title for llm in (dense, moe)]
    assert titles == ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"]
    with pytest.raises(UserError, match="mtp_num_hidden_layers: 2"):
        QWEN3_5.read({"num_hidden_layers": 8, "mtp_num_hidden_layers": 2}, LLMConfig())
    with pytest.raises(UserError, match="attn_output_gate: False"):
        QWEN3_5.read({"num_hidden_layers": 8, "attn_output_gate": False}, LLMConfig())
