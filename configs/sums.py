"""Reinforcement learning without transcripts: recordings such as "three plus five", rewarded for their sum.

    jaxthd grpo configs/sums.py

No line of the training data says what is spoken or what to answer: each has a recording and its `answer`, a
number that only the reward function `equals` reads (docs/post_training.md).

A reward teaches what a policy sometimes does right already. So the start is supervised: runs/first_run hears
digits (configs/first_run.py, four minutes), and runs/sums_start (two minutes) continues it on its transcripts
and on 500 sums with their answers in words. Both are made if they are missing. The greedy answer to a third
of the held-out recordings is then right, and 100 steps of rewards raise that to about a half. These
recordings are in voices that no training data has; the hundred sums are the same.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, RolloutConfig, TrainConfig

START = (
    "train first_run.py --workdir ../runs/sums_start --train.init-from ../runs/first_run "
    "--data.manifest synthetic synthetic:sums-answered --data.weights 1 3 --train.ctc-loss 0 "
    "--train.steps 200 --train.learning-rate 1e-3 --train.warmup-steps 10 --train.validate-every 0 "
    "--train.checkpoint-every 50 --train.keep-checkpoints 2"
)


def config() -> Config:
    base = load_config(Path(__file__).with_name("first_run.py"))
    return replace(
        base,
        data=replace(
            base.data,
            manifest=("synthetic:sums",),
            validation_manifest="synthetic:sums",
            max_documents=96,  # a group is nine segments of some 55 slots together
        ),
        rollout=RolloutConfig(
            prompts=32,
            group_size=8,
            answers_at_once=128,
            # The longest answer is two digits and the end.
            max_new_tokens=6,
            rewards=("equals",),
            reward_options=("equals.field=answer",),
            validation_prompts=500,
        ),
        train=TrainConfig(
            before=("train first_run.py --workdir ../runs/first_run", START),
            objective="grpo",
            # Before its end: a start that is sure of its answers draws the same ones again and again.
            init_from=("../runs/sums_start@150",),
            steps=100,
            learning_rate=3e-4,
            warmup_steps=10,
            best_by="reward",
            validate_every=50,
            validation_batches=1,  # there is no transcript to compare with
            max_new_tokens=0,
            checkpoint_every=50,
        ),
    )
