"""The models whose steps scripts/compile_for_gpu.py compiles, each with an encoder and packed speech."""

from dataclasses import replace

from jaxthd.config import Config, EncoderConfig, LLMConfig, ModelConfig, RopeConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.packing.document import Document
from scripts.check_gpu import ONE_BILLION, TINY

ENCODER = EncoderConfig(
    num_mels=128,
    layers=24,
    dim=1024,
    heads=8,
    ffn_dim=4096,
    subsampling_channels=256,
    linear_bias=False,
    conv_bias=False,
    scale_input=False,
)
"""0.6B parameters: the sizes of Parakeet-TDT-0.6B."""
DENSE = LLMConfig(
    pattern="*-" * 16,
    vocab_size=32768,
    dim=2048,
    q_heads=16,
    kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=1e6),
    qk_norm=True,
    ffn_dim=8192,
    ffn_form="swiglu",
)
HYBRID = LLMConfig(
    pattern="M-M-M*-" * 7,
    vocab_size=131072,
    dim=3072,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    ffn_dim=12288,
    mamba_heads=112,
    mamba_head_dim=64,
    mamba_state=128,
    mamba_groups=8,
)
MIXTURE = replace(
    HYBRID,
    pattern="ME*E",
    dim=2688,
    kv_heads=2,
    mamba_heads=64,
    experts=128,
    experts_per_token=6,
    expert_dim=1856,
    shared_expert_dim=3712,
    router_scale=2.5,
)
"""Nemotron-3 Nano's layers and experts, at a depth whose state one GPU holds."""
MODELS = {
    "tiny": TINY,
    "1b": ONE_BILLION,
    "dense-1b": ModelConfig(encoder=ENCODER, llm=DENSE, adapter_dim=2048),
    "hybrid-4b": ModelConfig(encoder=ENCODER, llm=HYBRID, adapter_dim=2048),
    "moe": ModelConfig(encoder=ENCODER, llm=MIXTURE, adapter_dim=2048),
}


def report_of(documents: list[Document], config: Config) -> BatchReport:
    """That of a step with these documents."""
    tokens, frames = sum(map(len, documents)), sum(d.mel_frames for d in documents)
    supervised = sum(int(d.supervised.sum()) for d in documents)
    row = RowReport(
        row=0,
        documents=len(documents),
        real_tokens=tokens,
        supervised_tokens=supervised,
        capacity_tokens=config.data.capacity,
        audio_seconds=frames / 100,
        imbalance=1.0,
        segments=len(documents),
    )
    return BatchReport((row,), ())
