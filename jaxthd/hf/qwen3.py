"""Qwen3, dense and MoE (transformers: Qwen3ForCausalLM, Qwen3MoeForCausalLM).

A layer of theirs is two blocks of ours: attention, then an MLP ("*-") or experts ("*E").
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.hf.decoder import (
    ATTENTION,
    EXPERTS,
    MLP,
    Decoder,
    dense_layers,
    ffn_block,
    layer_types,
    mixer_block,
    sparse_layers,
)
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields
from jaxthd.hf.names import Table


class Qwen3(Decoder):
    """Dense and MoE checkpoints."""

    def complete(self, fields: Fields) -> Fields:
        """The fields, with the number of experts under its older name."""
        return {**fields, "num_experts": fields.get("num_experts") or fields.get("num_local_experts")}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: attention, and experts or an MLP."""
        types = ["full_attention"]
        return sparse_layers(fields, layer_types(fields, dict.fromkeys(types, "*"), types))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The fields of a model with experts."""
        if "E" not in llm.letters:
            return {}
        return {
            "num_local_experts": llm.experts,  # what newer versions of the library write
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_layers(llm.letters),
        }

    def blocks(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of attention, MLP and experts."""
        return {"*": mixer_block(ATTENTION), "-": ffn_block(MLP), "E": ffn_block(EXPERTS)}


QWEN3 = Qwen3(
    title="Qwen3ForCausalLM",
    model_types=("qwen3",),
    layers=("*-",),
    expected={"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False},
    form={"qk_norm": True},
    sizes={
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "norm_eps": "rms_norm_eps",
        "q_heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn_dim": "intermediate_size",
        "head_dim": Field(
            "head_dim", read=lambda x, fields: x or fields["hidden_size"] // fields["num_attention_heads"]
        ),
        "tied_embedding": Field("tie_word_embeddings", False),
    },
    moe_form={},
    moe_sizes={
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "router_normalised": Field("norm_topk_prob", False),
    },
)
QWEN3_MOE = replace(QWEN3, title="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), layers=("*-", "*E"))
FAMILIES = (QWEN3.family(), QWEN3_MOE.family())
