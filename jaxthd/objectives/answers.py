"""Which objectives compare answers to one prompt, and which examples they are trained on."""

ALTERNATIVES: dict[str, tuple[int, ...]] = {"dpo": (2,), "kto": (1, 2)}
"""Objectives trained on preferences: how many alternatives an example may have."""

WITH_ANSWERS = ("dpo", "kto", "grpo")
"""Objectives whose documents have answers (Document.answers), and whose forward pass is that of an
evaluation: stored batch statistics, audio that is neither dithered nor masked."""


def compares_answers(objective: str) -> bool:
    """Whether the objective that train.objective names trains on documents with answers."""
    return objective in WITH_ANSWERS


def why_unusable(alternatives: int, objective: str) -> str:
    """Why the objective cannot be trained on an example with so many alternatives; "" if it can.

    objective: "" for validation, which takes transcripts.
    """
    wanted = ALTERNATIVES.get(objective, (0,))
    if alternatives in wanted:
        return ""
    if not alternatives:
        fields = "completion and label" if 1 in wanted else "chosen and rejected"
        return (
            f"it has no answers to compare, and train.objective is {objective!r}; expected {fields}: jaxthd "
            "preferences makes such lines of transcripts; or set train.objective to sft"
        )
    if wanted == (0,):
        found, fit = ("chosen and rejected", "dpo") if alternatives == 2 else ("a label", "kto")
        if not objective:
            return f"it has {found}; expected a transcript or a conversation, because it is for validation"
        return (
            f"it has {found}, and train.objective is {objective!r}; expected a transcript or a conversation: "
            f"set train.objective to {fit}, or name other data"
        )
    return (
        f"it has one answer with a label, and train.objective is {objective!r}; expected chosen and "
        "rejected: set train.objective to kto, or name other data"
    )
