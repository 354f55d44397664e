"""The objectives by name. A new one is a file like sft.py and a line in OBJECTIVES, or a call of
register_objective.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from jaxthd.errors import UserError
from jaxthd.files.options import from_options
from jaxthd.objectives.dpo import DPO
from jaxthd.objectives.grpo import GRPO
from jaxthd.objectives.kto import KTO
from jaxthd.objectives.objective import Objective
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
    return from_options(OBJECTIVES[name], options, f"objective {name!r}", "train.objective_options")
