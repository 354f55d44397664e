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
    reasons = {n: why_unusable(n, name, objective) for n in {len(x.alternatives) for x in examples}}
    usable, others = [], []
    for example in examples:
        why = reasons[len(example.alternatives)]
        if not why and not prompts and example.is_unanswered:
            why = UNANSWERED
        if why:
            others.append(Skipped(example.key, why))
        else:
            usable.append(example)
    return usable, others
