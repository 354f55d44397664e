"""Prints what each published size of each family amounts to, beside the figures its authors give: two tables.

    python scripts/published_sizes.py [--only Qwen3 GPT-OSS ...] [--no-lines]

The first table: parameters, and those that a token uses (of the embedding, a row), from the shapes of the
model that jaxthd makes of the published settings; the published figures; how many devices of 80 GiB hold the
training of all parameters with a 0.6B encoder, sharded over data ranks, a buffer of 8,192 tokens on each; and
by the closed forms of jaxthd estimate the bytes that a device holds and receives in a step. Half a minute.

The second table: the lines of code that each family took, by file, from this checkout.

Exits 1 unless every number of parameters agrees with the published one in all digits that are published.
Settings are those of the published config.json, or of the file in configs/. Sources of the figures: Qwen
team, Qwen3 Technical Report (2025); NVIDIA, Nemotron-H (2025), Nemotron Nano 2 (2025), Nemotron 3 (2025);
OpenAI, gpt-oss model card (2025); DeepSeek-AI, DeepSeek-V3 (2024); Moonshot AI, Moonlight (2025). The exact
ones are those of the tensors in the published folders.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.config import AdaptConfig, Config, LLMConfig, MeshConfig, ModelConfig
from jaxthd.files.config_file import load_config
from jaxthd.hf.registry import FAMILIES
from jaxthd.planning.memory import temporary_memory
from jaxthd.planning.parameters import parameter_groups, state_bytes
from jaxthd.planning.traffic import step_traffic
from jaxthd.terminal.tables import Claim, conclude, show, size_text

ROOT = Path(__file__).parents[1]
DEVICE = 80 * 2**30


class Size(NamedTuple):
    """A published size. total, active: as published, in billions; digits after the point count."""

    name: str
    llm: LLMConfig
    total: str
    active: str


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
    active = str(fields.pop("active", ""))
    return Size(f"Qwen3-{name}", read(fields), total, active)


def nemotron(name: str, pattern: str, dim: int, total: str, active: str = "", **more: Any) -> Size:
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
    return Size(f"Nemotron-{name}", read(fields), total, active)


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
    yield qwen3("30B-A3B", 2048, 48, (32, 4), "30.5", **moe, moe_intermediate_size=768, active="3.3")
    yield qwen3("235B-A22B", 4096, 94, (64, 4), "235", **moe, moe_intermediate_size=1536, active="22")
    blocks = "M-M-M-M*" + "-M-M-M-M-M*" * 3
    eight, large = blocks + "-M-M-M-M-M-", blocks + "-M-M-M-M-M*" * 6 + "-M-M-M-M-M-"
    yield nemotron("H-8B", eight, 4096, "8", **heads(32, 8, 21504), mamba_num_heads=128)
    wide: dict[str, Any] = {"mamba_num_heads": 256, "ssm_state_size": 256}
    yield nemotron("H-56B", large, 8192, "56", **heads(64, 8, 32768), **wide)
    nine = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    deep: dict[str, Any] = {"mamba_num_heads": 128, "mamba_head_dim": 80}
    yield nemotron("Nano-9B-v2", nine, 4480, "8.89", **heads(40, 8, 15680), **deep)
    yield Size("Nemotron-3-Nano", of_config("nemotron3_nano"), "31.6", "3.2")
    yield nemotron(
        "3-Super, MTP included",
        "MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        4096,
        "123.611012096",
        "12",
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
    yield Size("Qwen3-Next-80B-A3B", of_config("qwen3_next"), "79.674391296", "3")
    small = of_config("gpt_oss")
    yield Size("GPT-OSS-20B", small, "20.91", "3.61")
    yield Size("GPT-OSS-120B", replace(small, pattern="WE*E" * 18, experts=128), "116.83", "5.13")
    yield Size("Moonlight-16B-A3B", of_config("moonlight"), "16", "3")
    yield Size("DeepSeek-V3", of_config("deepseek_v3"), "671", "37")


def run_of(size: Size, devices: int) -> Config:
    """Training of all parameters: a buffer of 8,192 tokens on each of so many data ranks."""
    base = load_config(ROOT / "configs" / "qwen3.py")
    return replace(
        base,
        mesh=MeshConfig(data=devices),
        data=replace(base.data, rows=devices),
        model=replace(base.model, llm=size.llm),
        adapt=AdaptConfig(),
    )


def held(config: Config) -> int:
    """Bytes that a device holds at most: state, and temporary memory."""
    state = state_bytes(config)
    del state["gradients"]  # they are of the temporary memory
    return sum(state.values()) + int(temporary_memory(config).most)


def agrees(found: int, published: str) -> bool:
    digits = len(published.partition(".")[2])
    return f"{found / 1e9:.{digits}f}" == published


def sizes_table(only: list[str]) -> list[Claim]:
    rows, claims = [], []
    for size in sizes():
        if only and not any(part in size.name for part in only):
            continue
        text = Config(model=ModelConfig(encoder=None, llm=size.llm))
        groups = parameter_groups(text)
        total, active = sum(g.parameters for g in groups), sum(g.active for g in groups)
        devices = 1
        while 16 * total / devices > DEVICE or held(run_of(size, devices)) > DEVICE:
            devices *= 2
        config = run_of(size, devices)
        received = sum(step_traffic(config).values())
        figures = (f"{total:,}", size.total, f"{active / 1e9:.2f}", size.active or "all")
        rows.append((size.name, *figures, devices, size_text(held(config)), size_text(received)))
        claims.append(Claim(f"{size.name}: {total:,} parameters", agrees(total, size.total)))
    show(
        "Published sizes",
        "model|parameters|published, 1e9|a token uses, 1e9|published|devices|held by one|received in a step",
        rows,
    )
    return claims


LINES: dict[str, tuple[str, ...]] = {
    "Nemotron-H, -3": ("hf/nemotron_h.py", "models/mixers/mamba2.py"),
    "Qwen3, dense and MoE": ("hf/qwen3.py",),
    "GPT-OSS": ("hf/gpt_oss.py", "hf/mxfp4.py"),
    "DeepSeek-V3, Moonlight": (
        "hf/deepseek_v3.py",
        "hf/block_scaled.py",
        "models/mixers/latent_attention.py",
        "config/latent_attention.py",
    ),
    "Qwen3-Next": (
        "hf/qwen3_next.py",
        "models/mixers/delta.py",
        "ops/delta/rule.py",
        "ops/delta/cuts.py",
        "ops/delta/unit_triangular.py",
        "config/delta.py",
    ),
    "Canary-Qwen": ("hf/canary_qwen.py", "hf/merged_lora.py"),
    "Nemotron-Omni": ("hf/nemotron_omni.py",),
    "Parakeet": ("hf/parakeet.py",),
    "shared: attention, MLP, experts, rotary": (
        "models/mixers/attention.py",
        "models/mixers/mlp.py",
        "models/mixers/moe.py",
        "ops/rotary.py",
        "hf/decoder.py",
        "hf/rotary.py",
    ),
    "shared: decoder, speech LM, step": (
        "models/hybrid.py",
        "models/speech_lm.py",
        "steps/forward.py",
        "steps/training.py",
    ),
}
"""The files that are a family's own, and those that all share. Those that are absent are left out."""


def lines_table() -> None:
    rows = []
    for family, files in LINES.items():
        for name in files:
            path = ROOT / "jaxthd" / name
            if path.is_file():
                rows.append((family, f"jaxthd/{name}", len(path.read_text().splitlines())))
    show("Lines of each family", "family|file|lines", rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="sizes whose names have one of these parts")
    parser.add_argument("--no-lines", action="store_true", help="without the second table")
    options = parser.parse_args()
    claims = sizes_table(options.only)
    if not options.no_lines:
        lines_table()
    conclude(claims, check=True)


if __name__ == "__main__":
    main()
