"""Preferences (DPO) from the first run's own mistakes: of 8 answers to a recording, the best and the worst.

    jaxthd train configs/dpo.py

It starts from runs/first_run, which is trained first if it is missing (configs/first_run.py, four minutes),
and from 2,000 pairs that are sampled from that model (runs/pairs.jsonl, some five minutes).
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import load_config
from jaxthd.config import Config, TrainConfig


def config() -> Config:
    base = load_config(Path(__file__).with_name("first_run.py"))
    return replace(
        base,
        data=replace(
            base.data,
            manifest=("../runs/pairs.jsonl",),
            # A pair is three segments: the prompt, and two answers that share it.
            max_documents=72,
        ),
        train=TrainConfig(
            before=(
                "train first_run.py --workdir ../runs/first_run",
                "preferences ../runs/first_run --manifest synthetic --out ../runs/pairs.jsonl --items 2000 "
                "--max-new-tokens 24",
            ),
            objective="dpo",
            # Without a share of the likelihood of chosen answers, these became less likely too: 4.9% in place
            # of 3.7% of the words wrong.
            objective_options=("beta=0.1", "sft_weight=1.0"),
            init_from=("../runs/first_run",),
            steps=100,
            learning_rate=1e-5,
            min_learning_rate=1e-6,
            warmup_steps=10,
            validate_every=50,
            validation_batches=64,
            checkpoint_every=50,
        ),
    )
