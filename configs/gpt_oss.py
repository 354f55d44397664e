"""GPT-OSS-20B with a 0.6B FastConformer on 32 GPUs: 32 buffers a step, each on one GPU. LoRA on the LLM.

    jaxthd describe configs/gpt_oss.py
    jaxthd train configs/gpt_oss.py

The first command prints the parameters (20.9B in the decoder, of which a token uses 3.6B; 0.61B in the
encoder) and the bytes of the training state. The second command starts from published weights: it reads the
folder gpt-oss-20b, whose MXFP4 matrices are decoded as they are read, and the archive encoder.nemo,
train.jsonl and validation.jsonl (NeMo manifests), all in this file's folder. It has not yet run on a GPU.

Decoder: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card (2025). Encoder: sizes of Parakeet-TDT-0.6B.
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
from jaxthd.models.blocks import Attention, MoE, Router


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=32),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="gpt-oss-20b",
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
                pattern="WE*E" * 12,
                vocab_size=201088,
                dim=2880,
                norm_eps=1e-5,
                blocks={
                    "W": Attention(
                        heads=64,
                        kv_heads=8,
                        head_dim=64,
                        rope=RopeConfig(
                            theta=150000.0,
                            scaling="yarn",
                            factor=32.0,
                            original_positions=4096,
                            truncate=False,
                        ),
                        window=128,
                        sinks=True,
                        bias=True,
                    ),
                    "*": Attention(
                        heads=64,
                        kv_heads=8,
                        head_dim=64,
                        rope=RopeConfig(
                            theta=150000.0,
                            scaling="yarn",
                            factor=32.0,
                            original_positions=4096,
                            truncate=False,
                        ),
                        sinks=True,
                        bias=True,
                    ),
                    "E": MoE(
                        form="clamped_swiglu",
                        bias=True,
                        experts=32,
                        experts_per_token=4,
                        inner=2880,
                        shared_inner=0,
                        router=Router(scores="softmax", bias=True),
                    ),
                },
            ),
        ),
        adapt=AdaptConfig(
            freeze=("decoder.*", "embedding", "head"),
            lora_rank=128,
            lora_targets=("decoder.*.q", "decoder.*.v"),
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        train=TrainConfig(
            init_from=("gpt-oss-20b", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-4,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
