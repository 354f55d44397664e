"""Built-in rewards, by numbers computed by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from jaxthd.errors import UserError
from jaxthd.rl.rewards import Group
from jaxthd.rl.rewards.registry import BUILT_IN
from jaxthd.rl.rewards.values import number_in
from tests.rl.rewards.groups import group

# One right; one word replaced, one missing; two added; nothing; another case and punctuation.
ANSWERS = ("one two three four", "one too three", "uh one two two three four", "", "One, two three FOUR.")
REFERENCE = "one two three four"
SPOKEN = group(*ANSWERS, reference=REFERENCE)


def rewards(name: str, of: Group, **settings: Any) -> Sequence[float]:
    return BUILT_IN[name](of, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("wer", {}, [0, -2 / 4, -2 / 4, -1, 0]),
        ("wer", {"normaliser": "none"}, [0, -2 / 4, -2 / 4, -1, -2 / 4]),
        # 18 characters. "too" for "two" is one, " four" five; "uh " is three, "two " four. Last, a comma, a
        # stop and five capitals.
        ("cer", {}, [0, -6 / 18, -7 / 18, -1, 0]),
        ("cer", {"normaliser": "none"}, [0, -6 / 18, -7 / 18, -1, -7 / 18]),
        ("insertions", {}, [0, 0, -2 / 4, 0, 0]),
        ("exact", {}, [1, 0, 0, 0, 1]),
        ("exact", {"normaliser": "none"}, [1, 0, 0, 0, 0]),
        ("format", {"pattern": r"(\w+ ?){3,4}"}, [1, 1, 0, 0, 0]),
        ("length", {}, [0, -1 / 4, -2 / 4, -1, 0]),
        ("length", {"target": 2}, [-1, -1 / 2, -1, -1, -1]),
        (
            "length",
            {"target": 20, "unit": "characters"},
            [-2 / 20, -7 / 20, -5 / 20, -1, 0],
        ),
        ("length", {"target": 19, "unit": "tokens"}, [0, -5 / 19, -7 / 19, -18 / 19, -2 / 19]),
    ],
)
def test_rewards_are_those_computed_by_hand(name: str, settings: dict[str, Any], expected: list[float]):
    assert rewards(name, SPOKEN, **settings) == pytest.approx(expected, abs=1e-15)


def test_rates_are_bounded_unless_a_user_wants_them_unbounded():
    repeated = group("one " * 50, reference="one")
    assert rewards("wer", repeated) == [-1]
    assert rewards("wer", repeated, lowest=-10.0) == [-10]
    assert rewards("wer", repeated, lowest=-math.inf) == [-49]
    assert rewards("insertions", repeated, lowest=-math.inf) == [-49]


@pytest.mark.parametrize("reference", ["", " ", "[noise]", "..."])
def test_a_reference_without_words_rewards_silence(reference: str):
    silence = group("", "a word", "...", reference=reference)
    assert rewards("wer", silence, lowest=-5.0) == [0, -2, 0]
    assert rewards("insertions", silence, lowest=-5.0) == [0, -2, 0]
    assert rewards("exact", silence) == [1, 0, 1]
    assert rewards("cer", silence) == [0, -1, 0]


def test_length_of_an_empty_reference_counts_as_one():
    assert rewards("length", group("", "a", "a b", reference=""), lowest=-9.0) == [0, -1, -2]


def test_overlong_answers_are_punished_softly():
    """DAPO's example with Lmax 20 and a buffer of 4: 16 tokens are free, 20 cost all, more cost no more."""
    lengths = (1, 16, 17, 18, 20, 21, 60)
    drawn = Group(key="a", answers=("",) * 7, tokens=lengths, ended=(True,) * 7)
    expected = [0, 0, -0.25, -0.5, -1, -1, -1]
    assert rewards("overlong", drawn, max_tokens=20, buffer_tokens=4) == expected
    assert rewards("overlong", drawn, max_tokens=20, buffer_tokens=4, penalty=0.5) == [
        x / 2 for x in expected
    ]


def test_a_number_equals_a_field_or_the_sum_of_its_list():
    answers = ("12", "twelve", "it is 12", "Twelve.", "-12", "12.4", "", "one two")
    for field in (12, 12.0, [5, 7], "12", "twelve"):
        spoken = group(*answers, total=field)
        assert rewards("equals", spoken, field="total") == [1, 1, 0, 1, 0, 0, 0, 1]
        assert rewards("equals", spoken, field="total", tolerance=0.5) == [1, 1, 0, 1, 0, 1, 0, 1]


def test_the_field_text_is_the_reference():
    assert rewards("equals", group("7", "8", reference="seven"), field="text") == [1, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [("-3", -3), (" 4.50! ", 4.5), ("minus forty-two", -42), ("three point five", 3.5), ("-1,000", -1000)]
    + [(text, None) for text in ("nan", "inf", "1e5", "3 or 4", ".", "no", "--3")],
)
def test_texts_are_read_as_numbers(text: str, number: float | None):
    assert number_in(text) == number


@pytest.mark.parametrize("field", [None, "x", [], ["a"], True, {"a": 1}, [1, None]])
def test_a_line_without_a_number_gives_no_rewards(field: Any):
    with pytest.raises(ValueError, match=r"field 'total' .* its fields are 'total'"):
        rewards("equals", group("1", total=field), field="total")


@pytest.mark.parametrize("name", ["wer", "cer", "insertions", "exact", "length"])
def test_a_prompt_without_a_reference_has_no_rewards(name: str):
    with pytest.raises(ValueError, match="no reference text"):
        rewards(name, group("a"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "wer",
            {"normaliser": "french"},
            "normaliser is 'french'; expected one of basic, english, whisper",
        ),
        ("wer", {"lowest": 0.0}, "lowest is 0"),
        ("wer", {"lowest": math.nan}, "lowest is nan"),
        ("format", {"pattern": "(a"}, r"format\.pattern '\(a' is no regular expression"),
        ("length", {"unit": "bytes"}, "length.unit is 'bytes'"),
        ("length", {"unit": "tokens"}, "length.target 0"),
        ("length", {"target": -1}, "length.target -1"),
        ("overlong", {"buffer_tokens": 65}, "overlong.buffer_tokens is 65"),
        ("overlong", {"buffer_tokens": 0}, "overlong.buffer_tokens is 0"),
    ],
)
def test_bad_settings_are_a_users_matter(name: str, settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        rewards(name, SPOKEN, **settings)


def test_counts_must_match():
    with pytest.raises(ValueError, match="1 answers, 2 token counts"):
        Group(key="a", answers=("a",), tokens=(1, 2), ended=(True,))
