"""Objectives that compare answers to one prompt: what cannot be had with them."""

from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.objectives import OBJECTIVES
from jaxthd.validate.rules import DeviceFacts, Finding, Group

RULES = Group()


def _is_policy(config: Config) -> bool:
    return config.train.objective in OBJECTIVES and OBJECTIVES[config.train.objective].is_policy


@RULES.rule("train.objective", "train.mtp_loss", "model.llm.mtp_pattern")
def _mtp_with_answers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if _is_policy(config) and config.depths_trained:
        yield Finding(
            f"train.objective is {config.train.objective!r} with model.llm.mtp_pattern "
            f"{config.model.llm.mtp_pattern!r}",
            "no multi-token prediction, because it would train on the rejected answers too",
            'set model.llm.mtp_pattern to ""',
        )


@RULES.rule("train.objective", "train.ctc_loss")
def _ctc_with_answers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if _is_policy(config) and config.train.ctc_loss:
        yield Finding(
            f"train.objective is {config.train.objective!r} with train.ctc_loss {config.train.ctc_loss}",
            "0, because a recording with several answers has no one transcript to align with",
            "set train.ctc_loss to 0.0",
        )
