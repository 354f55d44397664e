"""Nemotron-3.5-Transcribe-30B-A4B, adapted by LoRA on 8 GPUs: speech recognition with speakers.

    jaxthd describe configs/transcribe.py
    jaxthd estimate configs/transcribe.py
    jaxthd train configs/transcribe.py

The folder of the published model lies beside this file, as do train.jsonl and validation.jsonl (NeMo
manifests, whose transcripts may hold <spk:N>). Encoder and adapter stay float32, as published; the diarizer
and the head for word times do not train. Of all parameters on 64 GPUs:

    jaxthd train configs/transcribe.py --adapt.lora-rank 0 --mesh.data 64 --data.rows 64

docs/adapting.md has what each of them needs. It has not yet run on a GPU.

Source: NVIDIA, Nemotron 3.5 Transcribe (2026), its config.json.
"""

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
from jaxthd.models.front_ends import Transcribe
from jaxthd.models.front_ends.transcribe.settings import Diarizer, WordTimes

FOLDER = "NVIDIA-Nemotron-3.5-Transcribe-30B-A4B"


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=8),
        data=DataConfig(
            manifest=("train.jsonl",),
            validation_manifest="validation.jsonl",
            tokenizer=FOLDER,
            template="chat_template",
            template_options='{"enable_thinking": false}',
            prompt="Audio transcription. Language: as spoken. Wording: verbatim, including fillers and "
            "repetitions. Formatting: punctuation and capitalization. Output: transcript only.{audio}",
            rows=8,
            capacity=8192,
            max_documents=128,
            audio_capacity=49152,
        ),
        model=ModelConfig(
            encoder=Transcribe(
                layers=32,
                dim=1280,
                heads=10,
                head_dim=128,
                ffn_dim=5120,
                diarizer=Diarizer(layers=31, dim=512, heads=8, head_dim=64, ffn_dim=2048, head_inner=192),
                word_times=WordTimes(classes=23863, blank=23862, heads=16, head_dim=80, ffn_dim=640),
            ),
            llm=LLMConfig(
                pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                vocab_size=131072,
                dim=2688,
                blocks={
                    "*": Attention(heads=32, kv_heads=2, head_dim=128),
                    "M": Mamba2(heads=64, head_dim=64, state=128, groups=8),
                    "E": MoE(
                        experts=128,
                        experts_per_token=6,
                        inner=1856,
                        shared_inner=3712,
                        router=Router(scale=2.5),
                    ),
                },
            ),
            adapter_bias=True,
        ),
        compute=ComputeConfig(dtype="bfloat16"),
        adapt=AdaptConfig(
            lora_rank=32, lora_alpha=64.0, lora_targets=("decoder.layers.*",), freeze=("encoder.*",)
        ),
        train=TrainConfig(
            steps=5000,
            learning_rate=2e-4,
            warmup_steps=200,
            init_from=(FOLDER,),
            validate_every=500,
            checkpoint_every=500,
        ),
    )
