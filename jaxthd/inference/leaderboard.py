"""The Open ASR leaderboard's normaliser of English: Whisper's, with rules that the leaderboard has added.

The rules are those of github.com/huggingface/open_asr_leaderboard as of August 2026: more fillers, fewer
contractions, names and compounds that are spelled in several ways (leaderboard.toml), acronyms that are
spelled letter by letter. tests/references/leaderboard.json holds what that code makes of texts.
"""

import re
import tomllib
import warnings
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # A docstring of the package causes this warning when Python compiles it.
    warnings.filterwarnings("ignore", "invalid escape sequence")
    from whisper_normalizer.english import EnglishTextNormalizer

_OWN_CONTRACTIONS = (r"\bkinda\b", r"\bsorta\b", r"\bdunno\b", r"\bcause\b")
"""Contractions that whisper_normalizer writes out, and Whisper and the leaderboard do not."""


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("leaderboard.toml").read_text(encoding="utf-8"))


class LeaderboardNormaliser:
    """Normalises English texts as the leaderboard does; call it with a text."""

    def __init__(self) -> None:
        tables, self._whisper = _tables(), EnglishTextNormalizer()
        self._whisper.ignore_patterns = rf"\b({'|'.join(tables['fillers'])})\b"
        # An 's after another word is a genitive, and loses its apostrophe alone.
        named = rf"\b({'|'.join(tables['before_is'])})'s\b"
        self._whisper.replacers = {
            named if pattern == r"'s\b" else pattern: r"\1 is" if pattern == r"'s\b" else words
            for pattern, words in self._whisper.replacers.items()
            if pattern not in _OWN_CONTRACTIONS
        }
        self._compounds = {
            re.compile(r"\b" + form.replace(" ", r"\s+") + r"\b"): word
            for word, forms in tables["compounds"].items()
            for form in forms
        }
        american = self._whisper.standardize_spellings.mapping
        self._spellings = {k: v for k, v in american.items() if k not in tables["kept"]}
        self._spellings |= _by_variant(tables["spellings"])
        self._names = _by_variant(tables["names"])
        # The two steps of Whisper's that have further ones before and after them.
        numbers = self._whisper.standardize_numbers
        self._whisper.standardize_numbers = lambda text: numbers(self._with_compounds(text))
        self._whisper.standardize_spellings = self._respelled

    def __call__(self, text: str) -> str:
        return str(self._whisper(text))

    def _with_compounds(self, text: str) -> str:
        for pattern, word in self._compounds.items():
            text = pattern.sub(word, text)
        return text

    def _respelled(self, text: str) -> str:
        words = [self._spellings.get(word, word) for word in text.split()]
        return " ".join(_with_acronyms([self._names.get(word, word) for word in words]))


def _by_variant(table: dict[str, list[str]]) -> dict[str, str]:
    return {variant: word for word, variants in table.items() for variant in variants}


def _with_acronyms(words: list[str]) -> list[str]:
    """Joins letters and digits that stand alone in a row: two or more, or three where "a" or "i" is one."""
    joined: list[str] = []
    for alone, run in groupby(words, lambda word: len(word) == 1 and word.isalnum()):
        found = list(run)
        least = 3 if {"a", "i"} & set(found) else 2
        joined += ["".join(found)] if alone and len(found) >= least else found
    return joined
