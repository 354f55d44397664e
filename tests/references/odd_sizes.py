"""Writes references of one family of hybrid decoders with settings drawn at random, odd where they may be.

    python -m tests.references.odd_sizes FAMILY --out FOLDER --seed N [--count K]   # torch and transformers

FOLDER/CHECK-N is the checkpoint as save_pretrained writes it, FOLDER/CHECK-N.npz what text_models.py says, of
K seeds from N on. A family is a name of DRAWN.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.references.common import MARGIN
from tests.references.text_models import reference

Draw = random.Random


def _heads(
    draw: Draw, share: str = "num_key_value_heads", whole: str = "num_attention_heads"
) -> dict[str, int]:
    """Sizes of attention: `whole` is a multiple of `share`."""
    few = draw.choice((1, 2, 3))
    return {share: few, whole: few * draw.choice((1, 2, 3))}


def _rope(draw: Draw, axes: bool = False) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.choice((1e2, 1e3, 1e6))}
    if draw.random() < 0.3:
        rope |= {"rope_type": "linear", "factor": 2.0}
    if axes and draw.random() < 0.6:
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return rope


def _types(draw: Draw, most: int = 4) -> dict[str, Any]:
    """Both kinds of layers, in any order."""
    types = ["linear_attention", "full_attention"]
    types += draw.choices(types, k=draw.randint(0, most - 2))
    draw.shuffle(types)
    return {"layer_types": types, "num_hidden_layers": len(types)}


def qwen3_5(draw: Draw) -> dict[str, Any]:
    """Fields of Qwen3.5's dense decoder."""
    return {
        "vocab_size": draw.randint(30, 60),
        "hidden_size": draw.randint(9, 33),
        "intermediate_size": draw.randint(5, 40),
        **_heads(draw),
        **_heads(draw, "linear_num_key_heads", "linear_num_value_heads"),
        "head_dim": 2 * draw.randint(4, 12),
        "linear_key_head_dim": draw.randint(1, 19),
        "linear_value_head_dim": draw.randint(1, 19),
        "linear_conv_kernel_dim": draw.randint(2, 4),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": _rope(draw, axes=True) | {"partial_rotary_factor": draw.choice((0.25, 0.5, 1.0))},
        **_types(draw),
    }


def qwen3_5_moe(draw: Draw) -> dict[str, Any]:
    """Fields of Qwen3.5's decoder with experts."""
    fields, experts = qwen3_5(draw), draw.randint(2, 7)
    del fields["intermediate_size"]
    return fields | {
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts - 1),
        "moe_intermediate_size": draw.randint(3, 20),
        "shared_expert_intermediate_size": draw.randint(3, 20),
    }


DRAWN: dict[str, tuple[str, Callable[[Draw], dict[str, Any]]]] = {
    "qwen3_5": ("Qwen3_5", qwen3_5),
    "qwen3_5_moe": ("Qwen3_5Moe", qwen3_5_moe),
}
"""The library's class, without its ending, and what draws the fields of its config."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=DRAWN)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    kind, drawn = DRAWN[options.family]
    for seed in range(options.seed, options.seed + options.count):
        fields, weights = drawn(Draw(seed)), 1000 * seed
        if "num_experts" in fields:
            fields["experts_implementation"] = "eager"  # others want sizes that 16 bytes divide
        folder = options.out / f"{options.family}-{seed}"
        while (out := reference(kind, fields, weights, folder))["margin"] < MARGIN / 10:
            weights += 1
        np.savez_compressed(folder.with_suffix(".npz"), **out)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
