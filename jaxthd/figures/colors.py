"""Colours of the figures: documents by their segment ids, padding, text.

Legend: T token slots of a buffer.
"""

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

HUES = ("#3b6fb6", "#d1662b", "#3f8f4f", "#8a5fb0", "#b8902a", "#2b8f96", "#b84a6b")
"""One after the other for documents, curves and ranks."""
PADDING, INK, FAINT = "#dcdcdc", "#222222", "#9a9a9a"


def hues(ids: Int[np.ndarray, "*slots"]) -> Float[np.ndarray, "*slots 3"]:
    """RGB of documents, one hue after the other by segment id; grey for padding."""
    return np.array([to_rgb(h) for h in (PADDING, *HUES)])[np.where(ids > 0, (ids - 1) % len(HUES) + 1, 0)]


def tint(rgb: Float[np.ndarray, "*slots 3"]) -> Float[np.ndarray, "*slots 3"]:
    """Lighter colours of the same hues."""
    return 0.4 * rgb + 0.6


def light(hue: str) -> str:
    """The name of a hue's tint, for legends."""
    red, green, blue = tint(np.array(to_rgb(hue)))
    return to_hex((red, green, blue))


def slot_colors(ids: Int[np.ndarray, " T"], audio: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "T 3"]:
    """RGB of each slot: the document's hue for audio, its light tint for text, grey for padding."""
    rgb = hues(ids)
    return np.where((audio | (ids == 0))[:, None], rgb, tint(rgb))


def slot_legend() -> list[Patch]:
    """Legend entries for slot_colors."""
    return [
        Patch(facecolor=HUES[0], label="audio slots of a document (encoder frames)"),
        Patch(facecolor=light(HUES[0]), label="its text tokens"),
        Patch(facecolor=PADDING, label="padding"),
    ]
