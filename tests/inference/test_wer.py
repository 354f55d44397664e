"""Errors are counted as edits of words and characters, after Whisper's normalisers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxthd.errors import UserError
from jaxthd.inference.wer import (
    EnglishTextNormalizer,
    Errors,
    Normaliser,
    Unit,
    aligned_words,
    differs,
    errors_of,
    is_without_spaces,
    make_normaliser,
    summed,
)

LEADERBOARD = json.loads((Path(__file__).parents[1] / "references" / "leaderboard.json").read_text("utf-8"))


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


APOSTROPHES = "\u2019\u2018\u201b\u02bc\u02bb\u2032\uff07\u055a`\u00b4"


@pytest.mark.parametrize("mark", APOSTROPHES, ids=lambda mark: f"U+{ord(mark):04X}")
def test_an_apostrophe_is_one_however_it_is_typed(mark: str):
    """Whisper's own knows U+0027 alone."""
    text = "Don't say the dog's o'clock isn't what they're at"
    for name in ("basic", "english"):
        normalise = make_normaliser(name)
        assert normalise(text.replace("'", mark)) == normalise(text)
    assert "do not say" in make_normaliser("english")(text)
    assert make_normaliser("none")(text.replace("'", mark)) != text


def test_whisper_is_exactly_whisper_s():
    """Also where it reads an apostrophe as a space."""
    published, normalise = EnglishTextNormalizer(), make_normaliser("whisper")
    for text in (
        "Don\u2019t",
        "don't stop",
        "the colour of twenty one",
        "caf\u00e9 \u2026 to\u00adgether",
        "$3 [noise]",
    ):
        assert normalise(text) == " ".join(published(text).split())
    assert normalise("Don\u2019t") == "don t"


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("together", "to\u00adge\u200bther"),
        ("together", "\ufefftoge\u2060ther\ufe0f"),
        ("left right", "\u200eleft\u202a \u200fright"),
        ("ten men went", "ten\u00a0men\u202fwent"),
        ("\u00c5ngstr\u00f6m caf\u00e9", "A\u030angstro\u0308m cafe\u0301"),
        ("\ud55c\uad6d", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
    ],
)
@pytest.mark.parametrize("name", ["basic", "english", "none"])
def test_what_looks_the_same_is_no_error(name: Normaliser, text: str, other: str):
    assert make_normaliser(name)(other) == make_normaliser(name)(text)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ('he said "no"', "he said \u201cno\u201d"),
        ('he said "no"', "he said \u00abno\u00bb"),
        ("a well-known man", "a well\u2011known man"),
        ("a well-known man", "a well\u2010known man"),
        ("well ... no", "well \u2026 no"),
        ("first office", "\ufb01rst o\ufb03ce"),
        ("abc 12", "\uff41\uff42\uff43 \uff11\uff12"),
        ("\u0643\u062a\u0627\u0628", "\u0643\u062a\u0640\u0640\u0627\u0628"),
    ],
)
@pytest.mark.parametrize("name", ["basic", "english"])
def test_typography_is_no_error(name: Normaliser, text: str, other: str):
    assert make_normaliser(name)(other) == make_normaliser(name)(text)


def test_joiners_that_spell_words_stay():
    """The zero-width non-joiner, in Persian."""
    word = "\u0645\u06cc\u200c\u0631\u0648\u0645"
    assert make_normaliser("basic")(word) == word


def test_an_unknown_normaliser_is_named():
    with pytest.raises(
        UserError, match=r"'french'; expected one of basic, english, whisper, leaderboard, none"
    ):
        make_normaliser("french")


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


def test_the_leaderboard_s_texts_are_what_its_own_code_makes_of_them():
    """All its names, and its spellings that Whisper does not have, stand in them."""
    normalise = make_normaliser("leaderboard")
    wrong = {t: normalise(t) for t, made in LEADERBOARD["texts"].items() if normalise(t) != made}
    assert not wrong
    other = make_normaliser("whisper")
    assert sum(other(t) != made for t, made in LEADERBOARD["texts"].items()) > 50


def test_on_the_leaderboard_a_compound_in_two_words_is_no_error():
    """Counted by kaldialign as its own code calls it, of all pairs together."""
    references, hypotheses, counts = zip(*LEADERBOARD["pairs"], strict=True)
    errors = errors_of(references, hypotheses, compounds=True)
    assert [each.wrong for each in errors] == list(counts)
    assert sum(each.wrong for each in errors) / sum(each.total for each in errors) == LEADERBOARD["rate"]
    assert sum(each.wrong for each in errors_of(references, hypotheses)) > sum(counts)
    pairs = aligned_words("a white paper boat", "a whitepaper coat", compounds=True)
    assert pairs == [("a", "a"), ("white paper", "whitepaper"), ("boat", "coat")]
    assert [differs(*pair) for pair in pairs] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("\u4eca\u65e5\u306f iPhone \u3067\u8a71\u3057\u307e\u3059\u3088", True),
        ("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", True),
        ("\u1019\u103c\u1014\u103a\u1019\u102c", True),
        ("\uc548\ub155\ud558\uc138\uc694 \uc5ec\ub7ec\ubd84", False),
        ("he said \u4f60\u597d", False),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", False),
        ("12 34", False),
    ],
)
def test_languages_without_spaces_are_told_by_their_letters(text: str, without: bool):
    assert is_without_spaces([text]) == without
    assert not is_without_spaces([])
