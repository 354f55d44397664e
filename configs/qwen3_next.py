"""Qwen3-Next-80B-A3B with a 0.6B FastConformer on 64 GPUs: 16 buffers a step, each sharded over 4.

    jaxthd describe configs/qwen3_next.py
    jaxthd estimate configs/qwen3_next.py
    jaxthd train configs/qwen3_next.py

The first command prints the parameters (79.67B in the decoder, 3.56B of them active per token with the head's
0.31B; 0.61B in the encoder) and the bytes of the training state, the second one what a step needs and sends.
The third one reads the folder qwen3-next-80b-a3b, train.jsonl and validation.jsonl (NeMo manifests) from this
file's folder. It has not yet run on a GPU.

Decoder: Qwen team, Qwen3-Next-80B-A3B (2025), without its multi-token prediction. Encoder: sizes of
Parakeet-TDT-0.6B.
"""

from pathlib import Path

from jaxthd import load_config
from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from jaxthd.models.blocks import Attention, GatedDelta, MoE, Router


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=16, context=4),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="qwen3-next-80b-a3b",
            template="chat_template",
            rows=16,
            # Speech takes four fifths of a buffer's slots, with eight mel frames in each.
            capacity=16384,
            max_documents=256,
            audio_capacity=106496,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=load_config(Path(__file__).with_name("nemotron3_nano.py")).model.encoder,
            llm=LLMConfig(
                pattern="DEDEDE*E" * 12,
                vocab_size=151936,
                dim=2048,
                norm_eps=1e-6,
                norm_zero_centred=True,
                blocks={
                    "*": Attention(
                        heads=16,
                        kv_heads=2,
                        head_dim=256,
                        rope=RopeConfig(theta=1e7, fraction=0.25),
                        qk_norm=True,
                        gate=True,
                    ),
                    "E": MoE(
                        form="swiglu",
                        experts=512,
                        experts_per_token=10,
                        inner=512,
                        shared_inner=512,
                        shared_gate=True,
                        router=Router(scores="softmax"),
                    ),
                    "D": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4),
                },
            ),
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        train=TrainConfig(
            init_from=("qwen3-next-80b-a3b", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-5,
            warmup_steps=500,
            aux_loss=0.001,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
