"""The tiny models that are compared on all meshes: one with all four mixers, experts and audio; and decoders
with the blocks of published families."""

from dataclasses import replace
from typing import Any

from jaxthd.config import (
    AdaptConfig,
    BlockSizes,
    ComputeConfig,
    DeltaConfig,
    EncoderConfig,
    LatentAttentionConfig,
    LLMConfig,
    ModelConfig,
    RopeConfig,
)
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE, Router

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
QWEN3: dict[str, Any] = {
    "pattern": "*E*-*E*-",
    "rope": RopeConfig(theta=100.0),
    "qk_norm": True,
    "ffn_form": "swiglu",
    "tied_embedding": True,
    "router": "softmax",
    "router_scale": 1.0,
    "shared_expert_dim": 0,
}
"""A decoder with Qwen3's blocks."""
QWEN3_NEXT: dict[str, Any] = {
    **QWEN3,
    "pattern": "DE*-DE*-",
    "rope": RopeConfig(theta=100.0, fraction=0.5),
    "tied_embedding": False,
    "norm_zero_centred": True,
    "attention_gate": True,
    "delta": DeltaConfig(key_heads=4, value_heads=8, key_dim=6, value_dim=5),
    "shared_expert_dim": 24,
    "shared_expert_gate": True,
}
"""A decoder with Qwen3-Next's blocks."""
GPT_OSS: dict[str, Any] = {
    "pattern": "WE*-WE*-",
    "window": 5,
    "attention_sinks": True,
    "attention_bias": True,
    "rope": RopeConfig(theta=100.0, scaling="yarn", factor=4.0, original_positions=16, truncate=False),
    "ffn_form": "clamped_swiglu",
    "swiglu_limit": 0.8,
    "ffn_bias": True,
    "router": "softmax",
    "router_bias": True,
    "router_scale": 1.0,
    "shared_expert_dim": 0,
}
"""A decoder with GPT-OSS's blocks, and MLPs of its form."""
DEEPSEEK: dict[str, Any] = {
    "pattern": "L-LEL-LE",
    "rope": RopeConfig(
        theta=100.0, scaling="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=0.7
    ),
    "ffn_form": "swiglu",
    "experts": 8,
    "experts_per_token": 3,
    "router_groups": 4,
    "router_groups_per_token": 2,
    "latent_attention": LatentAttentionConfig(
        q_lora_rank=9, kv_lora_rank=10, qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=7
    ),
}
"""A decoder with DeepSeek-V3's blocks."""
MIXED: dict[str, Any] = {
    **QWEN3_NEXT,
    **GPT_OSS,
    **DEEPSEEK,
    "pattern": "DLWE*-",
    "shared_expert_dim": 24,
    "rope": replace(DEEPSEEK["rope"], fraction=0.5),
    "ffn_form": "clamped_swiglu",
    "router": "sigmoid",
}
"""A decoder with all of these families' blocks and options, each once."""
