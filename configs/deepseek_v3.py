"""DeepSeek-V3 with a 0.6B FastConformer on 256 GPUs: 64 buffers a step, each sharded over 4; an expert of
each layer on each GPU. LoRA on the LLM's attention.

    jaxthd describe configs/deepseek_v3.py
    jaxthd train configs/deepseek_v3.py

The first command prints the parameters (671.03B in the decoder, 36.63B of them active per token, and LoRA's
388M; 0.61B in the encoder) and the bytes of the training state. The second command starts from published
weights, whose block-scaled FP8 is decoded as it is read: it reads the folder deepseek-v3 and the archive
encoder.nemo, train.jsonl and validation.jsonl (NeMo manifests), all in this file's folder. It has not yet run
on a GPU.

Decoder: DeepSeek-AI, DeepSeek-V3 Technical Report (2024). Encoder: sizes of Parakeet-TDT-0.6B.
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
        mesh=MeshConfig(data=64, context=4),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer="deepseek-v3",
            template="chat_template",
            rows=64,
            capacity=8192,
            max_documents=128,
            audio_capacity=53248,
            packing_bins=16,
        ),
        model=ModelConfig(
            encoder=load_config(Path(__file__).with_name("nemotron3_nano.py")).model.encoder,
            llm=LLMConfig(
                pattern=3 * "L-" + 58 * "LE",
                vocab_size=129280,
                dim=7168,
                norm_eps=1e-6,
                blocks={
                    "L": LatentAttention(
                        heads=128,
                        rope=RopeConfig(
                            theta=1e4,
                            scaling="yarn",
                            factor=40.0,
                            original_positions=4096,
                            mscale=1.0,
                            mscale_all_dim=1.0,
                        ),
                        q_lora_rank=1536,
                        kv_lora_rank=512,
                        qk_nope_head_dim=128,
                        qk_rope_head_dim=64,
                        v_head_dim=128,
                    ),
                    "-": MLP(inner=18432, form="swiglu"),
                    "E": MoE(
                        form="swiglu",
                        experts=256,
                        experts_per_token=8,
                        inner=2048,
                        shared_inner=2048,
                        router=Router(groups=8, groups_per_token=4, scale=2.5),
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
            init_from=("deepseek-v3", "encoder.nemo"),
            steps=10000,
            learning_rate=1e-4,
            warmup_steps=500,
            min_learning_rate=1e-6,
            validate_every=500,
            checkpoint_every=500,
        ),
    )
