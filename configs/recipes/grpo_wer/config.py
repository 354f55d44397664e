r"""GRPO on the word error rate: the half-trained base learns from rewards of its own answers.

    jaxthd grpo configs/recipes/grpo_wer/config.py --train.init-from runs/recipes/base@450 \
        --workdir runs/recipes/grpo_wer
    jaxthd evaluate runs/recipes/grpo_wer --guard english --contamination

Each step draws 8 answers to each of 16 recordings; the reward of an answer is minus its word error rate. The
transcripts serve for nothing else. The finished base leaves less to learn: most of its answers are right,
and equal rewards teach nothing (docs/post_training.md).
configs/recipes/README.md has the record.
"""

from dataclasses import replace
from pathlib import Path

from jaxthd import Config, load_config


def config() -> Config:
    base = load_config(Path(__file__).parents[1] / "base" / "config.py")
    grpo = load_config(Path(__file__).parents[2] / "grpo.py")
    return replace(base, rollout=grpo.rollout, train=replace(grpo.train, before=(), init_from=()))
