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


def _key_dim(draw: Draw) -> int:
    """The dim of a delta rule's keys, which have length 1. With one feature they are 1 or -1 whatever makes
    them, and the gradient is what an epsilon leaves of it: there the library itself is 4e-4 from float64."""
    return max(2, draw.randint(1, 19))


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
        "linear_key_head_dim": _key_dim(draw),
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


def _mamba(draw: Draw) -> dict[str, Any]:
    """Fields of Mamba2: heads that divide a multiple of the model's dim, and groups that divide the heads."""
    groups, dim = draw.choice((1, 2, 3)), draw.choice((2, 4, 6))
    heads = groups * draw.choice((1, 2, 4))
    return {
        "hidden_size": heads * dim * 2,
        "mamba_expand": draw.choice((1, 2, 3)),
        "mamba_n_heads": heads * draw.choice((1, 2)),
        "mamba_d_state": draw.choice((1, 5, 16)),
        "mamba_n_groups": groups,
        "mamba_d_conv": draw.choice((2, 3, 4)),
        "mamba_chunk_size": draw.choice((4, 16, 64)),
        "mamba_conv_bias": draw.random() < 0.7,
        "mamba_proj_bias": draw.random() < 0.5,
        "time_step_limit": draw.choice(((0.0, float("inf")), (0.05, 0.3), (0.0, 0.1))),
    }


def _attention(draw: Draw) -> dict[str, Any]:
    """Fields of attention with rotary positions, and of what is around the layers."""
    return {
        "vocab_size": draw.randint(30, 60),
        "num_hidden_layers": draw.randint(1, 4),
        "intermediate_size": draw.randint(5, 40),
        **_heads(draw),
        "head_dim": 4 * draw.randint(1, 4),
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": _rope(draw),
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": None,
    }


def bamba(draw: Draw) -> dict[str, Any]:
    """Fields of Bamba's decoder."""
    fields = {**_attention(draw), **_mamba(draw), "mlp_bias": draw.random() < 0.5}
    layers = [i for i in range(fields["num_hidden_layers"]) if draw.random() < 0.5]
    return fields | {"attn_layer_indices": draw.choice((layers, layers, None))}


def granitemoehybrid(draw: Draw) -> dict[str, Any]:
    """Fields of Granite 4's decoder, with experts or without."""
    fields, experts = {**_attention(draw), **_mamba(draw)}, draw.choice((0, 2, 5, 8))
    kinds = ["linear_attention", "full_attention"]
    return fields | {
        "layer_types": draw.choices(kinds, k=fields["num_hidden_layers"]),
        "shared_intermediate_size": draw.randint(3, 30),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, max(experts - 1, 1)),
        "position_embedding_type": draw.choice((None, "nope", "rope")),
        "embedding_multiplier": draw.choice((1.0, 12, 0.3)),
        "residual_multiplier": draw.choice((1.0, 0.22)),
        "attention_multiplier": draw.choice((1.0, 0.0078125, 0.3)),
        "logits_scaling": draw.choice((1.0, 6, 0.7)),
    }


def falcon_h1(draw: Draw) -> dict[str, Any]:
    """Fields of Falcon-H1's decoder."""
    fields, has_bias = {**_attention(draw), **_mamba(draw)}, draw.random() < 0.5
    names = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")

    def factors(count: int) -> list[float]:
        """So many factors."""
        return draw.choices((1.0, 0.3, 1.7), k=count)

    return fields | {
        "mamba_d_ssm": draw.choice((None, fields["mamba_n_heads"] * draw.choice((2, 6)))),
        "mamba_proj_bias": has_bias,
        "projectors_bias": has_bias,
        "mamba_rms_norm": draw.random() < 0.7,
        "mamba_norm_before_gate": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        **{f"{name}_multiplier": factor for name, factor in zip(names, factors(7), strict=True)},
        "mlp_multipliers": draw.choice((None, factors(2))),
        "ssm_multipliers": draw.choice((None, factors(5))),
    }


def lfm2(draw: Draw) -> dict[str, Any]:
    """Fields of LFM2's decoder, some under older names."""
    fields = _attention(draw)
    layers, width = fields["num_hidden_layers"], fields.pop("intermediate_size")
    which = [i for i in range(layers) if draw.random() < 0.5]
    kinds = {"layer_types": draw.choices(("conv", "full_attention"), k=layers)}
    return fields | {
        **draw.choice((kinds, {"full_attn_idxs": which})),
        "hidden_size": draw.randint(9, 40),  # in fewer the library itself loses digits
        "norm_eps": fields.pop("rms_norm_eps"),
        "conv_bias": fields.pop("attention_bias"),
        "conv_L_cache": draw.randint(1, 4),
        draw.choice(("intermediate_size", "block_ff_dim")): width,
        "block_multiple_of": draw.choice((1, 8, 256)),
        "block_ffn_dim_multiplier": draw.choice((0.7, 1.0, 1.3)),
        "block_auto_adjust_ff_dim": draw.random() < 0.5,
    }


NO_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
"""Special tokens inside a small vocabulary."""


def kimi_linear(draw: Draw) -> dict[str, Any]:
    """Fields of Kimi-Linear."""
    heads, groups, size = draw.randint(1, 4), draw.choice((1, 1, 2, 3)), draw.randint(2, 4)
    layers = _types(draw)
    return {
        "vocab_size": draw.randint(30, 60),
        "hidden_size": draw.randint(9, 33),
        "intermediate_size": draw.randint(5, 40),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice((None, draw.randint(3, 12))),
        "kv_lora_rank": draw.randint(3, 12),
        "qk_nope_head_dim": draw.randint(2, 12),
        "qk_rope_head_dim": draw.randint(1, 9),
        "v_head_dim": draw.randint(2, 12),
        "linear_num_heads": draw.randint(1, 5),
        "linear_head_dim": _key_dim(draw),
        "linear_conv_kernel_dim": draw.randint(2, 4),
        "num_local_experts": groups * size,
        "n_group": groups,
        "topk_group": draw.randint(1, groups),
        "num_experts_per_tok": draw.randint(1, size - 1),
        "n_shared_experts": draw.randint(1, 2),
        "moe_intermediate_size": draw.randint(3, 20),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice((1.0, 2.446)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "mlp_layer_types": draw.choices(("dense", "sparse"), k=layers["num_hidden_layers"]),
        **NO_TOKENS,
        **layers,
    }


def olmo_hybrid(draw: Draw) -> dict[str, Any]:
    """Fields of OLMo Hybrid."""
    heads = _heads(draw)
    return {
        "vocab_size": draw.randint(30, 60),
        "hidden_size": heads["num_attention_heads"] * 2 * draw.randint(2, 6),
        "intermediate_size": draw.randint(5, 40),
        **heads,
        **_heads(draw, "linear_num_key_heads", "linear_num_value_heads"),
        "linear_key_head_dim": _key_dim(draw),
        "linear_value_head_dim": draw.randint(1, 19),
        "linear_conv_kernel_dim": draw.randint(2, 4),
        "linear_allow_neg_eigval": draw.random() < 0.7,
        "attention_bias": draw.random() < 0.5,
        "rope_parameters": draw.choice(({"rope_type": "default", "rope_theta": None}, _rope(draw))),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "tie_word_embeddings": draw.random() < 0.5,
        **NO_TOKENS,
        **_types(draw),
    }


DRAWN: dict[str, tuple[str, Callable[[Draw], dict[str, Any]]]] = {
    "qwen3_5": ("Qwen3_5", qwen3_5),
    "qwen3_5_moe": ("Qwen3_5Moe", qwen3_5_moe),
    "bamba": ("Bamba", bamba),
    "granitemoehybrid": ("GraniteMoeHybrid", granitemoehybrid),
    "falcon_h1": ("FalconH1", falcon_h1),
    "lfm2": ("Lfm2", lfm2),
    "kimi_linear": ("KimiLinear", kimi_linear),
    "olmo_hybrid": ("OlmoHybrid", olmo_hybrid),
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
        if fields.keys() & {"num_experts", "num_local_experts"}:
            fields["experts_implementation"] = "eager"  # others want sizes that 16 bytes divide
        folder = options.out / f"{options.family}-{seed}"
        while (out := reference(kind, fields, weights, folder))["margin"] < MARGIN / 10:
            weights += 1
        np.savez_compressed(folder.with_suffix(".npz"), **out)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
