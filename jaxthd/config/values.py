"""Bounds of single settings, said once, in their annotations: validation and the reference read them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from jaxthd.errors import UserError


class Range(NamedTuple):
    """The bounds of a number. ends: "(" or ")" where an end is left out, as in mathematics. A setting without
    a range takes integers from 1 on, or real numbers from 0 on."""

    least: float
    most: float = math.inf
    ends: str = "[]"

    def holds(self, value: int | float) -> bool:
        """Whether the value is within the bounds, and finite."""
        above = self.least < value if self.ends[0] == "(" else self.least <= value
        return (
            above and value < math.inf and (value < self.most if self.ends[1] == ")" else value <= self.most)
        )

    def __str__(self) -> str:
        least = f"more than {self.least:g}" if self.ends[0] == "(" else f"{self.least:g} or more"
        if self.most == math.inf:
            return least
        return f"{least}, and {'less than' if self.ends[1] == ')' else 'at most'} {self.most:g}"


class Unset(int):
    """The number of a setting that was not given. A run derives one in its place; all else computes with it.

    As an int it takes part in arithmetic and comparisons, and JSON writes it as one.
    """

    def __hash__(self) -> int:
        """Another hash than that of the int: tyro caches by a default, and 64 given is not 64 unset."""
        return hash((Unset, int(self)))


class UnsetText(str):
    """The text of a setting that was not given, as Unset is of a number."""

    def __hash__(self) -> int:
        """Another hash than that of the text, as of Unset."""
        return hash((UnsetText, str(self)))


Index = Annotated[int, Range(0)]
"""An integer that may be 0."""
Share = Annotated[float, Range(0, 1)]
"""A part of a whole."""
Decay = Annotated[float, Range(0, 1, "[)")]
"""A share below 1: of a mean that remains at each step, or of features that are dropped."""
Positive = Annotated[float, Range(0, ends="(]")]
"""A number that 0 would make useless."""
DERIVED = "derived"
"""Marks, in an Annotated, a field that no command line takes: it is derived, and tests give others."""


def numbers_of(
    setting: str, form: str, given: Sequence[str], defaults: Mapping[str, float]
) -> dict[str, float]:
    """The numbers that a setting gives as NAME=NUMBER, over the defaults by name.

    form: the form in the setting's own words, such as "PART=FACTOR". Raises UserError for a text of another
    form, and for a name without a default.
    """
    numbers = dict(defaults)
    for text in given:
        name, _, number = text.partition("=")
        try:
            numbers = numbers | {name: float(number)}
        except ValueError:
            name = ""
        if name not in defaults:
            raise UserError(
                f"{setting} has {text!r}; expected {form} with one of the {form.partition('=')[0].lower()}s "
                f"{', '.join(defaults)}: correct {setting}"
            )
    return numbers


def with_value(settings: Any, path: str, value: Any) -> Any:
    """Settings with the value at a dotted path; "" for all of them.

    value: of a group of settings it may be a dict, of those that change.
    """
    name, _, rest = path.partition(".")
    group = (
        settings if not name else settings[name] if isinstance(settings, dict) else getattr(settings, name)
    )
    if rest:
        value = with_value(group, rest, value)
    elif isinstance(value, Mapping):
        for inner, each in value.items():
            group = with_value(group, inner, each)
        value = group
    elif isinstance(value, list):  # JSON has no tuples
        value = tuple(value)
    if not name:
        return value
    return {**settings, name: value} if isinstance(settings, dict) else replace(settings, **{name: value})
