"""The config of the runs that faults are injected into: a tiny model on ragged noise, a program of seconds.

Used as a config file (jaxthd train tests/survival/tiny.py): it imports nothing but jaxthd.
"""

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.models.blocks import Attention, Mamba2

STEPS, GRPO_STEPS = 60, 16
GRPO = (
    f"--train.objective grpo --train.steps {GRPO_STEPS} --train.learning-rate 1e-2 "
    "--posttraining.reference-every 5 --train.checkpoint-every 2 --train.validate-every 8 "
    "--rollout.prompts 4 --rollout.group-size 3 --rollout.answers-at-once 12 "
    "--rollout.max-new-tokens 6 --rollout.temperature 0.9 --rollout.top-p 0.95 --rollout.updates 2 "
    "--rollout.rewards length wer=0.5 --rollout.dynamic-sampling 2"
)
"""Settings of a run of jaxthd grpo."""


def config() -> Config:
    """60 steps with a checkpoint after every fifth and a validation after every fifteenth."""
    return Config(
        data=DataConfig(
            manifest=("manifest.jsonl",),
            validation_manifest="held_out.jsonl",
            rows=2,
            capacity=128,
            max_documents=8,
            audio_capacity=320,
            packing_bins=2,
            workers=1,
        ),
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
            ),
            llm=LLMConfig(
                pattern="M*",
                dim=16,
                blocks={
                    "*": Attention(heads=2, kv_heads=1, head_dim=8),
                    "M": Mamba2(heads=2, head_dim=8, state=8, groups=1),
                },
            ),
        ),
        compute=ComputeConfig(block_sizes=BlockSizes(attention=32, loss=32)),
        train=TrainConfig(
            steps=STEPS, warmup_steps=2, checkpoint_every=5, validate_every=15, max_new_tokens=8, trackers=()
        ),
    )
