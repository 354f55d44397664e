"""Items that a run can use, by its objective."""

from collections.abc import Sequence

from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped
from jaxthd.objectives import Objective
from jaxthd.objectives.answers import why_unusable

UNANSWERED = (
    "the last turn is not the assistant's; expected an answer, which is supervised: prompts alone are for "
    "objectives that draw answers (grpo)"
)
"""Why an item without an answer is skipped."""


def usable_examples(
    examples: Sequence[Example], name: str, objective: Objective | None, *, prompts: bool = False
) -> tuple[list[Example], list[Skipped]]:
    """The examples that an objective can be trained on, and the others.

    name: of the objective. None: those that can be validated on. prompts: whether examples without an answer
    can be used too.
    """
    reasons = [
        why_unusable(len(example.alternatives), name, objective)
        or ("" if prompts or not example.is_unanswered else UNANSWERED)
        for example in examples
    ]
    judged = list(zip(examples, reasons, strict=True))
    return [e for e, why in judged if not why], [Skipped(e.key, why) for e, why in judged if why]
