"""Nemotron-3-Nano-30B-A3B with a 0.6B FastConformer on 32 GPUs: 8 buffers a step, each sharded over 4.

    jaxthd describe configs/nemotron3_nano.py
    jaxthd train configs/nemotron3_nano.py

The first command prints the parameters (31.58B in the decoder, 3.23B of them active per token; 0.61B in the
encoder) and the bytes of the training state: 480 GiB, 15 GiB of it on each device. jaxthd.estimate says what
a step needs and sends besides. The second command reads train.jsonl and validation.jsonl (NeMo manifests) and
the model's tokenizer.json from this file's folder. It has not yet run on a GPU.

Decoder: NVIDIA, Nemotron 3 (2025). Encoder: sizes of Parakeet-TDT-0.6B.
"""

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=8, context=4),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="tokenizer.json",
            rows=8,
            # Speech takes four fifths of a buffer's slots, with eight mel frames in each.
            capacity=16384,
            max_documents=256,
            audio_capacity=106496,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=EncoderConfig(
                num_mels=128,
                layers=24,
                dim=1024,
                heads=8,
                ffn_dim=4096,
                conv_kernel=9,
                subsampling_channels=256,
                linear_bias=False,
                conv_bias=False,
                scale_input=False,
                chunk_seconds=30.0,
            ),
            llm=LLMConfig(
                pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                vocab_size=131072,
                dim=2688,
                q_heads=32,
                kv_heads=2,
                head_dim=128,
                mamba_heads=64,
                mamba_head_dim=64,
                mamba_state=128,
                mamba_groups=8,
                experts=128,
                experts_per_token=6,
                expert_dim=1856,
                shared_expert_dim=3712,
                router_scale=2.5,
            ),
            adapter_dim=4096,
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        train=TrainConfig(
            steps=10000,
            learning_rate=1e-5,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
