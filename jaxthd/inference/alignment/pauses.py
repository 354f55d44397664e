"""The pauses between words: where sound stops and begins again.

CTC is sure of where a label begins, and then says blank: a word's last label says little about its end. So
the frames between the last label of a word and the first one of the next are looked at. Those that are quiet
are the pause between the words.

Legend: W words, N frames of the recording.
"""

import numpy as np
from jaxtyping import Float, Int

QUIET = 0.3
"""The loudness that a frame of a pause has at most, from the quietest one around it (0) to the words (1)."""
LEAST_RANGE = 0.5
"""The least difference between quiet and loud, in the bands' standard deviations; below there is no pause."""


def between_pauses(
    loudness_N: Float[np.ndarray, " N"], first: Int[np.ndarray, "W 2"], last: Int[np.ndarray, "W 2"]
) -> tuple[Int[np.ndarray, " W"], Int[np.ndarray, " W"]]:
    """(The frame at which each word begins, the frame at which it ends).

    first, last: frames of the words' first and last labels, (from, to). Words without a pause between them
    meet where the later one's first label begins.
    """
    starts, ends = first[:, 0].copy(), last[:, 1].copy()
    spoken = np.concatenate([loudness_N[a:b] for a, b in zip(starts, ends, strict=True)])
    loud = float(np.median(spoken))
    befores = [None, *last[:, 0].tolist()]
    afters = [*first[:, 1].tolist(), None]
    for number, (before, after) in enumerate(zip(befores, afters, strict=True)):
        part = loudness_N[before:after]
        least = float(part.min(initial=loud))
        is_quiet = (part < least + QUIET * (loud - least)) & (loud - least > LEAST_RANGE)
        quiet = np.flatnonzero(is_quiet) + (before or 0)
        if before is not None:
            meets = len(loudness_N) if after is None else starts[number]
            ends[number - 1] = quiet[0] if len(quiet) else meets
        if after is not None and len(quiet):
            starts[number] = quiet[-1] + 1
    return starts, np.maximum(ends, starts + 1)
