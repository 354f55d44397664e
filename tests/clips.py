"""Recordings for tests. Worker processes import this: no jax, no grain."""

from collections.abc import Sequence

import numpy as np

from jaxthd.packing.document import AudioPiece


def clip_of(chunks: Sequence[np.ndarray]) -> list[AudioPiece]:
    """A recording whose encoder chunks have these features: a token for each eight frames."""
    return [AudioPiece(x, 0, -(-len(x) // 8), begins=not number) for number, x in enumerate(chunks)]
