"""Errors are counted as edits of words and characters, after Whisper's normalisers."""

import math

import numpy as np
import pytest

from jaxthd.inference.wer import Errors, Unit, aligned_words, errors_of, make_normaliser, summed


@pytest.mark.parametrize(
    ("text", "basic", "english"),
    [
        ("Please  hold.\n", "please hold", "please hold"),
        ("You've got 3 new messages!", "you ve got 3 new messages", "you have got 3 new messages"),
        ("'Quoted' words — re-dial", "quoted words re dial", "quoted words re dial"),
        ("the colour of [noise] fifty-one", "the colour of fifty one", "the color of 51"),
        ("ÉCOLE ﬁn", "école fin", "ecole fin"),
        ("हिन्दी में।", "हिन्दी में", None),
        ("", "", ""),
    ],
)
def test_texts_become_words_with_single_spaces(text: str, basic: str, english: str | None):
    assert make_normaliser("basic")(text) == make_normaliser("basic")(basic) == basic
    if english is not None:
        assert make_normaliser("english")(text) == english
    assert make_normaliser("none")(text) == " ".join(text.split())


def distance(a: list[str], b: list[str]) -> int:
    """Levenshtein's, by its definition."""
    before = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
        before = row
    return before[-1]


@pytest.mark.parametrize("unit", ["words", "characters"])
def test_errors_are_the_fewest_edits(unit: Unit):
    """Of ragged texts, empty ones among them."""
    rng = np.random.default_rng(0)
    texts = [[" ".join(rng.choice(["a", "b", "cc", "d"], n)) for n in rng.integers(0, 9, 60)] for _ in "rh"]
    for reference, hypothesis, errors in zip(*texts, errors_of(texts[0], texts[1], unit), strict=True):
        split = str.split if unit == "words" else list
        said, heard = split(reference), split(hypothesis)
        assert errors.total == len(said)
        assert errors.wrong == distance(said, heard)
        assert len(heard) == len(said) - errors.deletions + errors.insertions
        assert min(errors) >= 0


def test_sums_leave_out_references_without_a_word():
    errors = errors_of(["one two", "", "three"], ["one", "noise here", "tree too"])
    assert errors == [Errors(0, 1, 0, 2), Errors(0, 0, 2, 0), Errors(1, 0, 1, 1)]
    assert math.isnan(errors[1].rate)
    assert summed(errors) == Errors(1, 1, 1, 3)
    assert summed(errors).rate == 1
    assert math.isnan(summed([]).rate)


def test_aligned_words_stand_above_one_another():
    pairs = aligned_words("one two three four five", "one too four five six")
    assert pairs == [
        ("one", "one"),
        ("two", "too"),
        ("three", ""),
        ("four", "four"),
        ("five", "five"),
        ("", "six"),
    ]
    assert aligned_words("", "a b") == [("", "a"), ("", "b")]
    assert aligned_words("a", "") == [("a", "")]
