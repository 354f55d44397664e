"""Word error rate over all words of all references; scores of several sets; seconds of each document."""

import math

import numpy as np
import pytest

from jaxthd.config import DataConfig
from jaxthd.inference.evaluator import Hypothesis, word_error_rate
from jaxthd.inference.validation import validation_metrics
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from tests.speech_model import MELS, Spec, document


def hypotheses(*pairs: tuple[str, str]) -> list[Hypothesis]:
    return [Hypothesis(str(i), *pair, audio_seconds=1.0, ended=True) for i, pair in enumerate(pairs)]


def test_errors_are_counted_over_all_words_not_averaged_over_documents():
    """One substitution, one deletion and two insertions over 1 + 5 words."""
    pairs = hypotheses(("Stop.", "stop it now"), ("one two three four five", "one too four five"))
    assert word_error_rate(pairs) == pytest.approx(4 / 6)
    assert word_error_rate(hypotheses(("One, two!", "one two"))) == 0
    assert word_error_rate(hypotheses(("One, two!", "one two")), "none") == 1
    assert word_error_rate(hypotheses(("fifty one", "51")), "english") == 0
    assert word_error_rate(hypotheses(("one", ""))) == 1


def test_references_without_a_word_do_not_count():
    assert word_error_rate(hypotheses(("...", "noise"), ("one two", "one"))) == pytest.approx(1 / 2)
    assert math.isnan(word_error_rate(hypotheses(("...", "noise"))))


def test_metrics_of_several_sets_have_their_names_and_means():
    clean = {"loss": 1.0, "accuracy": 0.5, "documents": 3.0, "wer": 0.25}
    noisy = {"loss": 2.0, "accuracy": 0.0, "documents": 5.0}
    silent: dict[str, float] = {}

    def metrics(given: str | tuple[str, ...], *scores: dict[str, float]) -> dict[str, float]:
        return validation_metrics(DataConfig(validation_manifest=given).validation_sets, scores)

    assert metrics("dev.jsonl", clean) == {f"validation_{name}": score for name, score in clean.items()}
    found = metrics(("dev/clean.jsonl", "other=x.jsonl", "silent.jsonl"), clean, noisy, silent)
    overall = {"loss": 1.5, "accuracy": 0.25, "documents": 8.0, "wer": 0.25}
    assert {k: v for k, v in found.items() if k.count("_") == 1} == {
        f"validation_{k}": v for k, v in overall.items()
    }
    assert found["validation_clean_wer"] == 0.25
    assert found["validation_other_loss"] == 2.0
    assert "validation_other_wer" not in found
    assert not any("silent" in name for name in found)
    assert math.isnan(metrics(("a", "b"), clean, noisy | {"loss": math.nan})["validation_loss"])
    named = metrics("mine=dev.jsonl", clean)
    assert named["validation_loss"] == named["validation_mine_loss"] == 1.0
    assert metrics("dev.jsonl", silent) == {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_documents_seconds_are_those_of_its_frames(ranks: int):
    """In a buffer that two ranks share too, in whose order its tokens then lie."""
    rng = np.random.default_rng(0)
    specs = [Spec(3, (40, 17)), Spec(5), Spec(2, (70,)), Spec(1, (1,)), Spec(4)]
    documents: list[Document] = [document(str(n), spec, rng) for n, spec in enumerate(specs)]
    _, report = pack_row(
        documents,
        capacity=64,
        audio_capacity=256,
        front_end=FastConformer(num_mels=MELS),
        max_documents=8,
        context=ranks,
        audio_ranks=ranks,
    )
    want = [sum(specs[int(key)].clips) / 100 for key in report.keys]
    assert report.seconds == pytest.approx(want)
    assert report.audio_seconds == pytest.approx(sum(want))
