"""Which objectives compare answers to one prompt."""

WITH_ANSWERS = ("dpo", "kto", "grpo")
"""Objectives whose documents have answers (Document.answers), and whose forward pass is that of an
evaluation: stored batch statistics, audio that is neither dithered nor masked."""


def compares_answers(objective: str) -> bool:
    """Whether the objective that train.objective names trains on documents with answers."""
    return objective in WITH_ANSWERS
