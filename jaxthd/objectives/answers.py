"""Questions about the data of objectives that compare answers to one prompt."""

from jaxthd.objectives.dpo import DPO, PREFERENCE
from jaxthd.objectives.grpo import ADVANTAGE
from jaxthd.objectives.kto import KTO
from jaxthd.objectives.objective import Objective


def compares_answers(objective: Objective) -> bool:
    """Whether it trains on documents with answers (Document.answers)."""
    return objective.is_policy or PREFERENCE in objective.extras


def draws_answers(objective: Objective) -> bool:
    """Whether it trains on answers that are drawn, so that prompts are all that the data must give."""
    return ADVANTAGE in objective.extras


def needs_mismatched(objective: Objective) -> bool:
    """Whether the data adds answers of other prompts to each document, for KTO's estimate of the
    divergence."""
    return isinstance(objective, KTO) and objective.kl == "mismatched"


def why_unusable(alternatives: int, name: str, objective: Objective | None) -> str:
    """Why an example with so many alternatives cannot be used for an objective; "" if it can.

    name: of the objective. None: for validation, which takes transcripts as training without preferences.
    """
    pairs, preferences = isinstance(objective, DPO), objective is not None and PREFERENCE in objective.extras
    if alternatives in ((2,) if pairs else (1, 2) if preferences else (0,)):
        return ""
    found = ("no answers to compare", "one answer with a label", "chosen and rejected answers")[alternatives]
    expected = "chosen and rejected" if pairs else "completion and label, or chosen and rejected"
    if objective is None:
        return f"it has {found}; expected a transcript or a conversation, which validation needs"
    found = f"it has {found}, and train.objective is {name!r}"
    if not preferences:
        fit = "dpo or kto" if alternatives == 2 else "kto"
        return f"{found}; expected a transcript or a conversation: set train.objective to {fit}"
    if alternatives:
        return f"{found}; expected {expected}: set train.objective to kto"
    return (
        f"{found}; expected {expected}: jaxthd preferences makes such lines from transcripts; or set "
        "train.objective to sft"
    )
