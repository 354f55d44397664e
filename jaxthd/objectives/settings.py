"""Checks of settings that are given as NAME=VALUE: an objective's, an optimizer's (files/options.py)."""

import math
from typing import Any

from jaxthd.errors import UserError

OPTIONS = "train.objective_options"


def refuse(found: str, expected: str, change: str = "", setting: str = OPTIONS) -> None:
    """Raises UserError: what the setting has, what was expected, what to change."""
    raise UserError(f"{setting} has {found}; expected {expected}: {change or f'correct {setting}'}")


def check_number(
    name: str,
    value: float | int,
    *,
    least: float | int = -math.inf,
    above: float | int = -math.inf,
    most: float | int = math.inf,
    below: float | int = math.inf,
    setting: str = OPTIONS,
) -> None:
    """Raises UserError unless the value is finite, from `least` to `most`, more than `above`, less than
    `below`.
    """
    if math.isfinite(value) and least <= value <= most and above < value < below:
        return
    bounds: list[tuple[str, Any]] = [
        ("at least", least),
        ("more than", above),
        ("at most", most),
        ("less than", below),
    ]
    known = [f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound)]
    refuse(f"{name}={value}", " and ".join(known) or "a finite number", setting=setting)
