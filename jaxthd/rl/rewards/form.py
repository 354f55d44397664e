"""Rewards for the form of an answer: a pattern, its length, how near it is to the most tokens it may have."""

import re
from typing import Literal, get_args

from jaxthd.errors import UserError
from jaxthd.rl.rewards.group import Group
from jaxthd.rl.rewards.transcripts import reference_of

LengthUnit = Literal["words", "characters", "tokens"]


def form(group: Group, *, pattern: str) -> list[float]:
    """1 for an answer that the regular expression matches from its first to its last character, else 0.

    White space around the answer is ignored. With (?s), a dot also matches line breaks. Its name in
    rollout.rewards is "format".
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"format.pattern {pattern!r} is no regular expression ({error}); expected one of Python's re in "
            "rollout.reward_options"
        ) from error
    return [float(expression.fullmatch(answer.strip()) is not None) for answer in group.answers]


def length(group: Group, *, target: int = 0, unit: str = "words", lowest: float = -1.0) -> list[float]:
    """Minus the difference between an answer's length and the target, relative to the target; at least
    `lowest`.

    target: in units; 0: the length of the reference, in words or characters. A target of nothing counts as
    one. unit: "words" (between white space), "characters", or "tokens" (with the one that ends the answer).
    """
    if unit not in get_args(LengthUnit) or target < 0 or (unit == "tokens" and not target):
        raise UserError(
            f"length.unit is {unit!r} and length.target {target}; expected words, characters or tokens, and "
            "a target of at least 1 for tokens, which a reference has not, in rollout.reward_options"
        )

    def measured(text: str) -> int:
        return len(text.split()) if unit == "words" else len(text.strip())

    found = group.tokens if unit == "tokens" else [measured(answer) for answer in group.answers]
    wanted = target or measured(reference_of(group))
    return [max(lowest, -abs(count - wanted) / max(wanted, 1)) for count in found]


def overlong(
    group: Group, *, max_tokens: int = 64, buffer_tokens: int = 16, penalty: float = 1.0
) -> list[float]:
    """Soft punishment of overlong answers (DAPO, Yu et al., 2025, equation 13), in tokens.

    0 for up to max_tokens - buffer_tokens tokens, falling linearly to -penalty at max_tokens, and -penalty
    for more. An answer cut off at max_tokens has that length. max_tokens is rollout.max_new_tokens where it
    is not given.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise UserError(
            f"overlong.buffer_tokens is {buffer_tokens} and overlong.max_tokens {max_tokens}; expected a "
            "buffer of 1 to max_tokens tokens in rollout.reward_options"
        )
    over = [count - (max_tokens - buffer_tokens) for count in group.tokens]
    return [-penalty * min(max(count, 0), buffer_tokens) / buffer_tokens for count in over]
