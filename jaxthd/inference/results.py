"""The results of an evaluated set: its documents with their errors, and its figures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxthd.inference.evaluator import Evaluation, Hypothesis
from jaxthd.inference.wer import Errors, Normaliser, errors_of, make_normaliser, summed


class ScoredDocument(NamedTuple):
    """A document's hypothesis with its errors.

    reference, hypothesis: after the normaliser. words, characters: errors of
    the hypothesis against the reference.
    """

    decoded: Hypothesis
    reference: str
    hypothesis: str
    words: Errors
    characters: Errors


class SetResult(NamedTuple):
    """An evaluated set. documents: those with an answer, in the set's order."""

    name: str
    found: Evaluation
    documents: list[ScoredDocument]


def scored(
    hypotheses: Sequence[Hypothesis], normaliser: Normaliser, order: Mapping[str, int]
) -> list[ScoredDocument]:
    """The hypotheses with their errors. order: each document's number in the set, by key."""
    decoded = sorted(hypotheses, key=lambda h: order[h.key])
    normalise = make_normaliser(normaliser)
    references, texts = (
        [normalise(h.reference) for h in decoded],
        [normalise(h.hypothesis) for h in decoded],
    )
    errors = errors_of(references, texts), errors_of(references, texts, "characters")
    return [ScoredDocument(*fields) for fields in zip(decoded, references, texts, *errors, strict=True)]


def most_wrong(results: Sequence[SetResult], most: int) -> list[tuple[str, ScoredDocument]]:
    """(set's name, document) of the documents with the highest word error rates; ties by number of errors."""
    wrong = [(r.name, d) for r in results for d in r.documents if d.words.total and d.words.wrong]
    wrong.sort(key=lambda x: (-x[1].words.rate, -x[1].words.wrong, x[0], x[1].decoded.key))
    return wrong[:most]


def document_line(document: ScoredDocument) -> dict[str, Any]:
    """A document's line of SET.jsonl."""
    words = document.words._asdict()
    return {
        **document.decoded._asdict(),
        "wer": document.words.rate,
        "cer": document.characters.rate,
        "words": words.pop("total"),
        **words,
    }


def set_figures(result: SetResult) -> dict[str, Any]:
    """A set's figures, for the table and for summary.json; None if there is nothing to measure."""
    words, characters = (
        summed(getattr(d, unit) for d in result.documents) for unit in ("words", "characters")
    )
    seconds = result.found.audio_seconds
    return {
        "documents": int(result.found.scores.get("documents", 0)),
        "audio_seconds": seconds,
        "loss": result.found.scores.get("loss"),
        "accuracy": result.found.scores.get("accuracy"),
        "wer": words.rate,
        "cer": characters.rate,
        "words": words.total,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
        "without_words": sum(not d.reference for d in result.documents),
        "cut_off": sum(not d.decoded.ended for d in result.documents),
        "seconds": result.found.seconds,
        "real_time_factor": result.found.seconds / seconds if seconds else None,
    }
