"""Tasks of the synthetic sets: the words of a recording, and what its line asks and answers.

A task draws from random numbers and the split, "train" or "validation". What a recording of the one split
says, if it is two words or more, no recording of the other does; but there are only a hundred sums.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxthd.data.text.synthetic import (
    CODES,
    ENGLISH,
    NAMES,
    TELEPHONE,
    Words,
    digits_of,
    draw_sum,
    draw_text,
)

PACE = 120, 200
"""Words a minute, at least and below."""


class Spoken(NamedTuple):
    """parts: (number of the speaker, text), said one after the other. fields: of the manifest's line.

    pauses: seconds between two parts, at least and at most. noisy: whether there is noise behind it all.
    pace: as PACE.
    """

    parts: list[tuple[int, str]]
    fields: dict[str, Any]
    pauses: tuple[float, float] = (0.15, 0.4)
    noisy: bool = False
    pace: tuple[int, int] = PACE


Task = Callable[[np.random.Generator, str], Spoken]
DICTATED = 12.0
"""Seconds of the longest dictation, about."""
_TEXT, _WORD = 46, 33
"""A text of n words takes about (_TEXT + _WORD * n) / pace seconds, as espeak-ng says it."""


def transcribed(rng: np.random.Generator, split: str, words: Words = ENGLISH, language: str = "") -> Spoken:
    """Digits, single words or commands, and their transcript."""
    text = _of_split(lambda: draw_text(rng, words), split)
    return Spoken([(0, text)], {"text": text, **({"language": language} if language else {})})


def added(rng: np.random.Generator, split: str, answered: bool = False) -> Spoken:
    """A sum of two digits, to be added. answered: whether the line has the answer in words, too."""
    text, number = draw_sum(rng)
    fields = {"context": "add", "answer": number} | ({"text": digits_of(number)} if answered else {})
    return Spoken([(0, text)], fields)


def questioned(rng: np.random.Generator, split: str) -> Spoken:
    """Digits or a command, a written question on what is said, and its answer in a word or a few."""
    if rng.random() < 0.5:
        digits = _of_split(lambda: " ".join(_digits(rng, 2, 9)), split).split()
        said, answers = " ".join(digits), {"first": digits[0], "last": digits[-1]}
        answers["how many"] = digits_of(len(digits))
    else:
        parts: list[str] = []

        def command() -> str:
            parts[:] = [str(rng.choice(each)) for each in (ENGLISH.verbs, ENGLISH.things, ENGLISH.endings)]
            return f"{parts[0]} the {parts[1]} {parts[2]}"

        said = _of_split(command, split)
        answers = dict(zip(("do what", "which thing", "and"), parts, strict=True))
    asked = str(rng.choice(list(answers)))
    return Spoken([(0, said)], {"context": asked, "text": answers[asked]})


def telephoned(rng: np.random.Generator, split: str, listed: bool = False) -> Spoken:
    """Words of telephone systems, codes, and commands with names, half of which only a list can spell.

    listed: whether the line's context lists the names that are said, among up to three others.
    """
    names: list[str] = []

    def text() -> str:
        names.clear()
        kind = rng.random()
        if kind < 0.2:
            return str(rng.choice(TELEPHONE.single))
        if kind < 0.45:
            return " ".join(rng.choice(CODES, rng.integers(2, 6)))
        names.extend(_different(rng, 1 + (rng.random() < 0.3)))
        said = f"{rng.choice(TELEPHONE.verbs)} {TELEPHONE.joint.join(names)}"
        return f"{said} {rng.choice(TELEPHONE.endings)}" if rng.random() < 0.4 else said

    said = _of_split(text, split)
    if not listed:
        return Spoken([(0, said)], {"text": said})
    (of_list,) = rng.spawn(1)  # the recordings are the same with lists and without
    others = _different(of_list, int(of_list.integers(not names, 4)), names)
    return Spoken([(0, said)], {"context": " ".join(of_list.permutation([*names, *others])), "text": said})


def conversed(rng: np.random.Generator, split: str) -> Spoken:
    """One or two speakers, who say up to four texts; the transcript names the speaker where that changes."""
    parts: list[tuple[int, str]] = []

    def text() -> str:
        count = rng.choice(4, p=(0.2, 0.4, 0.25, 0.15)) + 1
        speakers = [0, *rng.integers(0, 2, count - 1).tolist()]
        parts[:] = [(speaker, _short(rng)) for speaker in speakers]
        said, last = [], None
        for speaker, each in parts:
            said.append(each if speaker == last else f"[S{speaker + 1}] {each}")
            last = speaker
        return " ".join(said)

    said = _of_split(text, split)
    return Spoken(parts, {"text": said})


def interrupted(rng: np.random.Generator, split: str) -> Spoken:
    """Digits or a command, with one or two pauses between the words, before some noise; the transcript."""

    def text() -> str:
        return " ".join(_digits(rng, 2, 8)) if rng.random() < 0.6 else _command(rng)

    words = _of_split(text, split).split()
    pauses = min(len(words) - 1, int(rng.integers(1, 3)))
    cuts = sorted(rng.choice(np.arange(1, len(words)), pauses, replace=False))
    parts = [" ".join(each) for each in np.split(words, cuts)]
    return Spoken([(0, part) for part in parts], {"text": " ".join(words)}, pauses=(0.3, 1.5), noisy=True)


def dictated(rng: np.random.Generator, split: str) -> Spoken:
    """Up to about 12 s of a dictation, at any pace: texts in a row, the first from some word on, the last to
    some word; the transcript."""
    pace, pauses = int(rng.integers(*PACE)), (0.05, 0.6)
    parts: list[list[str]] = []

    def text() -> str:
        parts.clear()
        left, first = pace * rng.uniform(0.5, DICTATED), draw_text(rng).split()
        each = first[rng.integers(len(first)) :]
        while not parts or left >= _TEXT + _WORD:
            parts.append(each[: max(int((left - _TEXT) / _WORD), 1)])
            left -= _TEXT + _WORD * len(parts[-1]) + pace * pauses[1]
            each = draw_text(rng).split()
        return " ".join(word for part in parts for word in part)

    said = _of_split(text, split)
    spoken = [(0, " ".join(part)) for part in parts]
    return Spoken(spoken, {"text": said}, pauses=pauses, pace=(pace, pace + 1))


def _command(rng: np.random.Generator) -> str:
    return f"{rng.choice(ENGLISH.verbs)} the {rng.choice(ENGLISH.things)}"


def _digits(rng: np.random.Generator, least: int, most: int) -> list[str]:
    return list(rng.choice(ENGLISH.digits, min(least - 1 + rng.geometric(0.35), most)))


def _short(rng: np.random.Generator) -> str:
    """Up to four digits, a word, or a command."""
    kind = rng.random()
    if kind < 0.5:
        return " ".join(_digits(rng, 1, 4))
    if kind < 0.7:
        return str(rng.choice(ENGLISH.single))
    return _command(rng)


def _different(rng: np.random.Generator, count: int, taken: list[str] | None = None) -> list[str]:
    """So many names, of which no two sound alike, nor like one of those taken."""
    pairs = [pair for pair in NAMES if not set(pair) & set(taken or ())]
    chosen = rng.choice(len(pairs), count, replace=False)
    return [str(rng.choice(pairs[n])) for n in chosen]


def _of_split(draw: Callable[[], str], split: str) -> str:
    """Draws texts until one belongs to the split."""
    text = draw()
    while held_out(text) != (split == "validation"):
        text = draw()
    return text


def held_out(text: str) -> bool:
    """Whether the text is in the held-out tenth of the texts of two words or more.

    It depends on neither sizes nor seed. The texts of one word are few: held out, two or three of them would
    be most of the validation set, and training would teach that those words never stand alone.
    """
    return " " in text and hashlib.blake2b(text.encode(), digest_size=8).digest()[0] % 10 == 0
