"""Word errors of a conversation with speakers: cpWER, the concatenated minimum-permutation word error rate.

All that a speaker says is joined, and the speakers of the hypothesis are matched with those of the reference
so that there are the fewest errors (Watanabe et al., CHiME-6 challenge, 2020): numbers of speakers are names.
"""

import re
from collections.abc import Callable

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxthd.inference.wer import Errors, errors_of

_SPEAKER = re.compile(r"(<spk:\w+>|\[S\d+\])", re.IGNORECASE)
"""The mark where a speaker's turn begins: of Nemotron's Transcribe, and of MOSS-Transcribe-Diarize."""


def turns_by_speaker(text: str) -> dict[str, str]:
    """{speaker: all that they say}, in order of their first turns; {} for a text that names no speaker.

    What stands before the first speaker's name is that speaker's too.
    """
    before, *parts = _SPEAKER.split(text)
    spoken: dict[str, str] = {}
    for name, words in zip(parts[::2], parts[1::2], strict=True):
        spoken[name] = f"{spoken.get(name, before)} {words}"
        before = ""
    return spoken


def speaker_errors(
    reference: str, hypothesis: str, normalise: Callable[[str], str], *, compounds: bool = False
) -> Errors | None:
    """The errors of the matching with the fewest; None where the reference names no speaker.

    A speaker without a counterpart is compared with silence: all words are missing, or are inserted.
    compounds: as in errors_of.
    """
    said, heard = turns_by_speaker(reference), turns_by_speaker(hypothesis)
    if not said:
        return None
    texts = [[normalise(text) for text in side.values()] for side in (said, heard or {"": hypothesis})]
    count = max(map(len, texts))
    rows, columns = ([*side, *[""] * (count - len(side))] for side in texts)
    pairs = [errors_of([row] * count, columns, compounds=compounds) for row in rows]
    costs = np.array([[errors.wrong for errors in row] for row in pairs])
    matched = [pairs[i][j] for i, j in zip(*linear_sum_assignment(costs), strict=True)]
    return Errors(*map(sum, zip(*matched, strict=True)))
