"""Checks of an objective's settings, which are train.objective_options."""

import math
from typing import Any

from jaxthd.errors import UserError


def refuse(found: str, expected: str, change: str = "correct train.objective_options") -> None:
    """Raises UserError: what train.objective_options has, what was expected, what to change."""
    raise UserError(f"train.objective_options has {found}; expected {expected}: {change}")


def check_number(
    name: str,
    value: float | int,
    *,
    least: float | int = -math.inf,
    above: float | int = -math.inf,
    most: float | int = math.inf,
    below: float | int = math.inf,
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
    refuse(f"{name}={value}", " and ".join(known) or "a finite number")
