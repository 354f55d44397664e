"""Groups for tests."""

from typing import Any

from jaxthd.rl.rewards import Group


def group(*answers: str, reference: str | None = None, key: str = "a", **fields: Any) -> Group:
    """Answers with a token for each character, and one for the end, which all have."""
    return Group(
        key=key,
        reference=reference,
        fields=fields,
        answers=answers,
        tokens=tuple(len(answer) + 1 for answer in answers),
        ended=(True,) * len(answers),
    )
