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
HAS_RECORDING = (
    "it holds a recording, and the model is text-only (model.encoder is None); expected a model with an "
    "encoder: give model_config an encoder's checkpoint beside the LLM's, or ModelConfig an encoder"
)
"""Why an item is skipped that a text-only model cannot hear."""


def usable_examples(
    examples: Sequence[Example],
    name: str,
    objective: Objective | None,
    *,
    prompts: bool = False,
    audio: bool = True,
) -> tuple[list[Example], list[Skipped]]:
    """The examples that an objective can be trained on, and the others.

    name: of the objective. None: those that can be validated on. prompts: whether examples without an answer
    can be used too. audio: whether the model takes recordings.
    """
    reasons = {n: why_unusable(n, name, objective) for n in {len(x.alternatives) for x in examples}}
    usable, others = [], []
    for example in examples:
        why = reasons[len(example.alternatives)]
        if not why and not prompts and example.is_unanswered:
            why = UNANSWERED
        if not audio and example.clips:
            why = HAS_RECORDING
        if why:
            others.append(Skipped(example.key, why))
        else:
            usable.append(example)
    return usable, others
