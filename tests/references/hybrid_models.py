"""Writes NAME.npz for each of VARIANTS: tiny random hybrid language models of the transformers library.

    python -m tests.references.hybrid_models [--checkpoints FOLDER]

As text_models.py says, with the same keys and names; about half a minute.

    bamba               two groups, biases everywhere, a third of the time steps clamped from both sides
    granite_hybrid      experts beside a shared MLP, no positions, four multipliers, the head tied
    falcon_h1           no norm in Mamba2, which is wider than the model; all factors
    falcon_h1_norm      a norm of three groups before the gate, biases everywhere, the head tied
    lfm2                biases of convolutions, an MLP whose width follows from the fields
    olmo_hybrid         norms before and after, negative eigenvalues, no positions
    olmo_hybrid_rotary  biases of attention, rotary positions, a tied head, rates of at most 1
    granite_dense       MLPs alone, rotary positions, biases of attention, a head narrower than its share
"""

from typing import Any

from tests.references.common import arguments, write
from tests.references.text_models import reference

BAMBA: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_state": 9,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
GRANITE: dict[str, Any] = {
    **BAMBA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}
FALCON: dict[str, Any] = {
    **BAMBA,
    "num_hidden_layers": 2,
    "intermediate_size": 39,
    "mlp_multipliers": [1.7, 0.6],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 1.5],
}
OLMO: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 39,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "pad_token_id": None,
    "eos_token_id": 2,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            **BAMBA,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "intermediate_size": 39,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "time_step_limit": (0.05, 0.3),
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "intermediate_size": 13,
            "shared_intermediate_size": 21,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "experts_implementation": "eager",
            "tie_word_embeddings": True,
        },
    ),
    "granite_dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 21,
            "head_dim": 6,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "vocab_size": 48,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 39,
            "block_multiple_of": 11,
            "block_ffn_dim_multiplier": 1.1,
            "conv_L_cache": 4,
            "conv_bias": True,
            "pad_token_id": None,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", OLMO),
    "olmo_hybrid_rotary": (
        "OlmoHybrid",
        {
            **OLMO,
            "attention_bias": True,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **FALCON,
            "mamba_d_ssm": 36,
            "mamba_n_groups": 2,
            "mamba_rms_norm": False,
            "lm_head_multiplier": 0.4,
            "embedding_multiplier": 3.0,
        },
    ),
    "falcon_h1_norm": (
        "FalconH1",
        {
            **FALCON,
            "mamba_d_ssm": 18,
            "mamba_n_groups": 3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
"""The library's class, without its ending, and the fields of its config."""


def main() -> None:
    options = arguments(__doc__)
    for name in options.only or VARIANTS:
        write(name, options, lambda seed, folder, name=name: reference(*VARIANTS[name], seed, folder))  # type: ignore[misc]


if __name__ == "__main__":
    main()
