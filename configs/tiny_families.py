"""A tiny speech LLM on each family's kind of decoder. Each trains in a minute on two cores.

    jaxthd train configs/tiny_families.py
    python scripts/check_families.py --families qwen3_moe

The first command trains the decoder of FAMILY below on synthetic speech. The second one runs every command of
jaxthd on the tiny model of each family that it names. The sizes are tiny, and odd where the family's may be;
the kinds of blocks, of norms, gates, routers and positions are the family's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxthd.config import (
    Config,
    DeltaConfig,
    EncoderConfig,
    LatentAttentionConfig,
    LLMConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from jaxthd.files.config_file import load_config

FAMILY = "qwen3"
QWEN3: dict[str, Any] = {
    "norm_eps": 1e-6,
    "rope": RopeConfig(theta=1e4),
    "qk_norm": True,
    "ffn_form": "swiglu",
}
SOFTMAX: dict[str, Any] = {"router": "softmax", "router_scale": 1.0, "shared_expert_dim": 0}
LATENT_ATTENTION = LatentAttentionConfig(
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
LATENT: dict[str, Any] = {
    "norm_eps": 1e-6,
    "rope": RopeConfig(theta=1e4),
    "latent_attention": LATENT_ATTENTION,
    "ffn_form": "swiglu",
    "router_scale": 2.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"pattern": "M-M*-"},
    "nemotron3": {"pattern": "ME*E", "router_scale": 2.5},
    "qwen3": {**QWEN3, "pattern": "*-*-*-", "tied_embedding": True},
    "qwen3_moe": {**QWEN3, **SOFTMAX, "pattern": "*E*E*E"},
    "qwen3_next": {
        **QWEN3,
        "router": "softmax",
        "router_scale": 1.0,
        "pattern": "DEDE*E",
        "rope": RopeConfig(theta=1e4, fraction=0.25),
        "norm_zero_centred": True,
        "attention_gate": True,
        "delta": DeltaConfig(key_heads=2, value_heads=4, key_dim=24, value_dim=24),
        "shared_expert_gate": True,
    },
    "gpt_oss": {
        **SOFTMAX,
        "pattern": "WE*EWE",
        "window": 32,
        "attention_sinks": True,
        "attention_bias": True,
        "rope": RopeConfig(theta=1e4, scaling="yarn", factor=4.0, original_positions=64, truncate=False),
        "ffn_form": "clamped_swiglu",
        "swiglu_limit": 7.0,
        "ffn_bias": True,
        "router_bias": True,
    },
    "deepseek_v3": {
        **LATENT,
        "pattern": "L-LELE",
        "latent_attention": replace(LATENT_ATTENTION, q_lora_rank=40),
        "rope": RopeConfig(theta=1e4, scaling="yarn", factor=4.0, original_positions=64),
        "router_groups": 3,
        "router_groups_per_token": 2,
    },
    "moonlight": {**LATENT, "pattern": "L-LELE"},
}
"""Each family's decoder, beside the sizes of config()."""


def config(family: str = FAMILY) -> Config:
    base = load_config(Path(__file__).with_name("first_run.py"))
    sizes: dict[str, Any] = {
        "vocab_size": 448,
        "dim": 96,
        "q_heads": 6,
        "kv_heads": 2,
        "head_dim": 24,
        "ffn_dim": 192,
        "mamba_heads": 6,
        "mamba_head_dim": 32,
        "mamba_state": 16,
        "mamba_groups": 2,
        "experts": 6,
        "experts_per_token": 2,
        "expert_dim": 48,
        "shared_expert_dim": 48,
    }
    return replace(
        base,
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=2, dim=96, heads=4, ffn_dim=192, subsampling_channels=16, chunk_seconds=10.0
            ),
            llm=LLMConfig(**sizes | FAMILIES[family]),
        ),
        train=TrainConfig(
            steps=200,
            learning_rate=2e-3,
            warmup_steps=20,
            ctc_loss=0.5,
            validate_every=200,
            validation_batches=8,
            max_new_tokens=24,
            checkpoint_every=200,
        ),
    )
