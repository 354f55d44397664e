"""Rewards that compare answers with the reference text: word and character errors, insertions, exact match.

Both texts are normalised first (train.normaliser). A reference without words counts as one word: for it, an
empty answer has no error, and every other answer at least one error per word of the reference.
"""

from collections.abc import Callable
from functools import cache
from typing import cast, get_args

from jaxthd.errors import UserError
from jaxthd.inference.wer import Errors, Normaliser, Unit, errors_of, make_normaliser
from jaxthd.rl.rewards.group import Group

_make_normaliser = cache(make_normaliser)


def wer(group: Group, *, normaliser: str = "basic", lowest: float = -1.0) -> list[float]:
    """Minus the word error rate of each answer, but at least `lowest`.

    Without a bound, one answer that repeats a word a hundred times would decide the mean of its group and the
    advantages of all its answers. "-inf" is no bound.
    """
    return [max(lowest, -e.wrong / max(e.total, 1)) for e in _errors(group, normaliser, lowest, "words")]


def cer(group: Group, *, normaliser: str = "basic", lowest: float = -1.0) -> list[float]:
    """Minus the character error rate of each answer, but at least `lowest`. Spaces are characters."""
    return [max(lowest, -e.wrong / max(e.total, 1)) for e in _errors(group, normaliser, lowest, "characters")]


def insertions(group: Group, *, normaliser: str = "basic", lowest: float = -1.0) -> list[float]:
    """Minus the inserted words per word of the reference, but at least `lowest`: for models that make up
    speech. Which words are inserted follows from the alignment with the fewest errors."""
    return [max(lowest, -e.insertions / max(e.total, 1)) for e in _errors(group, normaliser, lowest, "words")]


def exact(group: Group, *, normaliser: str = "basic") -> list[float]:
    """1 for an answer that equals the reference once both are normalised, else 0."""
    normalise = normaliser_of(normaliser)
    reference = normalise(reference_of(group))
    return [float(normalise(answer) == reference) for answer in group.answers]


def normaliser_of(name: str) -> Callable[[str], str]:
    """The function that normalises a text, made once. Raises UserError for an unknown name."""
    if name not in get_args(Normaliser):
        raise UserError(
            f"its setting normaliser is {name!r}; expected one of {', '.join(get_args(Normaliser))} in "
            "rollout.reward_options"
        )
    return _make_normaliser(cast(Normaliser, name))


def reference_of(group: Group) -> str:
    """The reference text. Raises ValueError for a prompt that has none."""
    if group.reference is None:
        raise ValueError("the prompt has no reference text; expected a line with one for this reward")
    return group.reference


def _errors(group: Group, normaliser: str, lowest: float, unit: Unit) -> list[Errors]:
    if not lowest < 0:
        raise UserError(
            f"its setting lowest is {lowest:g}; expected a number below 0, the reward of an answer without "
            "errors, in rollout.reward_options"
        )
    normalise = normaliser_of(normaliser)
    answers = [normalise(answer) for answer in group.answers]
    return errors_of([normalise(reference_of(group))] * len(answers), answers, unit)
