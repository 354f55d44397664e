"""How good a model is: loss, token accuracy and word error rate over a data set."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jiwer
import numpy as np
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.data.tokenizer import Tokenizer
from jaxthd.mesh import put_batch
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import find_prompts
from jaxthd.step import TrainState


class Hypothesis(NamedTuple):
    """What was decoded for a document, next to what it should be."""

    key: str
    reference: str
    hypothesis: str


def evaluate(
    config: Config,
    batches: Iterable[tuple[Batch, dict[str, Any]]],
    state: TrainState,
    step: Any,
    mesh: Mesh,
    tokenizer: Tokenizer,
) -> tuple[dict[str, float], list[Hypothesis]]:
    """Scores over all supervised tokens of the batches, and each document's decoded last answer.

    step: from make_validation_step; with new_tokens 0 nothing is decoded.
    Returns the scores ("loss": natural log, a token; "accuracy": 0 to 1, given the true tokens before; "wer":
    see word_error_rate, if anything was decoded; "documents") and hypotheses; ({}, []) if nothing is
    supervised.
    """
    sums = np.zeros(3)
    documents, hypotheses = 0, []
    for batch, report in batches:
        ends, answers = find_prompts(batch, config.mesh.context, config.data.max_documents)
        scores, tokens = step(state.params, state.buffers, put_batch(batch, mesh), ends)
        sums += np.array(scores, float)
        documents += report["documents"]
        places = ends.last.shape[1]
        if tokens.shape[1]:
            tokens_PM = np.asarray(tokens)
            for row, keys in enumerate(report["keys"]):
                for number, key in enumerate(keys):
                    place = row * places + number
                    if ends.last[row, number] >= 0:
                        texts = (
                            tokenizer.decode(answers[place]),
                            tokenizer.decode(tokens_PM[place].tolist()),
                        )
                        hypotheses.append(Hypothesis(key, *texts))
    loss, correct, count = sums
    if not count:
        return {}, []
    found = {"loss": loss / count, "accuracy": correct / count, "documents": float(documents)}
    if hypotheses:
        found["wer"] = word_error_rate(hypotheses)
    return found, hypotheses


def word_error_rate(hypotheses: Sequence[Hypothesis]) -> float:
    """Substitutions, deletions and insertions over words of the references, after normalise, over all.

    References without a word are left out; NaN if no other is there.
    """
    pairs = [(normalise(h.reference), normalise(h.hypothesis)) for h in hypotheses]
    pairs = [pair for pair in pairs if pair[0]]
    if not pairs:
        return float("nan")
    references, guesses = map(list, zip(*pairs, strict=True))
    return float(jiwer.wer(references, guesses))


def normalise(text: str) -> str:
    """Lower case, no punctuation but apostrophes inside words, single spaces (Unicode NFKC first)."""
    text = unicodedata.normalize("NFKC", text).lower().replace("’", "'")
    kept = "".join(c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return " ".join(word for word in (w.strip("'") for w in kept.split()) if word)
