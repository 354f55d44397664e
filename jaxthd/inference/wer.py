"""Word and character errors of hypotheses against references, after a text normaliser.

Normalisers are Whisper's (Radford et al., 2022, appendix C), from whisper_normalizer; jiwer aligns the texts.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import jiwer

with warnings.catch_warnings():
    # A docstring of the package causes this warning when Python compiles it.
    warnings.filterwarnings("ignore", "invalid escape sequence")
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

Normaliser = Literal["basic", "english", "none"]
Unit = Literal["words", "characters"]


def make_normaliser(name: Normaliser) -> Callable[[str], str]:
    """Returns the function that normalises a text to words with single spaces between them.

    "basic" is Whisper's, but keeps combining marks, with which some scripts spell vowels.
    """
    rules: dict[str, Callable[[str], str]] = {
        "basic": BasicTextNormalizer(preserve_marks=True),
        "english": EnglishTextNormalizer(),
        "none": str,
    }
    normalise = rules[name]
    return lambda text: " ".join(normalise(text).split())


class Errors(NamedTuple):
    """Errors in words or in characters. total: words or characters of the reference."""

    substitutions: int
    deletions: int
    insertions: int
    total: int

    @property
    def wrong(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors over `total`; NaN if that is 0."""
        return self.wrong / self.total if self.total else float("nan")


def summed(errors: Iterable[Errors]) -> Errors:
    """The sums over all non-empty references: words inserted into silence are not counted."""
    return Errors(*map(sum, zip(Errors(0, 0, 0, 0), *(e for e in errors if e.total), strict=True)))


def errors_of(references: Sequence[str], hypotheses: Sequence[str], unit: Unit = "words") -> list[Errors]:
    """The errors of each pair, from the alignment with the fewest errors. Texts are normalised already."""
    found = [Errors(0, 0, len(h.split()) if unit == "words" else len(h), 0) for h in hypotheses]
    not_empty = [i for i, reference in enumerate(references) if reference]
    if not_empty:
        process = jiwer.process_words if unit == "words" else jiwer.process_characters
        aligned = process([references[i] for i in not_empty], [hypotheses[i] for i in not_empty]).alignments
        for i, chunks in zip(not_empty, aligned, strict=True):
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
    """Aligned pairs of words; "" if the other text has an extra word. Texts are normalised already."""
    if not reference:
        return [("", word) for word in hypothesis.split()]
    found = jiwer.process_words(reference, hypothesis)
    (of_reference,), (of_hypothesis,), (chunks,) = found.references, found.hypotheses, found.alignments
    pairs: list[tuple[str, str]] = []
    for chunk in chunks:
        sides = (
            of_reference[chunk.ref_start_idx : chunk.ref_end_idx],
            of_hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx],
        )
        longest = max(map(len, sides))
        pairs += zip(*(words + [""] * (longest - len(words)) for words in sides), strict=True)
    return pairs
