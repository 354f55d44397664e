"""The parameters of published sizes, counted from shapes, agree with what their authors give.

Settings are those of the published config.json, or of the file in configs/. Sources of the figures: Qwen
team, Qwen3 Technical Report (2025); NVIDIA, Nemotron-H (2025), Nemotron Nano 2 (2025), Nemotron 3 (2025);
OpenAI, gpt-oss model card (2025); DeepSeek-AI, DeepSeek-V3 (2024); Moonshot AI, Moonlight (2025), Kimi Linear
(2025). The exact ones are those of the tensors in the published folders; that of Kimi-Linear is what
llama.cpp counts in it (its card says 48B).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxthd.config import Config, LLMConfig, ModelConfig
from jaxthd.files.config_file import load_config
from jaxthd.hf.registry import FAMILIES
from jaxthd.planning.parameters import parameter_groups
from tests.hf.test_kimi_linear import PUBLISHED as KIMI_LINEAR

ROOT = Path(__file__).parents[2]
SOME = ("Qwen3-30B", "3-Super", "GPT-OSS-20B")
"""Parts of the names of sizes that the ordinary suite counts."""


class Size(NamedTuple):
    """A published size. total, active: its parameters, and those used for a token, as published, in billions;
    digits after the point count. Routers' correction biases, which are buffers here, are in neither."""

    name: str
    llm: LLMConfig
    total: str
    active: str = ""


def qwen3(name: str, dim: int, layers: int, heads: tuple[int, int], total: str, **more: Any) -> Size:
    fields = {
        "model_type": "qwen3_moe" if "num_experts" in more else "qwen3",
        "vocab_size": 151936,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": dim < 4096 and "num_experts" not in more,
        **more,
    }
    return Size(f"Qwen3-{name}", read(fields), total)


def nemotron(name: str, pattern: str, dim: int, total: str, **more: Any) -> Size:
    fields = {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": dim,
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "head_dim": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        **more,
    }
    return Size(f"Nemotron-{name}", read(fields), total)


def read(fields: dict[str, Any]) -> LLMConfig:
    """The decoder that jaxthd makes of a published config.json."""
    family = next(f for f in FAMILIES if fields["model_type"] in f.model_types)
    return family.configure(fields, ModelConfig(encoder=None)).llm


def heads(q: int, kv: int, ffn: int) -> dict[str, Any]:
    return {"num_attention_heads": q, "num_key_value_heads": kv, "intermediate_size": ffn}


def of_config(name: str) -> LLMConfig:
    return load_config(ROOT / "configs" / f"{name}.py").model.llm


def sizes() -> Iterator[Size]:
    moe: dict[str, Any] = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "intermediate_size": 0,
    }
    yield qwen3("0.6B", 1024, 28, (16, 8), "0.6", intermediate_size=3072)
    yield qwen3("1.7B", 2048, 28, (16, 8), "1.7", intermediate_size=6144)
    yield qwen3("4B", 2560, 36, (32, 8), "4.0", intermediate_size=9728)
    yield qwen3("8B", 4096, 36, (32, 8), "8.2", intermediate_size=12288)
    yield qwen3("14B", 5120, 40, (40, 8), "14.8", intermediate_size=17408)
    yield qwen3("32B", 5120, 64, (64, 8), "32.8", intermediate_size=25600)
    yield qwen3("30B-A3B", 2048, 48, (32, 4), "30.5", **moe, moe_intermediate_size=768)
    yield qwen3("235B-A22B", 4096, 94, (64, 4), "235", **moe, moe_intermediate_size=1536)
    blocks = "M-M-M-M*" + "-M-M-M-M-M*" * 3
    eight, large = blocks + "-M-M-M-M-M-", blocks + "-M-M-M-M-M*" * 6 + "-M-M-M-M-M-"
    yield nemotron("H-8B", eight, 4096, "8", **heads(32, 8, 21504), mamba_num_heads=128)
    wide: dict[str, Any] = {"mamba_num_heads": 256, "ssm_state_size": 256}
    yield nemotron("H-56B", large, 8192, "56", **heads(64, 8, 32768), **wide)
    nine = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    deep: dict[str, Any] = {"mamba_num_heads": 128, "mamba_head_dim": 80}
    yield nemotron("Nano-9B-v2", nine, 4480, "8.89", **heads(40, 8, 15680), **deep)
    yield Size("Nemotron-3-Nano", of_config("nemotron3_nano"), "31.6")
    yield nemotron(
        "3-Super, MTP included",
        "MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        4096,
        "123.611012096",
        **heads(32, 2, 2688),
        mamba_num_heads=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_latent_size=1024,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
        routed_scaling_factor=5.0,
        mtp_hybrid_override_pattern="*E",
        num_nextn_predict_layers=1,
    )
    yield Size("Qwen3-Next-80B-A3B", of_config("qwen3_next"), "79.674391296")
    small = of_config("gpt_oss")
    yield Size("GPT-OSS-20B", small, "20.91", "3.6")
    yield Size("GPT-OSS-120B", replace(small.with_settings("E", experts=128), pattern="WE*E" * 18), "116.83")
    yield Size("Moonlight-16B-A3B", of_config("moonlight"), "15.960108544")
    yield Size("DeepSeek-V3", of_config("deepseek_v3"), "671.026404352")
    yield from hybrids()


def hybrids() -> Iterator[Size]:
    """Hybrid families of 2026. IBM's model cards (2024, 2025) have the sizes of Bamba and Granite 4."""
    mamba: dict[str, Any] = {"mamba_d_state": 128, "mamba_n_groups": 1, "rms_norm_eps": 1e-5}
    bamba = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, **heads(32, 8, 14336)}
    bamba |= {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, **mamba}
    yield Size("Bamba-9B", read(bamba), "9.8")
    yield Size("Granite-4.0-H-Tiny", of_config("granite4"), "6.94")
    ten = ["mamba"] * 5 + ["attention"] + ["mamba"] * 4
    granite: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": ten * 4,
        "tie_word_embeddings": True,
        **mamba,
    }
    small = granite | {"hidden_size": 4096, "mamba_n_heads": 128, **heads(32, 8, 768)}
    small |= {"num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536}
    yield Size("Granite-4.0-H-Small", read(small), "32", "9")
    micro = granite | {"hidden_size": 2048, "mamba_n_heads": 64, **heads(32, 8, 8192)}
    micro |= {"num_local_experts": 0, "shared_intermediate_size": 8192}
    yield Size("Granite-4.0-H-Micro", read(micro), "3.2")
    lfm2 = {"model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16}
    lfm2 |= {**heads(32, 8, 12288), "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    yield Size("LFM2-1.2B", read(lfm2), "1.170340608")
    yield Size("Kimi-Linear-48B-A3B", read(KIMI_LINEAR), "49.12", "3")


def agrees(count: int, published: str) -> bool:
    """Whether a count is the published number of billions, in all digits after the point."""
    digits = len(published.partition(".")[2])
    return f"{count / 1e9:.{digits}f}" == published


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(x, marks=() if any(y in x.name for y in SOME) else pytest.mark.exhaustive, id=x.name)
        for x in sizes()
    ],
)
def test_parameters_are_those_published(size: Size) -> None:
    groups = parameter_groups(Config(model=ModelConfig(encoder=None, llm=size.llm)))
    count, active = (sum(getattr(group, x) for group in groups) for x in ("parameters", "active"))
    assert agrees(count, size.total), f"{count:,} parameters, not {size.total}e9"
    assert not size.active or agrees(active, size.active), f"{active:,} for a token, not {size.active}e9"


def test_digits_that_are_published_count() -> None:
    assert agrees(8_190_735_360, "8.2")
    assert not agrees(8_190_735_360, "8.1")
    assert agrees(123_611_012_096, "123.611012096")
    assert not agrees(123_611_012_097, "123.611012096")
