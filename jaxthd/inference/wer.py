"""Word and character errors of hypotheses against references, after a text normaliser.

Normalisers are Whisper's (Radford et al., 2022, appendix C), from whisper_normalizer, and the Open ASR
leaderboard's (jaxthd/inference/leaderboard.py); kaldialign aligns the texts, as it does there. Before "basic"
and "english", characters that are typed for one another become one. Without that, Whisper's for English reads
"don't" as "do not", but with U+2019 for the apostrophe as "don t".
"""

import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import kaldialign

from jaxthd.errors import UserError
from jaxthd.inference.leaderboard import LeaderboardNormaliser

with warnings.catch_warnings():
    # A docstring of the package causes this warning when Python compiles it.
    warnings.filterwarnings("ignore", "invalid escape sequence")
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

Normaliser = Literal["basic", "english", "whisper", "leaderboard", "none"]
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
_WITHOUT_SPACES = (
    *((0x0E00, 0x0F00), (0x0F00, 0x10A0), (0x1780, 0x1800), (0x3005, 0x3100), (0x31F0, 0x3200)),
    *((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0xFF66, 0xFFA0), (0x20000, 0x32400)),
)
"""Ranges of code points. Hangul is not among them: Korean has spaces."""


def make_normaliser(name: str) -> Callable[[str], str]:
    """Returns the function that normalises a text to words with single spaces between them.

    "basic" is Whisper's, but keeps combining marks, with which some scripts spell vowels. "whisper" is
    Whisper's for English as it was published; "english" is that after characters are unified (typed);
    "leaderboard" is what the Open ASR leaderboard made of Whisper's. "none" leaves what is seen. name: a
    Normaliser. Raises UserError for another.
    """
    rules: dict[str, Callable[[str], str]] = {
        "basic": _after(typed, BasicTextNormalizer(preserve_marks=True)),
        "english": _after(typed, EnglishTextNormalizer()),
        "whisper": EnglishTextNormalizer(),
        "leaderboard": LeaderboardNormaliser(),
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


def merges_compounds(normaliser: Normaliser) -> bool:
    """Whether "white paper" for "whitepaper" is no error, in either direction: on the leaderboard."""
    return normaliser == "leaderboard"


def errors_of(
    references: Sequence[str], hypotheses: Sequence[str], unit: Unit = "words", *, compounds: bool = False
) -> list[Errors]:
    """The errors of each pair, from the alignment with the fewest errors. Texts are normalised already.

    compounds: see merges_compounds; it counts for words alone.
    """
    found = []
    for texts in zip(references, hypotheses, strict=True):
        said, heard = (text.split() if unit == "words" else list(text) for text in texts)
        merged = compounds and unit == "words"
        counts = kaldialign.edit_distance(said, heard, merge_compounds=merged)
        substituted, deleted, inserted = (int(counts[name]) for name in ("sub", "del", "ins"))
        found.append(Errors(substituted, deleted, inserted, len(said)))
    return found


def aligned_words(reference: str, hypothesis: str, *, compounds: bool = False) -> list[tuple[str, str]]:
    """Pairs (reference word, hypothesis word) of the alignment with the fewest errors; "" for a missing word.

    compounds: see merges_compounds; words that are merged stand in one pair, with spaces between them.
    """
    words = reference.split(), hypothesis.split()
    return [(a, b) for a, b in kaldialign.align(*words, "", merge_compounds=compounds)]


def differs(reference: str, hypothesis: str) -> bool:
    """Whether the two of a pair of aligned_words are an error."""
    return reference.replace(" ", "") != hypothesis.replace(" ", "")


def is_without_spaces(texts: Iterable[str]) -> bool:
    """Whether most letters of the texts are of scripts that put no spaces between words: Han, Kana, Thai,
    Lao, Khmer, Myanmar and Tibetan letters. Their errors are counted in characters."""
    letters = [c for text in texts for c in text if c.isalpha()]
    return 2 * sum(any(low <= ord(c) < high for low, high in _WITHOUT_SPACES) for c in letters) > len(letters)
