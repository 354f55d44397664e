"""The decoder's mixers, by kind of layer. A new kind is a file that ends in a LayerKind, and a line here."""

from jaxthd.models.mixers import attention, mamba2, mlp, moe
from jaxthd.models.mixers.attention import Attention
from jaxthd.models.mixers.interface import LayerKind, Mixer, Prefilled, RoutedMixer, Routing
from jaxthd.models.mixers.mamba2 import Mamba2
from jaxthd.models.mixers.mlp import MLP
from jaxthd.models.mixers.moe import MoE

__all__ = [
    "LAYER_KINDS",
    "MLP",
    "Attention",
    "LayerKind",
    "Mamba2",
    "Mixer",
    "MoE",
    "Prefilled",
    "RoutedMixer",
    "Routing",
    "layer_kind",
    "letters_and_titles",
]

LAYER_KINDS = {kind.letter: kind for kind in (mamba2.KIND, attention.KIND, mlp.KIND, moe.KIND)}
"""By the letter of model.llm.pattern."""


def layer_kind(letter: str) -> LayerKind:
    """Raises ValueError for a letter that no kind has."""
    if letter not in LAYER_KINDS:
        raise ValueError(
            f"unknown letter {letter!r} in model.llm.pattern; expected one of {letters_and_titles()}: "
            "correct the pattern"
        )
    return LAYER_KINDS[letter]


def letters_and_titles() -> str:
    """ "M (Mamba2), * (attention), ...", for messages."""
    return ", ".join(f"{letter} ({kind.title})" for letter, kind in LAYER_KINDS.items())
