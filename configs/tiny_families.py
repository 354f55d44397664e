"""A tiny speech LLM on each family's kind of decoder. Each trains in a minute on two cores.

    jaxthd train configs/tiny_families.py
    python scripts/check_families.py --families qwen3_moe

The first command trains the decoder of FAMILY below on synthetic speech. The second one runs every command of
jaxthd on the tiny model of each family that it names. The sizes are tiny, and odd where the family's may be;
the kinds of blocks, of norms, gates, routers and positions are the family's.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, EncoderConfig, LLMConfig, ModelConfig, RopeConfig, TrainConfig
from jaxthd.models.blocks import (
    MLP,
    Attention,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Mamba2,
    MoE,
    Parallel,
    Router,
    ShortConv,
)

FAMILY = "qwen3"
ROPE = RopeConfig(theta=1e4)
YARN = RopeConfig(theta=1e4, scaling="yarn", factor=4.0, original_positions=64)
ATTENTION = Attention(heads=6, kv_heads=2, head_dim=24)
LATENT_ATTENTION = LatentAttention(
    heads=6, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope=ROPE
)
GPT_OSS = replace(ATTENTION, sinks=True, bias=True, rope=replace(YARN, truncate=False))
MAMBA = Mamba2(heads=6, head_dim=32, state=16, groups=2)
RELU_MLP, GATED_MLP = MLP(inner=192), MLP(inner=192, form="swiglu")
EXPERTS = MoE(experts=6, experts_per_token=2, inner=48, shared_inner=48)
FAMILIES: dict[str, LLMConfig] = {
    "nemotron_h": LLMConfig("M-M*-", blocks={"M": MAMBA, "*": ATTENTION, "-": RELU_MLP}),
    "nemotron3": LLMConfig(
        "ME*E", blocks={"M": MAMBA, "*": ATTENTION, "E": replace(EXPERTS, router=Router(scale=2.5))}
    ),
    "qwen3": LLMConfig(
        "*-*-*-",
        blocks={"*": replace(ATTENTION, qk_norm=True, rope=ROPE), "-": GATED_MLP},
        norm_eps=1e-6,
        tied_embedding=True,
    ),
    "qwen3_moe": LLMConfig(
        "*E*E*E",
        blocks={
            "*": replace(ATTENTION, qk_norm=True, rope=ROPE),
            "E": replace(EXPERTS, form="swiglu", shared_inner=0, router=Router(scores="softmax")),
        },
        norm_eps=1e-6,
    ),
    "qwen3_next": LLMConfig(
        "DEDE*E",
        blocks={
            "D": GatedDelta(key_heads=2, value_heads=4, key_dim=24, value_dim=24),
            "*": replace(ATTENTION, qk_norm=True, gate=True, rope=replace(ROPE, fraction=0.25)),
            "E": replace(EXPERTS, form="swiglu", shared_gate=True, router=Router(scores="softmax")),
        },
        norm_eps=1e-6,
        norm_zero_centred=True,
    ),
    "qwen3_5": LLMConfig(
        "D-D-*-",
        blocks={
            "D": GatedDelta(key_heads=2, value_heads=4, key_dim=24, value_dim=16, conv=3),
            "*": replace(ATTENTION, qk_norm=True, gate=True, rope=replace(ROPE, fraction=0.25)),
            "-": GATED_MLP,
        },
        norm_eps=1e-6,
        norm_zero_centred=True,
        tied_embedding=True,
    ),
    "gpt_oss": LLMConfig(
        "WE*EWE",
        blocks={
            "W": replace(GPT_OSS, window=32),
            "*": GPT_OSS,
            "E": replace(
                EXPERTS,
                form="clamped_swiglu",
                bias=True,
                shared_inner=0,
                router=Router(scores="softmax", bias=True),
            ),
        },
    ),
    "deepseek_v3": LLMConfig(
        "L-LELE",
        blocks={
            "L": replace(LATENT_ATTENTION, q_lora_rank=40, rope=YARN),
            "-": GATED_MLP,
            "E": replace(EXPERTS, form="swiglu", router=Router(groups=3, groups_per_token=2, scale=2.5)),
        },
        norm_eps=1e-6,
    ),
    "moonlight": LLMConfig(
        "L-LELE",
        blocks={
            "L": LATENT_ATTENTION,
            "-": GATED_MLP,
            "E": replace(EXPERTS, form="swiglu", router=Router(scale=2.5)),
        },
        norm_eps=1e-6,
    ),
    "bamba": LLMConfig(
        "M-*-M-",
        blocks={
            "M": replace(MAMBA, groups=1),
            "*": replace(ATTENTION, rope=replace(ROPE, fraction=0.5)),
            "-": GATED_MLP,
        },
    ),
    "granite4": LLMConfig(
        "ME*EME",
        blocks={
            "M": replace(MAMBA, groups=1),
            "*": replace(ATTENTION, scale=0.125),
            "E": replace(EXPERTS, form="swiglu", router=Router(scores="softmax")),
        },
        tied_embedding=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=1.5,
    ),
    "falcon_h1": LLMConfig(
        "H-H-",
        blocks={
            "H": Parallel(
                self_attention=replace(ATTENTION, rope=ROPE),
                mamba=replace(MAMBA, norm="none", factors=(0.9, 1.2, 0.8, 1.1, 1.0)),
                attention_out=0.8,
                mamba_in=1.2,
                mamba_out=0.7,
            ),
            "-": replace(GATED_MLP, factors=(0.9, 1.3)),
        },
        embedding_multiplier=2.0,
        logits_scaling=0.8,
    ),
    "lfm2": LLMConfig(
        "C-*-C-",
        blocks={
            "C": ShortConv(inner=96),
            "*": replace(ATTENTION, qk_norm=True, rope=ROPE),
            "-": GATED_MLP,
        },
        tied_embedding=True,
    ),
    "kimi_linear": LLMConfig(
        "K-KELE",
        blocks={
            "K": KimiDelta(heads=3, head_dim=24),
            "L": replace(LATENT_ATTENTION, rope=RopeConfig()),
            "-": GATED_MLP,
            "E": replace(EXPERTS, form="swiglu", router=Router(scale=2.446)),
        },
    ),
    "olmo_hybrid": LLMConfig(
        "D-*FD-",
        blocks={
            "D": GatedDelta(
                key_heads=3, value_heads=6, key_dim=24, value_dim=16, negative_eigenvalues=True, norm_eps=1e-5
            ),
            "*": replace(ATTENTION, heads=6, head_dim=16, qk_norm=True, joint_norm=True, norm_after=True),
            "-": GATED_MLP,
            "F": replace(GATED_MLP, norm_after=True),
        },
        norm_eps=1e-6,
    ),
}
"""Each family's decoder, beside its vocabulary and its dim."""


def config(family: str = FAMILY) -> Config:
    base = load_config(Path(__file__).with_name("first_run.py"))
    return replace(
        base,
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=2, dim=96, heads=4, ffn_dim=192, subsampling_channels=16, chunk_seconds=10.0
            ),
            llm=replace(FAMILIES[family], vocab_size=448, dim=96),
        ),
        train=TrainConfig(
            steps=200,
            learning_rate=2e-3,
            warmup_steps=20,
            ctc_loss=0.5,
            validate_every=200,
            validation_batches=8,
            checkpoint_every=200,
        ),
    )
