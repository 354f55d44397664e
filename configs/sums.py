"""Reinforcement learning without transcripts: recordings such as "three plus five", rewarded for their sum.

    python -m jaxthd.grpo --config configs/sums.py

No line of the training data says what is spoken or what to answer: each has a recording and its `answer`, a
number that only the reward function `equals` reads (docs/post_training.md).

A reward teaches what a policy sometimes does right already. So the start is supervised: runs/first_run hears
digits (configs/first_run.py, four minutes), and runs/sums_start (a minute) continues it on its transcripts
and on 300 sums with their answers in words. Both are made if they are missing.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd.config import Config, RolloutConfig, TrainConfig
from jaxthd.files.config_file import load_config

START = (
    "train first_run.py --workdir ../runs/sums_start --train.init-from ../runs/first_run "
    "--data.manifest synthetic synthetic:sums-answered --data.weights 1 1 --train.ctc-loss 0 "
    "--train.steps 100 --train.learning-rate 5e-4 --train.warmup-steps 10 --train.validate-every 0"
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
            tokens_at_once=4,
            rewards=("equals",),
            reward_options=("equals.field=answer",),
            validation_prompts=500,
        ),
        train=TrainConfig(
            before=("train first_run.py --workdir ../runs/first_run", START),
            objective="grpo",
            init_from=("../runs/sums_start",),
            steps=100,
            learning_rate=1e-4,
            warmup_steps=5,
            validate_every=25,
            validation_batches=1,  # there is no transcript to compare with
            max_new_tokens=0,
            checkpoint_every=25,
        ),
    )
