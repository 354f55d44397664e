"""Colours of the figures."""

import numpy as np
from jaxtyping import Float
from matplotlib.colors import to_hex, to_rgb

HUES = ("#3b6fb6", "#d1662b", "#3f8f4f", "#8a5fb0", "#b8902a", "#2b8f96", "#b84a6b")
"""One after the other for curves, documents and ranks."""
PADDING, INK, FAINT = "#dcdcdc", "#222222", "#9a9a9a"


def tint(rgb: Float[np.ndarray, "*slots 3"]) -> Float[np.ndarray, "*slots 3"]:
    """Lighter colours of the same hues."""
    return 0.4 * rgb + 0.6


def light(hue: str) -> str:
    """The name of a hue's tint, for legends."""
    red, green, blue = tint(np.array(to_rgb(hue)))
    return to_hex((red, green, blue))
