"""The results of a set: errors of each document, and the figures of the whole."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxthd.evaluation.speakers import speaker_errors
from jaxthd.inference.evaluator import Evaluation, Hypothesis
from jaxthd.inference.wer import (
    Errors,
    Normaliser,
    Unit,
    errors_of,
    is_without_spaces,
    make_normaliser,
    merges_compounds,
    summed,
)


class ScoredDocument(NamedTuple):
    """A document's hypothesis with its errors.

    reference, hypothesis: after the normaliser. words, characters: errors of the hypothesis against the
    reference. speakers: word errors when speakers are matched (speaker_errors); None without speakers.
    """

    decoded: Hypothesis
    reference: str
    hypothesis: str
    words: Errors
    characters: Errors
    speakers: Errors | None


class SetResult(NamedTuple):
    """An evaluated set.

    documents: those with an answer, in the set's order. unit: what the set is judged by: characters where it
    is of languages without spaces (is_without_spaces), else words.
    """

    name: str
    found: Evaluation
    documents: list[ScoredDocument]
    unit: Unit

    def errors(self) -> list[Errors]:
        """Each document's errors in the set's unit."""
        return [getattr(document, self.unit) for document in self.documents]

    def speaker_errors(self) -> Errors | None:
        """The errors that cpWER counts, of documents whose reference names speakers; None: none does."""
        found = [document.speakers for document in self.documents if document.speakers]
        return summed(found) if found else None

    def compared_by(self) -> dict[str, list[Errors]]:
        """{measure: each document's errors} by which two models are compared beside `errors`: insertions
        alone, and "cpwer" where references name speakers (documents without any then count for nothing).
        """
        measures = {"insertions": [Errors(0, 0, each.insertions, each.total) for each in self.errors()]}
        if any(document.speakers for document in self.documents):
            measures["cpwer"] = [document.speakers or Errors(0, 0, 0, 0) for document in self.documents]
        return measures


def scored_set(name: str, found: Evaluation, normaliser: Normaliser, order: Mapping[str, int]) -> SetResult:
    """The set with the errors of its documents. order: each document's number in the set, by key.

    In a set that is judged by characters spaces do not count as such; in others they do.
    """
    decoded = sorted(found.hypotheses, key=lambda h: order[h.key])
    normalise, compounds = make_normaliser(normaliser), merges_compounds(normaliser)
    references = [normalise(h.reference) for h in decoded]
    hypotheses = [normalise(h.hypothesis) for h in decoded]
    unit: Unit = "characters" if is_without_spaces(references) else "words"
    space = "" if unit == "characters" else " "
    letters = [[text.replace(" ", space) for text in side] for side in (references, hypotheses)]
    documents = [
        ScoredDocument(*fields)
        for fields in zip(
            decoded,
            references,
            hypotheses,
            errors_of(references, hypotheses, compounds=compounds),
            errors_of(letters[0], letters[1], "characters"),
            [speaker_errors(h.reference, h.hypothesis, normalise, compounds=compounds) for h in decoded],
            strict=True,
        )
    ]
    return SetResult(name, found, documents, unit)


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
        **({"cpwer": document.speakers.rate} if document.speakers else {}),
        "words": words.pop("total"),
        **words,
    }


def set_figures(result: SetResult) -> dict[str, Any]:
    """A set's figures, for the table and for summary.json; None if there is nothing to measure.

    rtfx: seconds of audio for each second of scoring and decoding, as the Open ASR leaderboard divides them.
    cpwer: over the documents whose reference names speakers.
    """
    words, characters = (
        summed(getattr(d, unit) for d in result.documents) for unit in ("words", "characters")
    )
    speakers, seconds, found = result.speaker_errors(), result.found.audio_seconds, result.found
    return {
        "documents": int(found.scores.get("documents", 0)),
        "audio_seconds": seconds,
        "loss": found.scores.get("loss"),
        "accuracy": found.scores.get("accuracy"),
        "judged_by": result.unit,
        "wer": words.rate,
        "cer": characters.rate,
        "cpwer": speakers.rate if speakers else None,
        "words": words.total,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
        "without_words": sum(not d.reference for d in result.documents),
        "cut_off": sum(not d.decoded.ended for d in result.documents),
        "seconds": found.seconds,
        "rtfx": seconds / found.seconds if found.seconds else None,
    }
