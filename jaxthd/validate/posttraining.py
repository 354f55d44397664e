"""Objectives that compare answers to one prompt: what cannot be had with them."""

from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.objectives import make_objective
from jaxthd.objectives.answers import compares_answers
from jaxthd.objectives.grpo import ADVANTAGE
from jaxthd.validate.rules import DeviceFacts, Finding, Group

RULES = Group()


@RULES.rule("train.objective", "train.mtp_loss", "model.llm.mtp_pattern")
def _mtp_with_answers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if compares_answers(config.train.objective) and config.depths_trained:
        yield Finding(
            f"train.objective is {config.train.objective!r} with model.llm.mtp_pattern "
            f"{config.model.llm.mtp_pattern!r}",
            "no multi-token prediction, because it would train on the rejected answers too",
            'set model.llm.mtp_pattern to ""',
        )


@RULES.rule("train.objective", "train.ctc_loss")
def _ctc_with_answers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if compares_answers(config.train.objective) and config.train.ctc_loss:
        yield Finding(
            f"train.objective is {config.train.objective!r} with train.ctc_loss {config.train.ctc_loss}",
            "0, because a recording with several answers has no one transcript to align with",
            "set train.ctc_loss to 0.0",
        )


# --- jaxthd grpo ---


def _draws(config: Config) -> bool:
    """Whether the objective trains on answers that are drawn. False for one that cannot be made."""
    try:
        return ADVANTAGE in make_objective(config.train.objective, config.train.objective_options).extras
    except UserError:
        return False


@RULES.rule("train.objective", "rollout", "data.max_documents", "posttraining.share_prompts")
def _groups(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if not _draws(config):
        return
    rollout, size = config.rollout, config.rollout.group_size
    segments = size + config.posttraining.share_prompts
    if config.data.max_documents < segments:
        yield Finding(
            f"data.max_documents is {config.data.max_documents} with rollout.group_size {size}",
            f"{segments} or more, because each answer counts, and a shared prompt",
            f"set data.max_documents to {4 * segments}, for four groups in a buffer, or lower "
            "rollout.group_size",
        )
    places = rollout.answers_at_once // config.mesh.data
    if places < size:
        yield Finding(
            f"rollout.answers_at_once is {rollout.answers_at_once}, {places} for each of {config.mesh.data} "
            f"data ranks, with rollout.group_size {size}",
            "a whole group at least, which shares a prompt",
            f"set rollout.answers_at_once to {size * config.mesh.data} or more",
        )
    if rollout.updates > rollout.prompts:
        yield Finding(
            f"rollout.updates is {rollout.updates} with rollout.prompts {rollout.prompts}",
            "at most one update for each prompt",
            f"set rollout.updates to {rollout.prompts} or less",
        )


@RULES.rule("train.objective", "rollout.temperature")
def _temperature(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if _draws(config) and not config.rollout.temperature:
        change = "raise rollout.temperature, such as to 1.0"
        yield Finding("rollout.temperature is 0, which draws equal answers", "more than 0", change)


@RULES.rule("train.objective", "rollout.epochs", "rollout.updates")
def _updates(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    if not _draws(config) and config.updates_of_a_step > 1:
        yield Finding(
            f"rollout.epochs x rollout.updates is {config.updates_of_a_step} with train.objective "
            f"{config.train.objective!r}",
            "1, because nothing is drawn",
            "set both to 1, or train.objective to grpo",
        )
