"""Granite-4.0-H-Tiny with a 0.6B FastConformer on 16 GPUs: 4 buffers a step, each over 4. LoRA on the LLM.

    jaxthd describe configs/granite4.py
    jaxthd estimate configs/granite4.py --no-compile
    jaxthd train configs/granite4.py

The first command prints the parameters (6.94B in the decoder, whose head is its embedding, and 0.09B of LoRA;
0.61B in the encoder), the second one what a step needs and sends. The third one starts from published
weights: it reads the folder granite-4.0-h-tiny and the archive encoder.nemo, train.jsonl and validation.jsonl
(NeMo manifests), all in this file's folder. It has not yet run on a GPU.

Decoder: IBM, Granite 4.0 (2025). Encoder: sizes of Parakeet-TDT-0.6B.
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
    TrainConfig,
)
from jaxthd.models.blocks import Attention, Mamba2, MoE, Router


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=4, context=4),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="granite-4.0-h-tiny",
            template="chat_template",
            rows=4,
            capacity=16384,
            max_documents=256,
            audio_capacity=106496,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=load_config(Path(__file__).with_name("nemotron3_nano.py")).model.encoder,
            llm=LLMConfig(
                pattern="MEMEMEMEME*EMEMEMEME" * 4,
                vocab_size=100352,
                dim=1536,
                blocks={
                    "M": Mamba2(heads=48, head_dim=64, state=128, groups=1),
                    "*": Attention(heads=12, kv_heads=4, head_dim=128, scale=0.0078125),
                    "E": MoE(
                        experts=64,
                        experts_per_token=6,
                        inner=512,
                        form="swiglu",
                        shared_inner=1024,
                        router=Router(scores="softmax"),
                    ),
                },
                tied_embedding=True,
                embedding_multiplier=12.0,
                residual_multiplier=0.22,
                logits_scaling=6.0,
            ),
        ),
        adapt=AdaptConfig(
            freeze=("decoder.*", "embedding"),
            lora_rank=128,
            lora_targets=("decoder.*.q", "decoder.*.v", "decoder.*.mamba.mixer.*"),
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        train=TrainConfig(
            init_from=("granite-4.0-h-tiny", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-4,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
