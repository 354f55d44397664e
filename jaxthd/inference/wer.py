"""Word and character errors between what was said and what was heard, after a text normaliser.

Normalisers are Whisper's (Radford et al., 2022, appendix C), by whisper_normalizer; alignments by jiwer.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import jiwer

with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", "invalid escape sequence"
    )  # in a docstring, where it is not compiled yet
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

Normaliser = Literal["basic", "english", "none"]
Unit = Literal["words", "characters"]


def make_normaliser(name: Normaliser) -> Callable[[str], str]:
    """Text -> what is compared: words with single spaces between them.

    "basic" keeps combining marks, without which scripts that spell vowels with them lose these; for others it
    is what Whisper's is.
    """
    rules: dict[str, Callable[[str], str]] = {
        "basic": BasicTextNormalizer(preserve_marks=True),
        "english": EnglishTextNormalizer(),
        "none": str,
    }
    normalise = rules[name]
    return lambda text: " ".join(normalise(text).split())


class Errors(NamedTuple):
    """Of words or characters. total: those of the reference."""

    substitutions: int
    deletions: int
    insertions: int
    total: int

    @property
    def wrong(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors over the reference's units; NaN where it has none."""
        return self.wrong / self.total if self.total else float("nan")


def summed(errors: Iterable[Errors]) -> Errors:
    """Over all references that are not empty: what is heard in silence counts no word."""
    return Errors(*map(sum, zip(Errors(0, 0, 0, 0), *(e for e in errors if e.total), strict=True)))


def errors_of(references: Sequence[str], hypotheses: Sequence[str], unit: Unit = "words") -> list[Errors]:
    """Of each pair, both normalised, by the alignment with the fewest errors."""
    found = [Errors(0, 0, len(h.split()) if unit == "words" else len(h), 0) for h in hypotheses]
    spoken = [i for i, reference in enumerate(references) if reference]
    if spoken:
        process = jiwer.process_words if unit == "words" else jiwer.process_characters
        aligned = process([references[i] for i in spoken], [hypotheses[i] for i in spoken]).alignments
        for i, chunks in zip(spoken, aligned, strict=True):
            found[i] = _counted(chunks)
    return found


def _counted(chunks: Sequence[jiwer.AlignmentChunk]) -> Errors:
    size = dict.fromkeys(("equal", "substitute", "delete", "insert"), 0)
    for chunk in chunks:
        spans = chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx
        size[chunk.type] += max(spans)
    substituted, deleted = size["substitute"], size["delete"]
    return Errors(substituted, deleted, size["insert"], size["equal"] + substituted + deleted)


def aligned_words(reference: str, hypothesis: str) -> list[tuple[str, str]]:
    """Pairs of words, "" where the other text has one more; both texts normalised."""
    if not reference:
        return [("", word) for word in hypothesis.split()]
    found = jiwer.process_words(reference, hypothesis)
    (said,), (heard,), (chunks,) = found.references, found.hypotheses, found.alignments
    pairs: list[tuple[str, str]] = []
    for chunk in chunks:
        before = said[chunk.ref_start_idx : chunk.ref_end_idx]
        after = heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        longest = max(len(before), len(after))
        pairs += zip(*(words + [""] * (longest - len(words)) for words in (before, after)), strict=True)
    return pairs
