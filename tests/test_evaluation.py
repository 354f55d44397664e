"""Word error rate: over all words of all references, after normalisation."""

import math

import pytest

from jaxthd.evaluation import Hypothesis, normalise, word_error_rate


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Please  hold.\n", "please hold"),
        ("You've got 3 new messages!", "you've got 3 new messages"),
        ("You’ve — 'quoted' words, re-dial", "you've quoted words re dial"),
        ("ÉCOLE ﬁn", "école fin"),
        ("'' ...", ""),
    ],
)
def test_normalised_text_is_words_alone(text: str, want: str):
    assert normalise(text) == want
    assert normalise(want) == want


def hypotheses(*pairs: tuple[str, str]) -> list[Hypothesis]:
    return [Hypothesis(str(i), *pair) for i, pair in enumerate(pairs)]


def test_errors_are_counted_over_all_words_not_averaged_over_documents():
    """One substitution, one deletion and two insertions over 1 + 5 words."""
    pairs = hypotheses(("Stop.", "stop it now"), ("one two three four five", "one too four five"))
    assert word_error_rate(pairs) == pytest.approx(4 / 6)
    assert word_error_rate(hypotheses(("One, two!", "one two"))) == 0
    assert word_error_rate(hypotheses(("one", ""))) == 1


def test_references_without_a_word_are_left_out():
    assert word_error_rate(hypotheses(("...", "noise"), ("one two", "one"))) == pytest.approx(1 / 2)
    assert math.isnan(word_error_rate(hypotheses(("...", "noise"))))
