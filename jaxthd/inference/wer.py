"""Word and character errors of hypotheses against references, after a text normaliser.

Normalisers are Whisper's (Radford et al., 2022, appendix C), from whisper_normalizer; jiwer aligns the texts.
Before "basic" and "english", characters that are typed for one another become one. Without that, Whisper's
for English reads "don't" as "do not", but with U+2019 for the apostrophe as "don t".
"""

import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import jiwer

from jaxthd.errors import UserError

with warnings.catch_warnings():
    # A docstring of the package causes this warning when Python compiles it.
    warnings.filterwarnings("ignore", "invalid escape sequence")
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

Normaliser = Literal["basic", "english", "whisper", "none"]
Unit = Literal["words", "characters"]
_APOSTROPHES = "\u2019\u2018\u201b\u02bc\u02bb\u02b9\u2032\uff07\u055a\u0060\u00b4"
"""Characters that are typed for an apostrophe: quotation marks, modifier letters, primes, accents alone."""
_INVISIBLE = (
    *(0xAD, 0x34F, 0x61C, 0x180E, 0x200B, 0x200E, 0x200F, 0xFEFF),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2070),
    *range(0xFE00, 0xFE10),
)
"""Soft hyphen, zero-width space, byte order mark, directions, word joiner, variation selectors. Not the
zero-width joiner and non-joiner, with which Persian and Indic scripts spell words."""
_SEEN = str.maketrans(dict.fromkeys(_INVISIBLE, ""))
_TYPED = str.maketrans(dict.fromkeys(_APOSTROPHES, "'") | {"\u2026": "...", "\u0640": ""})
"""U+0640 lengthens an Arabic letter."""


def make_normaliser(name: str) -> Callable[[str], str]:
    """Returns the function that normalises a text to words with single spaces between them.

    "basic" is Whisper's, but keeps combining marks, with which some scripts spell vowels. "whisper" is
    Whisper's for English as it was published; "english" is that after characters are unified (typed). "none"
    leaves what is seen. name: a Normaliser. Raises UserError for another.
    """
    rules: dict[str, Callable[[str], str]] = {
        "basic": _after(typed, BasicTextNormalizer(preserve_marks=True)),
        "english": _after(typed, EnglishTextNormalizer()),
        "whisper": EnglishTextNormalizer(),
        "none": seen,
    }
    if name not in rules:
        raise UserError(
            f"the normaliser is {name!r}; expected one of {', '.join(rules)}: correct train.normaliser"
        )
    normalise = rules[name]
    return lambda text: " ".join(normalise(text).split())


def _after(first: Callable[[str], str], then: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: then(first(text))


def seen(text: str) -> str:
    """Returns the text in composed form (NFC), without characters that cannot be seen."""
    return unicodedata.normalize("NFC", text.translate(_SEEN))


def typed(text: str) -> str:
    """Returns `seen`, with one character for each of those that are typed for one another."""
    return seen(text).translate(_TYPED)


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
