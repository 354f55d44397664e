"""The arguments and results of reward functions: groups of answers, with and without rewards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Group:
    """The answers that were drawn to one prompt. Reward functions get it; it is sent to another process.

    key: names the prompt, as in reports.
    prompt: its text. A recording stands there as data.audio_placeholder.
    reference: the text of the manifest's line; None where the line has none.
    fields: the line's other fields, by name, as JSON gave them: all that say neither what the turns are nor
        where recordings lie (READ in jaxthd.data.sources.lines).
    answers: the texts, without the token that ends an answer.
    tokens: of each answer, with the token that ends it.
    ended: whether each answer ended by itself; False: it was cut off at rollout.max_new_tokens.
    """

    key: str
    prompt: str = ""
    reference: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    answers: tuple[str, ...]
    tokens: tuple[int, ...]
    ended: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not len(self.answers) == len(self.tokens) == len(self.ended):
            raise ValueError(
                f"group {self.key!r} has {len(self.answers)} answers, {len(self.tokens)} token counts and "
                f"{len(self.ended)} ends; expected one of each for every answer"
            )


Reward = Callable[..., Sequence[float]]
"""A reward function: called as function(group, **settings), it returns one number for each answer. A larger
one is better. The built-in functions and those of users have the same signature."""


class RewardFailure(NamedTuple):
    """A function gave no usable rewards for the answers to a prompt. reason: for people, one line."""

    function: str
    key: str
    reason: str


class Rewarded(NamedTuple):
    """A group with its rewards.

    rewards: the weighted sum over all functions, for each answer; None where a function failed.
    by_function: rewards before they are weighted, by the function's name; empty where a function failed.
    failure: the first function that failed, and why.
    """

    group: Group
    rewards: tuple[float, ...] | None
    by_function: dict[str, tuple[float, ...]]
    failure: RewardFailure | None = None
