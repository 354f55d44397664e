"""The tiny models that are compared on all meshes: one with all four mixers, experts and audio; and decoders
with the blocks of published families."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxthd.config import (
    AdaptConfig,
    BlockSizes,
    ComputeConfig,
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    RopeConfig,
)
from jaxthd.config.listing import value_at
from jaxthd.config.values import with_value
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

MELS, VOCAB = 8, 56
MODEL = ModelConfig(
    encoder=EncoderConfig(
        num_mels=MELS, layers=1, dim=16, heads=2, ffn_dim=24, subsampling_channels=4, conv_kernel=5
    ),
    llm=LLMConfig(
        pattern="ME*-ME*-",
        vocab_size=VOCAB,
        dim=32,
        blocks={
            "*": Attention(heads=8, kv_heads=2, head_dim=8),
            "-": MLP(inner=32),
            "M": Mamba2(heads=8, head_dim=8, state=8, groups=2),
            "E": MoE(experts=8, experts_per_token=2, inner=16, shared_inner=16, router=Router(scale=2.5)),
        },
    ),
    adapter_dim=16,
)
COMPUTE = ComputeConfig(block_sizes=BlockSizes(scan=6, attention=8, loss=16, vocabulary=20, experts=8))
UNEVEN = {2: "ME*|-ME*-", 4: "M|E*-M|E*|-", 8: "M|E|*|-|M|E|*|-"}
"""Uneven divisions into stages, by the number of stages."""
PLAIN = AdaptConfig()
"""Every parameter is trained."""
ADAPTED = AdaptConfig(
    freeze=(
        *("encoder.blocks.conv.norm.*", "adapter.up.w"),
        *("!decoder.*.norm.weight", "!head", "!encoder.subsampling.*"),
    ),
    lora_rank=3,
    lora_alpha=4.5,
    lora_targets=("decoder.*", "encoder.blocks.attention.*"),
)
PREDICTING: tuple[dict[str, Any], ...] = (
    {"pattern": "MEME", "mtp_pattern": "*E", "mtp_depths": 2},
    {"pattern": "M*", "mtp_pattern": "M*", "mtp_depths": 2, "mtp_shared": False},
)
"""Decoders with multi-token prediction."""
LATENT = LatentAttention(
    q_lora_rank=9,
    kv_lora_rank=10,
    qk_nope_head_dim=5,
    qk_rope_head_dim=6,
    v_head_dim=7,
    rope=RopeConfig(
        theta=100.0, scaling="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=0.7
    ),
)
"""DeepSeek-V3's attention."""


def with_pattern(llm: LLMConfig, pattern: str, **settings: Any) -> LLMConfig:
    """The decoder with another pattern and settings, and without the blocks that it then does not have."""
    llm = replace(llm, pattern=pattern, **settings)
    return replace(llm, blocks={x: block for x, block in llm.blocks.items() if x in llm.kinds})


def qwen3(llm: LLMConfig, pattern: str = "*E*-*E*-") -> LLMConfig:
    """The decoder with Qwen3's blocks, of the sizes that its blocks have."""
    llm = llm.with_settings("*", rope=RopeConfig(theta=100.0), qk_norm=True)
    llm = llm.with_settings("-E", form="swiglu")
    llm = llm.with_settings("E", shared_inner=0, router=Router(scores="softmax"))
    return with_pattern(llm, pattern, tied_embedding=True)


def qwen3_next(llm: LLMConfig, pattern: str = "DE*-DE*-") -> LLMConfig:
    """The decoder with Qwen3-Next's blocks."""
    delta = GatedDelta(key_heads=4, value_heads=8, key_dim=6, value_dim=5)
    llm = qwen3(replace(llm, blocks={**llm.blocks, "D": delta}), "DE*-")
    llm = llm.with_settings("*", rope=RopeConfig(theta=100.0, fraction=0.5), gate=True)
    llm = llm.with_settings("E", shared_inner=24, shared_gate=True)
    return with_pattern(llm, pattern, tied_embedding=False, norm_zero_centred=True)


def qwen3_5(llm: LLMConfig, pattern: str = "D-*-D-*-") -> LLMConfig:
    """The decoder with the blocks of Qwen3.5, dense."""
    return replace(qwen3_next(llm, pattern), tied_embedding=True)


def gpt_oss(llm: LLMConfig, pattern: str = "WE*-WE*-") -> LLMConfig:
    """The decoder with GPT-OSS's blocks, and MLPs of its form."""
    rope = RopeConfig(theta=100.0, scaling="yarn", factor=4.0, original_positions=16, truncate=False)
    llm = llm.with_settings("*", rope=rope, sinks=True, bias=True)
    llm = replace(llm, blocks={**llm.blocks, "W": llm.blocks["*"]}).with_settings("W", window=5)
    llm = llm.with_settings("-E", form="clamped_swiglu", limit=0.8, bias=True)
    llm = llm.with_settings("E", shared_inner=0, router=Router(scores="softmax", bias=True))
    return with_pattern(llm, pattern)


def deepseek(llm: LLMConfig, pattern: str = "L-LEL-LE") -> LLMConfig:
    """The decoder with DeepSeek-V3's blocks, of as many heads as its attention has."""
    latent = replace(LATENT, heads=value_at(llm, "blocks.*.heads"))
    llm = replace(llm, blocks={**llm.blocks, "L": latent}).with_settings("-E", form="swiglu")
    llm = llm.with_settings("E", experts=8, experts_per_token=3)
    llm = with_value(llm, "blocks.E.router", {"groups": 4, "groups_per_token": 2})
    return with_pattern(llm, pattern)


def bamba(llm: LLMConfig, pattern: str = "M-*-M-*-") -> LLMConfig:
    """The decoder with Bamba's blocks."""
    llm = llm.with_settings("M", groups=1).with_settings("-", form="swiglu")
    return with_pattern(llm.with_settings("*", rope=RopeConfig(theta=100.0, fraction=0.5)), pattern)


def granite4(llm: LLMConfig, pattern: str = "ME*-ME*-") -> LLMConfig:
    """The decoder with Granite 4's blocks and multipliers, and all biases that Mamba2 may have."""
    llm = llm.with_settings("M", groups=1, bias=True, conv_bias=False, dt_limit=(0.01, 0.5))
    llm = llm.with_settings("*", scale=0.3).with_settings("-E", form="swiglu")
    llm = llm.with_settings("E", router=Router(scores="softmax"))
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 1.7}
    return with_pattern(llm, pattern, tied_embedding=True, **factors)


def falcon_h1(llm: LLMConfig, pattern: str = "H-H-H-H-", **mamba: Any) -> LLMConfig:
    """The decoder with Falcon-H1's blocks, of the sizes that its blocks have. mamba: other settings of it."""
    attention, own = llm.blocks["*"], llm.blocks["M"]
    assert isinstance(attention, Attention)
    assert isinstance(own, Mamba2)
    block = Parallel(
        self_attention=replace(attention, rope=RopeConfig(theta=1e3)),
        mamba=replace(own, **{"norm": "none", "factors": (0.7, 1.2, 0.8, 1.1, 1.5), **mamba}),
        attention_in=1.3,
        attention_out=0.7,
        mamba_in=0.9,
        mamba_out=1.4,
    )
    llm = replace(llm, blocks={**llm.blocks, "H": block})
    return with_pattern(llm.with_settings("-", form="swiglu", factors=(1.7, 0.6)), pattern)


def lfm2(llm: LLMConfig, pattern: str = "C-*-C-*-") -> LLMConfig:
    """The decoder with LFM2's blocks."""
    llm = qwen3(llm, "*-")
    conv = ShortConv(inner=llm.dim, conv=4, bias=True)
    return with_pattern(replace(llm, blocks={**llm.blocks, "C": conv}), pattern)


def kimi_linear(llm: LLMConfig, pattern: str = "K-LEK-KE") -> LLMConfig:
    """The decoder with Kimi-Linear's blocks, of as many heads as its attention has."""
    heads = value_at(llm, "blocks.*.heads")
    llm = deepseek(
        replace(llm, blocks={**llm.blocks, "K": KimiDelta(heads=heads, head_dim=5, conv=3)}), "KLE-"
    )
    return with_pattern(llm.with_settings("L", rope=RopeConfig(), q_lora_rank=0), pattern)


def olmo_hybrid(llm: LLMConfig, pattern: str = "D-*FD-*F") -> LLMConfig:
    """The decoder with OLMo Hybrid's blocks. One head of keys is shared by all of attention's."""
    llm = qwen3_next(llm, "D*-").with_settings("*", gate=False, joint_norm=True, kv_heads=1, norm_after=True)
    llm = llm.with_settings("D", negative_eigenvalues=True, norm_eps=1e-4)
    llm = replace(llm, blocks={**llm.blocks, "F": replace(value_at(llm, "blocks.-"), norm_after=True)})
    return with_pattern(llm, pattern, norm_zero_centred=False)


HYBRIDS: dict[str, Callable[[LLMConfig], LLMConfig]] = {
    "bamba": bamba,
    "granitemoehybrid": granite4,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": partial(qwen3_next, pattern="DE*EDE*E"),
    "kimi_linear": kimi_linear,
    "olmo_hybrid": olmo_hybrid,
}
"""The change to the blocks of each hybrid family of 2026, by the names of tests/hf/test_hybrids_live.py."""


def mixed(llm: LLMConfig, pattern: str = "DKLWHE*C-") -> LLMConfig:
    """The decoder with all of these families' blocks and options, each once."""
    both = falcon_h1(llm, "H-", norm="before_gate", bias=True, conv_bias=False).blocks["H"]
    delta = KimiDelta(heads=8, head_dim=5, conv=3)
    llm = deepseek(gpt_oss(qwen3_next(llm, "DE*-"), "DWE*-"), "DLWE*-")
    llm = replace(llm, blocks={**llm.blocks, "K": delta})
    llm = llm.with_settings("*WL", rope=replace(LATENT.rope, fraction=0.5))
    llm = llm.with_settings("-E", form="clamped_swiglu").with_settings("E", shared_inner=24)
    llm = llm.with_settings("W-", norm_after=True).with_settings("W", joint_norm=True)
    llm = llm.with_settings("D", negative_eigenvalues=True, norm_eps=1e-4)
    llm = replace(llm, blocks={**llm.blocks, "H": both, "C": ShortConv(inner=llm.dim, conv=4, bias=True)})
    return with_pattern(with_value(llm, "blocks.E.router.scores", "sigmoid"), pattern)
