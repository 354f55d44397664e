"""The interval of a difference is that of paired resampling; the verdict follows it."""

import numpy as np
import pytest

from jaxthd.evaluation.comparison import compare
from jaxthd.evaluation.results import scored_set
from jaxthd.inference.evaluator import Evaluation, Hypothesis
from jaxthd.inference.wer import Errors


def errors(wrong: np.ndarray, words: np.ndarray) -> list[Errors]:
    return [Errors(int(w), 0, 0, int(n)) for w, n in zip(wrong, words, strict=True)]


def test_the_interval_is_the_one_of_the_normal_approximation_on_many_documents():
    """A ratio's standard error by the delta method, of ragged documents; silent ones do not count."""
    rng = np.random.default_rng(1)
    words = rng.integers(1, 30, 600)
    before = rng.binomial(words, 0.2)
    after = np.clip(before + rng.integers(-2, 4, 600), 0, None)
    silent = [Errors(0, 0, 3, 0)]
    found = compare(errors(before, words) + silent, errors(after, words) + silent)
    assert found is not None
    assert found.documents == 600
    difference = (after.sum() - before.sum()) / words.sum()
    assert found.difference == pytest.approx(difference)
    residual = (after - before) - difference * words
    error = np.sqrt((residual**2).sum()) / words.sum()
    assert found.low == pytest.approx(difference - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(difference + 1.96 * error, abs=0.1 * error)
    assert found.verdict == "worse"
    unpaired = np.sqrt(((before - found.before * words) ** 2).sum() * 2) / words.sum()
    assert found.high - found.low < 2 * 1.96 * unpaired, "what is hard for both does not widen it"


def test_verdicts():
    words = np.full(300, 10)
    wrong = np.arange(300) % 4
    same, fewer = (
        compare(errors(wrong, words), errors(wrong, words)),
        compare(errors(wrong, words), errors(wrong // 2, words)),
    )
    assert same is not None
    assert (same.low, same.high, same.verdict) == (0, 0, "no difference")
    assert fewer is not None
    assert fewer.verdict == "better"
    assert fewer == compare(errors(wrong, words), errors(wrong // 2, words)), "drawn from a seed"
    assert compare([Errors(0, 0, 2, 0)], [Errors(0, 0, 0, 0)]) is None


def test_insertions_and_speakers_are_compared_beside_the_error_rate():
    """A document without a speaker's name counts for nothing in cpWER."""
    texts = [
        ("one two", "one two two two"),
        ("[S1] one [S2] two three", "[S1] one two [S2] three"),
        ("four", "five"),
    ]
    hypotheses = [Hypothesis(str(n), said, heard, 1.0, True) for n, (said, heard) in enumerate(texts)]
    found = scored_set("x", Evaluation({}, hypotheses, 3.0, 1.0), "basic", {"0": 0, "1": 1, "2": 2})
    measures = found.compared_by()
    assert [each.wrong for each in found.errors()] == [2, 0, 1]
    assert [(each.wrong, each.total) for each in measures["insertions"]] == [(2, 2), (0, 3), (0, 1)]
    assert [(each.wrong, each.total) for each in measures["cpwer"]] == [(0, 0), (2, 3), (0, 0)]
    alone = scored_set("x", Evaluation({}, hypotheses[:1], 1.0, 1.0), "basic", {"0": 0})
    assert list(alone.compared_by()) == ["insertions"]
