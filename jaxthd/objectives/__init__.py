"""Objectives, which a run trains for: the contract of an objective, the objectives, and their registry."""

from jaxthd.objectives.dpo import DPO as DPO
from jaxthd.objectives.grpo import GRPO as GRPO
from jaxthd.objectives.kto import KTO as KTO
from jaxthd.objectives.metric import Curve as Curve
from jaxthd.objectives.metric import Metric as Metric
from jaxthd.objectives.metric import Panel as Panel
from jaxthd.objectives.objective import LOSS as LOSS
from jaxthd.objectives.objective import OLD as OLD
from jaxthd.objectives.objective import REFERENCE as REFERENCE
from jaxthd.objectives.objective import Objective as Objective
from jaxthd.objectives.objective import Tokens as Tokens
from jaxthd.objectives.registry import OBJECTIVES as OBJECTIVES
from jaxthd.objectives.registry import make_objective as make_objective
from jaxthd.objectives.registry import register_objective as register_objective
from jaxthd.objectives.sft import SFT as SFT
from jaxthd.objectives.unpacked import UnpackedObjective as UnpackedObjective
from jaxthd.objectives.unpacked import by_answer as by_answer
