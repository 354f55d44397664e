"""Whether a setting that is changed as a run is continued has an effect on the steps to come."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.run_folder import Difference
from jaxthd.steps.optimizer import learning_rate_schedule

SCHEDULE = (
    "train.learning_rate",
    "train.schedule",
    "train.warmup_steps",
    "train.decay_steps",
    "train.min_learning_rate",
)
"""Settings whose only effect is the learning rate of each step."""


def _has_experts(config: Config) -> bool:
    return any(block.routes for _, block in config.model.llm.each_block)


NEEDS: dict[str, tuple[Callable[[Config], Any], str]] = {
    "train.router_bias_rate": (
        lambda config: any(block.evens_load for _, block in config.model.llm.each_block),
        "the model has no experts with correction biases",
    ),
    "train.aux_loss": (_has_experts, "the model has no experts"),
    "train.mtp_loss": (
        lambda config: config.model.llm.mtp_pattern,
        "the model has no multi-token prediction (model.llm.mtp_pattern)",
    ),
    "train.ctc_loss": (lambda config: config.model.encoder, "the model has no encoder"),
    "train.ctc_max_labels": (lambda config: config.train.ctc_loss, "train.ctc_loss is 0"),
}
"""Settings of the optimization that some runs do not read: (whether this one does, why it does not)."""


def require_effect(
    workdir: Path, changes: Sequence[Difference], there: Config, here: Config, step: int
) -> None:
    """Raises UserError for changed settings that change nothing after `step`, the last one done.

    there: the run's settings so far. here: those that it is continued with.
    """
    reasons = {x.name: why for x in changes if (why := _why_without(x.name, there, here, step))}
    if not reasons:
        return
    lines = "".join(
        f"\n  {x.name}: {x.there} in the run, {x.here} now ({reasons[x.name]})"
        for x in changes
        if x.name in reasons
    )
    raise UserError(
        f"{workdir} has done {step} steps, and these changes would do nothing from there on:{lines}\n"
        f"Leave them out; or start a new run from its weights: --workdir NEW --train.init-from {workdir}"
    )


def _why_without(name: str, there: Config, here: Config, step: int) -> str:
    """Why the change of a setting has no effect after `step`; "" where it has one."""
    if name in NEEDS:
        is_read, why = NEEDS[name]
        return "" if is_read(here) else why
    if name in SCHEDULE:
        field = name.partition(".")[2]
        before = replace(here, train=replace(here.train, **{field: getattr(there.train, field)}))
        same = np.array_equal(_rates(before, step), _rates(here, step))
        return "the learning rates of all steps to come are the same without it" if same else ""
    if name == "train.profile" and here.train.profile_window and here.train.profile_window[1] <= step:
        return f"steps up to {here.train.profile_window[1]} are done"
    return ""


def _rates(config: Config, step: int) -> np.ndarray:
    """The learning rates of the steps after `step`."""
    first_updates = np.arange(step, config.train.steps) * config.updates_of_a_step
    return np.asarray(learning_rate_schedule(config)(first_updates))
