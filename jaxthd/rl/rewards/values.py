"""Rewards for tasks without transcripts: the answer is read as a number and compared with a field."""

import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

from jaxthd.rl.rewards.group import Group
from jaxthd.rl.rewards.transcripts import normaliser_of

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")


def equals(group: Group, *, field: str, tolerance: float = 0.0) -> list[float]:
    """1 for an answer that is the number in the field of the manifest's line, else 0.

    field: its name; "text" is the reference. A list of numbers there stands for their sum. tolerance: the
    largest difference that counts as equal. Raises ValueError where the line has no number there. How an
    answer is read: number_in.
    """
    wanted = _wanted(group, field)
    found = [number_in(answer) for answer in group.answers]
    return [float(number is not None and abs(number - wanted) <= tolerance) for number in found]


def number_in(text: str) -> float | None:
    """The number that a whole text is: "42", "-1,000.", "forty-two" are; "it is 42" is none, nor is "".

    English number words are read as Whisper's English normaliser reads them, so that "one two" is 12.
    """
    plain = THOUSANDS.sub("", text.strip().rstrip(".!?").strip().replace("\N{MINUS SIGN}", "-"))
    if not NUMBER.fullmatch(plain) and not plain.startswith(("-", "+")):  # the normaliser drops signs
        plain = normaliser_of("english")(text)
    return float(plain) if NUMBER.fullmatch(plain) else None


def _wanted(group: Group, field: str) -> float:
    fields: dict[str, Any] = {"text": group.reference} if group.reference is not None else {}
    fields |= group.fields
    value: Any = fields.get(field)
    if isinstance(value, str):
        value = number_in(value)
    if isinstance(value, Sequence) and value and all(_is_number(each) for each in value):
        value = sum(value)
    if not _is_number(value):
        raise ValueError(
            f"the line's field {field!r} is {fields.get(field)!r}; expected a number, or a list of numbers; "
            f"its fields are {', '.join(map(repr, fields)) or 'none'}"
        )
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
