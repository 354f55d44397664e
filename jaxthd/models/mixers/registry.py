"""The kinds of decoder layers by letter. A new kind is a file that ends in a LayerKind, and a name here."""

from jaxthd.models.mixers import (
    attention,
    delta,
    latent_attention,
    mamba2,
    mlp,
    moe,
    window_attention,
)
from jaxthd.models.mixers.contract import LayerKind

LAYER_KINDS = {
    kind.letter: kind
    for kind in (
        mamba2.KIND,
        delta.KIND,
        attention.KIND,
        window_attention.KIND,
        latent_attention.KIND,
        mlp.KIND,
        moe.KIND,
    )
}
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
