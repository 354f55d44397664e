"""The built-in reward functions by name, and the functions that the settings of a run ask for."""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.rl.rewards.form import form, length, overlong
from jaxthd.rl.rewards.group import Reward
from jaxthd.rl.rewards.transcripts import cer, exact, insertions, wer
from jaxthd.rl.rewards.values import equals

BUILT_IN: dict[str, Reward] = {
    "wer": wer,
    "cer": cer,
    "insertions": insertions,
    "exact": exact,
    "format": form,
    "length": length,
    "overlong": overlong,
    "equals": equals,
}
"""Names that rollout.rewards takes, beside dotted paths -> functions."""


class RewardSetting(NamedTuple):
    """One function of rollout.rewards. It is sent to worker processes, which find the function.

    options: its settings as given in rollout.reward_options, by name. defaults: values that the run's config
    has for settings of built-in functions.
    """

    name: str
    weight: float
    options: Mapping[str, str]
    defaults: Mapping[str, Any]

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of BUILT_IN; else a user's."""
        return self.name in BUILT_IN


def reward_settings(config: Config) -> tuple[RewardSetting, ...]:
    """The functions that rollout.rewards and rollout.reward_options ask for, in that order.

    Raises UserError for an unknown name, a name given twice, a weight that is not a number, and an option
    that belongs to no function of the run. Dotted paths and options' values are checked by the worker
    processes, which import the functions.
    """
    weights: dict[str, float] = {}
    for entry in config.rollout.rewards:
        name, mark, text = entry.partition("=")
        if name in weights:
            raise UserError(
                f"rollout.rewards names {name!r} twice; expected each function once: remove one, or give a "
                "second function of your own that calls it"
            )
        _check_name(name)
        weights[name] = _weight(entry, text) if mark else 1.0
    if not weights:
        raise UserError(
            f"rollout.rewards is empty; expected functions such as {', '.join(BUILT_IN)}: add one"
        )
    options = _options(config.rollout.reward_options, list(weights))
    defaults = {"normaliser": config.train.normaliser, "max_tokens": config.rollout.max_new_tokens}
    return tuple(RewardSetting(name, weight, options[name], defaults) for name, weight in weights.items())


def _check_name(name: str) -> None:
    parts = name.split(".")
    if name in BUILT_IN or (len(parts) > 1 and all(part.isidentifier() for part in parts)):
        return
    close = get_close_matches(name, BUILT_IN)
    raise UserError(
        f"rollout.rewards has {name!r}; expected one of {', '.join(BUILT_IN)}, or the dotted path of a "
        "Python function such as my_rewards.politeness"
        + (f"; perhaps you meant {' or '.join(close)}" if close else "")
        + ": correct rollout.rewards"
    )


def _weight(entry: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(
            f"rollout.rewards has {entry!r}, whose weight is no finite number; expected NAME or NAME=WEIGHT, "
            "such as wer=0.5: correct rollout.rewards"
        )
    return weight


def _options(given: tuple[str, ...], names: list[str]) -> dict[str, dict[str, str]]:
    """The settings of each function, by name."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for option in given:
        target, mark, text = option.partition("=")
        name, _, setting = target.rpartition(".")
        if not mark or name not in found or not setting.isidentifier():
            close = get_close_matches(name, names, n=1)
            raise UserError(
                f"rollout.reward_options has {option!r}; expected NAME.SETTING=VALUE, where NAME is one of "
                f"rollout.rewards ({', '.join(names)})"
                + (f"; perhaps you meant {close[0]}" if close and close[0] != name else "")
                + ": correct rollout.reward_options"
            )
        found[name][setting] = text
    return found
