"""The objectives by name. A new one is a file like sft.py and a line in OBJECTIVES, or a call of
register_objective.
"""

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from jaxthd.errors import UserError
from jaxthd.objectives.dpo import DPO
from jaxthd.objectives.grpo import GRPO
from jaxthd.objectives.kto import KTO
from jaxthd.objectives.objective import Objective
from jaxthd.objectives.settings import refuse
from jaxthd.objectives.sft import SFT

OBJECTIVES: dict[str, type[Objective]] = {"sft": SFT, "dpo": DPO, "kto": KTO, "grpo": GRPO}
"""Names that train.objective takes -> classes: frozen dataclasses, whose fields are the settings."""


def register_objective(name: str, kind: type) -> None:
    """Makes `kind`, a frozen dataclass that inherits Objective, what train.objective NAME means.

    Call it where the config is made: every process of a run makes its own config. Raises ValueError for a
    name that another objective has, and for a class that does not inherit Objective.
    """
    if not issubclass(kind, Objective):
        raise ValueError(
            f"{kind.__name__} does not inherit jaxthd.Objective; expected a class that does, for what an "
            f"objective may leave out: write class {kind.__name__}(jaxthd.Objective)"
        )
    if OBJECTIVES.get(name, kind) is not kind:
        raise ValueError(f"an objective is already called {name!r}; expected a new name: choose another")
    OBJECTIVES[name] = kind


def make_objective(name: str, options: Sequence[str] = ()) -> Objective:
    """The objective that train.objective names, with train.objective_options (NAME=VALUE).

    Raises UserError for an unknown name, an unknown option, a value of another type, and what the objective
    itself refuses.
    """
    if name not in OBJECTIVES:
        like = get_close_matches(name, OBJECTIVES, n=1, cutoff=0.0)
        raise UserError(
            f"train.objective is {name!r}; expected one of {', '.join(sorted(OBJECTIVES))}: perhaps you "
            f"meant {like[0]!r}"
        )
    kind = OBJECTIVES[name]
    settings: dict[str, Any] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for option in options:
        key, mark, text = option.partition("=")
        if not mark or key not in settings:
            known = ", ".join(f"{n}={f.default}" for n, f in settings.items()) or "none"
            raise UserError(
                f"train.objective_options has {option!r}; expected NAME=VALUE of the objective {name!r} "
                f"({known}): correct train.objective_options"
            )
        choices = get_args(settings[key].type)
        if get_origin(settings[key].type) is Literal and text not in choices:
            refuse(option, f"one of {', '.join(choices)}")
        given[key] = _read(option, text, settings[key].default)
    return kind(**given)


def _read(option: str, text: str, default: Any) -> Any:
    """The value of an option, of the type that its default has."""
    booleans = {"true": True, "false": False}
    try:
        return booleans[text.lower()] if isinstance(default, bool) else type(default)(text)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"train.objective_options has {option!r}; expected a value such as {default!r}: correct "
            "train.objective_options"
        ) from error
