"""Qwen3-1.7B with a 0.6B FastConformer on 32 GPUs: 32 buffers a step, each on one GPU. LoRA on the LLM.

    jaxthd describe configs/qwen3.py
    jaxthd train configs/qwen3.py

The first command prints the parameters (1.72B in the decoder, whose head is its embedding; 0.61B in the
encoder) and the bytes of the training state. The second command starts from published weights: it reads the
folder qwen3-1.7b and the archive encoder.nemo, train.jsonl and validation.jsonl (NeMo manifests), all in this
file's folder. It has not yet run on a GPU.

Decoder: Qwen team, Qwen3 Technical Report (2025). Encoder: sizes of Parakeet-TDT-0.6B.
"""

from pathlib import Path

from jaxthd import load_config
from jaxthd.config import (
    AdaptConfig,
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from jaxthd.models.blocks import MLP, Attention


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=32),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="qwen3-1.7b",
            template="chat_template",
            rows=32,
            capacity=8192,
            max_documents=128,
            audio_capacity=53248,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=load_config(Path(__file__).with_name("nemotron3_nano.py")).model.encoder,
            llm=LLMConfig(
                pattern="*-" * 28,
                vocab_size=151936,
                dim=2048,
                norm_eps=1e-6,
                blocks={
                    "*": Attention(
                        heads=16, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6), qk_norm=True
                    ),
                    "-": MLP(inner=6144, form="swiglu"),
                },
                tied_embedding=True,
            ),
        ),
        adapt=AdaptConfig(
            freeze=("decoder.*", "embedding"), lora_rank=128, lora_targets=("decoder.*.q", "decoder.*.v")
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        train=TrainConfig(
            init_from=("qwen3-1.7b", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-4,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
