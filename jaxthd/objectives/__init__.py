"""Objectives, which a run trains for: the contract of an objective, the objectives, and their registry."""

from jaxthd.objectives.dpo import DPO
from jaxthd.objectives.grpo import GRPO
from jaxthd.objectives.kto import KTO
from jaxthd.objectives.objective import LOSS, OLD, REFERENCE, Objective, Tokens
from jaxthd.objectives.registry import OBJECTIVES, make_objective, register_objective
from jaxthd.objectives.sft import SFT
from jaxthd.objectives.unpacked import UnpackedObjective, by_answer

__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "LOSS",
    "OBJECTIVES",
    "OLD",
    "REFERENCE",
    "SFT",
    "Objective",
    "Tokens",
    "UnpackedObjective",
    "by_answer",
    "make_objective",
    "register_objective",
]
