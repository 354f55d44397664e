"""Reinforcement learning from the first run's weights: fewer words wrong, by a reward alone.

    jaxthd grpo configs/grpo.py

It starts from runs/first_run, which is trained first if it is missing (configs/first_run.py, four minutes).
Each step draws 8 answers to each of 16 recordings, and rewards each with minus its word error rate.
docs/post_training.md compares it with other ways to spend the same time.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, RolloutConfig, TrainConfig


def config() -> Config:
    return replace(
        load_config(Path(__file__).with_name("first_run.py")),
        rollout=RolloutConfig(
            prompts=16,
            group_size=8,
            answers_at_once=128,
            max_new_tokens=24,
            rewards=("wer",),
            # Of this model's groups, two thirds have eight equal rewards: others are drawn in their place.
            dynamic_sampling=3,
        ),
        train=TrainConfig(
            before=("train first_run.py --workdir ../runs/first_run",),
            objective="grpo",
            init_from=("../runs/first_run",),
            steps=100,
            # With 3e-4 the word error rate doubles before it falls again; with 1e-4 it stays as it is.
            learning_rate=3e-5,
            warmup_steps=5,
            validate_every=50,
            validation_batches=64,
            checkpoint_every=25,
        ),
    )
