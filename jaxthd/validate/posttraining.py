"""Objectives that compare answers to one prompt: what cannot be had with them."""

import re
from collections.abc import Iterator
from dataclasses import replace

from jaxthd.config import Config
from jaxthd.config.findings import Finding
from jaxthd.errors import UserError
from jaxthd.objectives import OBJECTIVES, Objective, make_objective
from jaxthd.objectives.answers import draws_answers, needs_mismatched
from jaxthd.objectives.grpo import GRPO
from jaxthd.validate import mesh
from jaxthd.validate.rules import DeviceFacts, found_by


def _objective(config: Config) -> Objective | None:
    """None for an objective that cannot be made: another rule tells."""
    try:
        return make_objective(config.train.objective, config.train.objective_options)
    except UserError:
        return None


def draws(config: Config) -> bool:
    """Whether the objective trains on answers that are drawn."""
    objective = _objective(config)
    return objective is not None and draws_answers(objective)


def _is_policy(config: Config) -> bool:
    return config.train.objective in OBJECTIVES and OBJECTIVES[config.train.objective].is_policy


def _policies(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks what cannot be trained with a policy."""
    if not _is_policy(config):
        return
    if config.depths_trained:
        yield Finding(
            f"train.objective is {config.train.objective!r} with model.llm.mtp_pattern "
            f"{config.model.llm.mtp_pattern!r}",
            "no multi-token prediction, because it would train on the rejected answers too",
            'set model.llm.mtp_pattern to ""',
        )
    if config.train.ctc_loss:
        yield Finding(
            f"train.objective is {config.train.objective!r} with train.ctc_loss {config.train.ctc_loss}",
            "0, because a recording with several answers has no one transcript to align with",
            "set train.ctc_loss to 0.0",
        )
    if not config.rollout.temperature:
        change = "raise rollout.temperature, such as to 1.0"
        found = "rollout.temperature is 0, by which a policy's logits are divided"
        yield Finding(found, "more than 0", change)


def _cached_reference(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that the reference stays the same, and its documents come again."""
    post = config.posttraining
    if post.reference != "cached":
        return
    if post.reference_every:
        yield Finding(
            f'posttraining.reference is "cached" with posttraining.reference_every {post.reference_every}',
            "a reference that stays the same, because its log-probabilities are computed once",
            "set posttraining.reference_every to 0, or posttraining.reference to copy",
        )
    if draws(config):
        yield Finding(
            f'posttraining.reference is "cached" with train.objective {config.train.objective!r}',
            "documents that come again: answers that are drawn do not",
            "set posttraining.reference to auto",
        )
    objective = _objective(config)
    if objective is not None and needs_mismatched(objective):
        yield Finding(
            'posttraining.reference is "cached" with train.objective_options kl=mismatched',
            "documents that come again: mismatched answers change in every epoch",
            "set posttraining.reference to auto",
        )


# --- jaxthd grpo ---


def _groups(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that groups of answers fit, where answers are drawn."""
    if not draws(config):
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
    ranks = config.rollout_mesh.data
    places = rollout.answers_at_once // ranks
    if places < size:
        yield Finding(
            f"rollout.answers_at_once is {rollout.answers_at_once}, {places} for each of {ranks} "
            f"data ranks, with rollout.group_size {size}",
            "a whole group at least, which shares a prompt",
            f"set rollout.answers_at_once to {size * ranks} or more",
        )
    if rollout.updates > rollout.prompts:
        yield Finding(
            f"rollout.updates is {rollout.updates} with rollout.prompts {rollout.prompts}",
            "at most one update for each prompt",
            f"set rollout.updates to {rollout.prompts} or less",
        )
    # Answers to one prompt stay together on a context rank where documents stay whole.
    ranks, most = config.mesh.context, size * rollout.max_new_tokens
    share = config.data.capacity // ranks
    if config.compute.layout == "whole" and ranks > 1 and share < most:
        yield Finding(
            f'a context rank holds {share} token slots with compute.context_layout "whole", and '
            f"rollout.group_size {size} answers of rollout.max_new_tokens "
            f"{rollout.max_new_tokens} take {most} beside their prompt",
            "room for a prompt and its group on one rank; longer groups are skipped",
            f"set data.capacity to more than {most * ranks}, by {ranks} times the longest prompt, lower "
            "rollout.group_size, or set compute.context_layout to buffer",
            is_warning=True,
        )


def _mesh_of_rollouts(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """The rules of a mesh hold for that of rollouts too, whose data ranks each have one row."""
    own = config.rollout.mesh
    if own is None or not draws(config):
        return
    if own.devices != config.mesh.devices:
        yield Finding(
            f"rollout.mesh {own.sizes} is for {own.devices} devices, mesh {config.mesh.sizes} for "
            f"{config.mesh.devices}",
            "the same number, because the same devices draw and train",
            "change a size of rollout.mesh, or leave it out",
        )
        return
    data, train = replace(config.data, rows=own.data), replace(config.train, microbatches=1)
    there = replace(config, mesh=own, data=data, train=train)
    unchecked = replace(device, platform="cpu")  # the devices are those of `mesh`, where they are checked
    for finding in found_by(mesh.RULES, there, unchecked):
        if not finding.is_warning:
            texts = (re.sub(r"\bmesh\.", "rollout.mesh.", text) for text in finding[:3])
            found, expected, change = texts
            yield Finding(f"for rollouts on {own.sizes}, {found}", expected, change)


def _best_by_and_updates(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks what the best checkpoint is chosen by, and the updates of a step."""
    by = config.train.best_by
    if by == "reward" and not (draws(config) and config.rollout.validation_prompts):
        yield Finding(
            f"train.best_by is 'reward' with train.objective {config.train.objective!r} and "
            f"rollout.validation_prompts {config.rollout.validation_prompts}",
            "held-out prompts that are rewarded (jaxthd grpo)",
            "set rollout.validation_prompts, such as to 200, or train.best_by to wer",
        )
    if by == "preferences" and (draws(config) or not _is_policy(config)):
        yield Finding(
            f"train.best_by is 'preferences' with train.objective {config.train.objective!r}",
            "an objective that is trained on preferences",
            "set train.best_by to wer, or train.objective to dpo or kto",
        )
    objective = _objective(config)
    if isinstance(objective, GRPO) and objective.old == "current" and config.updates_of_a_step > 1:
        yield Finding(
            f"old=current with rollout.epochs x rollout.updates = {config.updates_of_a_step}",
            "one update a step, because after the first one the policy is no longer the one that drew",
            "set old=scored in train.objective_options, or both to 1",
        )
    if not draws(config) and config.updates_of_a_step > 1:
        yield Finding(
            f"rollout.epochs x rollout.updates is {config.updates_of_a_step} with train.objective "
            f"{config.train.objective!r}",
            "1, because nothing is drawn",
            "set both to 1, or train.objective to grpo",
        )


RULES = (_policies, _cached_reference, _groups, _mesh_of_rollouts, _best_by_and_updates)
