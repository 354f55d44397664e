"""Masks on features, in NumPy: the loader's workers draw them.

Legend: F frames, W numbers of a frame, M of which are bands.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from jaxthd.config import SpecAugmentConfig


def spec_augment(
    chunks: Sequence[Float32[np.ndarray, "_ W"]],
    masks: SpecAugmentConfig,
    rng: np.random.Generator,
    bands: int,
) -> list[Float32[np.ndarray, "_ W"]]:
    """Masks bands and time spans of one recording: sets them to 0, the mean after normalisation.

    chunks: the recording's features; returned masked. bands: how many of a frame's numbers are bands, from
    the first on; the others stay. 0: all numbers are masked over time, and no bands.
    A mask over bands has 0 to as many as data.spec_augment.freq says; one over time 0 to the share of all
    frames that data.spec_augment.time says (or 1 frame if that is less). Time masks may cross chunks. Widths
    and positions are uniform.
    Source: Park et al., SpecAugment (2019); spans that grow with the recording: Park et al. (2020).
    """
    masked_FW = np.concatenate(chunks)
    masked_FM, frames = masked_FW[:, : bands or None], len(masked_FW)
    (of_bands, widest), (of_frames, share) = masks.freq, masks.time
    for dim, length, most, count in (
        (1, bands, min(widest, bands), of_bands if bands else 0),
        (0, frames, max(1, int(share * frames)), of_frames),
    ):
        for _ in range(count):
            width = int(rng.integers(most, endpoint=True))
            start = int(rng.integers(length - width, endpoint=True))
            masked_FM[(slice(None),) * dim + (slice(start, start + width),)] = 0.0
    return np.split(masked_FW, np.cumsum([len(chunk) for chunk in chunks])[:-1])
