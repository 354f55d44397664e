"""What a run trains for: the contract of an objective, the objectives, and their registry."""

from jaxthd.objectives.objective import LOSS, Objective, Tokens
from jaxthd.objectives.registry import OBJECTIVES, make_objective, register_objective
from jaxthd.objectives.sft import SFT

__all__ = ["LOSS", "OBJECTIVES", "SFT", "Objective", "Tokens", "make_objective", "register_objective"]
