"""Joins the texts of two windows that overlap: what both heard is told once."""

import re
from collections.abc import Sequence
from itertools import product

_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Characters of writing without spaces (kana and Han), each of which counts as a word."""
WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")
TAG = re.compile(r"<(spk|ev|sty):([^<>]*)>", re.IGNORECASE)
"""Marks in transcripts: of a speaker, whose words follow; of an event or a style, which are no words."""
MOST_WORDS = 16
"""Words of each text that are compared: more than anybody says in the seconds that windows share."""
APART = 2.0
"""Words in common that a second costs by which two places are apart: about as many are said in it."""
OFF_MIDDLE = 1.0
"""Words in common that a second costs by which a place is from the middle of what both windows hear."""


def joined(left: str, right: str, *, shared: float, rates: tuple[float, float]) -> str:
    """The text of two windows, of which the second hears the end of the first again.

    shared: seconds that both hear. rates: characters that the windows of `left` and of `right` tell in a
    second; of `left` only the end need be given.
    """
    kept, left_out = _seam(left, right, shared, rates)
    head, tail = left[:kept].rstrip(), right[left_out:]
    if not left_out or not head:
        tail = tail.lstrip()
    return head + " " * bool(head and tail and not left_out) + tail


def _seam(left: str, right: str, shared: float, rates: tuple[float, float]) -> tuple[int, int]:
    """(Characters of `left` that are told, characters of `right` that are not told behind them).

    Of all places between two words, one of each text, it is the one with most words in common around it,
    apart from capitals and punctuation, less what the two are apart in time. Where nothing is in common, time
    alone decides. Of several as good it is the one in the middle of what both hear: a word that the end of a
    window cuts in two is told by the other. Characters are placed in time as if they were told evenly.
    """
    before, after = list(WORD.finditer(left))[-MOST_WORDS:], list(WORD.finditer(right))[:MOST_WORDS]
    if not before or not after or not all(rates):
        return len(left), 0
    agreed = _agreed([_plain(x[0]) for x in before], [_plain(x[0]) for x in after])
    kept = [before[0].start(), *(word.end() for word in before)]
    left_out = [0, *(word.end() for word in after)]

    def score(place: tuple[int, int]) -> float:
        i, j = place
        in_left, in_right = shared - (len(left) - kept[i]) / rates[0], left_out[j] / rates[1]
        off = abs(in_left + in_right - shared) / 2
        return agreed[i][j] - APART * abs(in_left - in_right) - OFF_MIDDLE * off

    i, j = max(product(range(len(kept)), range(len(left_out))), key=score)
    return kept[i], left_out[j]


def _agreed(before: Sequence[str], after: Sequence[str]) -> list[list[int]]:
    """The words in common around each place: those that end there in both, and those that begin there."""
    rows, columns = len(before), len(after)
    ending, beginning = ([[0] * (columns + 1) for _ in range(rows + 1)] for _ in range(2))
    for i, j in product(range(rows), range(columns)):
        if before[i] and before[i] == after[j]:
            ending[i + 1][j + 1] = ending[i][j] + 1
    for i, j in product(reversed(range(rows)), reversed(range(columns))):
        if before[i] and before[i] == after[j]:
            beginning[i][j] = beginning[i + 1][j + 1] + 1
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(ending, beginning, strict=True)]


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word.casefold())
