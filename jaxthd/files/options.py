"""Settings given as NAME=VALUE, and checks of their numbers: an objective's, an optimizer's."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, get_args, get_origin

from jaxthd.errors import UserError

Kind = TypeVar("Kind")


def from_options(kind: type[Kind], options: Sequence[str], what: str, setting: str) -> Kind:
    """An instance of `kind`, a dataclass, with these options as its fields. A value has its default's type.

    what: the kind in words. setting: the field of the config that holds the options.
    Raises UserError for an unknown option, and for a value of another type.
    """
    settings: dict[str, Any] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for option in options:
        key, mark, text = option.partition("=")
        if not mark or key not in settings:
            known = ", ".join(f"{n}={f.default}" for n, f in settings.items()) or "none"
            expected = f"NAME=VALUE of the {what} ({known})"
            raise UserError(f"{setting} has {option!r}; expected {expected}: correct {setting}")
        choices = get_args(settings[key].type)
        if get_origin(settings[key].type) is Literal and text not in choices:
            raise UserError(
                f"{setting} has {option}; expected one of {', '.join(choices)}: correct {setting}"
            )
        given[key] = _read(option, text, settings[key].default, setting)
    return kind(**given)


def _read(option: str, text: str, default: Any, setting: str) -> Any:
    """The value of an option, of the type that its default has."""
    booleans = {"true": True, "false": False}
    try:
        return booleans[text.lower()] if isinstance(default, bool) else type(default)(text)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{setting} has {option!r}; expected a value such as {default!r}: correct {setting}"
        ) from error


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
