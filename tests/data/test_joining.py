"""Texts of windows that overlap become the text that was said: nothing twice, nothing lost."""

import re
from typing import NamedTuple

import numpy as np
import pytest

from jaxthd.data.text.joining import joined

COMMON = ("the", "a", "no", "to", "and", "is")
OTHERS = [f"{a}{b}" for a in ("ka", "ru", "so", "mi", "te", "lo") for b in ("n", "ra", "p", "du")]
WORDS = [*COMMON * 4, *OTHERS]


def plain(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", "", text.casefold()).split()


class Heard(NamedTuple):
    text: str
    seconds: float


def windows(rng: np.random.Generator, words: list[str], wrong: float) -> tuple[Heard, Heard, float]:
    """What two windows write of words, and the seconds that they share: each begins with a capital and ends
    with a full stop. Half of a word that a border cuts is misheard, written or left out. wrong: the share of
    other words of the second that are misheard."""
    ends = np.cumsum(rng.uniform(0.15, 0.45, len(words)))
    starts = np.concatenate([[0.0], ends[:-1]])
    border, shared = rng.uniform(6.0, 8.0), 2.0
    begin, end = border - shared / 2, border + shared / 2
    left = [w for w, b in zip(words, ends, strict=True) if b <= end]
    right = [w for w, a in zip(words, starts, strict=True) if a >= begin]
    right[2] = "elsewhere" if rng.random() < wrong else right[2]
    cut = [w for w, a, b in zip(words, starts, ends, strict=True) if a < end < b]
    begun = [w for w, a, b in zip(words, starts, ends, strict=True) if a < begin < b]
    left += [w[: len(w) // 2 + 1] for w in cut if rng.random() < 0.6]
    right = [w[len(w) // 2 :] for w in begun if rng.random() < 0.6] + right
    texts = (f"{' '.join(part).capitalize()}." for part in (left, right))
    return *map(Heard, texts, (end, ends[-1] - begin)), shared


def told(left: Heard, right: Heard, shared: float) -> list[str]:
    rates = len(left.text) / left.seconds, len(right.text) / right.seconds
    return plain(joined(left.text, right.text, shared=shared, rates=rates))


def test_a_hundred_joins_have_every_word_once() -> None:
    """Words of a small vocabulary, so that many follow each other twice. The words that the border cuts are
    whole in the other window."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        words = [str(x) for x in rng.choice(WORDS, 50)]
        assert told(*windows(rng, words, 0.0)) == words, seed


def test_a_word_heard_otherwise_doubles_and_loses_nothing() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        words = [str(x) for x in rng.choice(WORDS, 50)]
        found = told(*windows(rng, words, 1.0))
        assert len(found) == len(words), seed
        assert sum(a != b for a, b in zip(found, words, strict=True)) <= 1, seed


@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        ("we go home.", "Home now we rest", "we go home. now we rest"),
        # Nothing in common: by time, a second of each is shared.
        ("a b c d e f g h", "i j k l m n o p", "a b c d e f g j k l m n o p"),
        ("", "and rest", "and rest"),
        ("we go", "", "we go"),
        ("\u4eca\u5929\u5929\u6c14", "\u5929\u6c14\u5f88\u597d", "\u4eca\u5929\u5929\u6c14\u5f88\u597d"),
    ],
)
def test_a_seam_is_at_what_both_have(left: str, right: str, want: str) -> None:
    """Each window has four seconds, of which both hear one."""
    rates = len(left) / 4, len(right) / 4
    assert joined(left, right, shared=1.0, rates=rates) == want
