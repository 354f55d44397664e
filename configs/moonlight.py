"""Moonlight-16B-A3B with a 0.6B FastConformer on 32 GPUs: 8 buffers a step, each sharded over 4. LoRA on the
LLM's attention.

    jaxthd describe configs/moonlight.py
    jaxthd train configs/moonlight.py

The first command prints the parameters (15.96B in the decoder, 2.58B of them active per token, and LoRA's
28M; 0.61B in the encoder) and the bytes of the training state. The second command starts from published
weights: it reads the folder moonlight-16b-a3b and the archive encoder.nemo, train.jsonl and validation.jsonl
(NeMo manifests), all in this file's folder. It has not yet run on a GPU.

Decoder: Moonshot AI, Muon is Scalable for LLM Training (2025). Encoder: sizes of Parakeet-TDT-0.6B.
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
from jaxthd.models.blocks import MLP, LatentAttention, MoE, Router


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=8, context=4),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="moonlight-16b-a3b",
            template="chat_template",
            rows=8,
            capacity=16384,
            max_documents=256,
            audio_capacity=106496,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=load_config(Path(__file__).with_name("nemotron3_nano.py")).model.encoder,
            llm=LLMConfig(
                pattern="L-" + 26 * "LE",
                vocab_size=163840,
                dim=2048,
                norm_eps=1e-5,
                blocks={
                    "L": LatentAttention(
                        heads=16,
                        rope=RopeConfig(theta=5e4),
                        kv_lora_rank=512,
                        qk_nope_head_dim=128,
                        qk_rope_head_dim=64,
                        v_head_dim=128,
                    ),
                    "-": MLP(inner=11264, form="swiglu"),
                    "E": MoE(
                        form="swiglu",
                        experts=64,
                        experts_per_token=6,
                        inner=1408,
                        shared_inner=2816,
                        router=Router(scale=2.446),
                    ),
                },
            ),
        ),
        adapt=AdaptConfig(
            freeze=("decoder.*", "embedding", "head"),
            lora_rank=64,
            lora_targets=("decoder.layers.latent_attention.*",),
        ),
        # Context ranks then exchange latents, a fraction of the keys and values that they are expanded to.
        compute=ComputeConfig(dtype="bfloat16", context_exchange="all_gather"),
        train=TrainConfig(
            init_from=("moonlight-16b-a3b", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-4,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
