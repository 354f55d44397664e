"""Qwen3, dense and MoE (transformers: Qwen3ForCausalLM, Qwen3MoeForCausalLM).

A layer of theirs is two blocks of ours: attention, then an MLP ("*-") or experts ("*E").
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.config.listing import value_at
from jaxthd.files.tensor_names import Table
from jaxthd.hf.decoder import (
    SIZES,
    SOFTMAX_EXPERTS,
    BlockFields,
    Decoder,
    dense_layers,
    layer_types,
    paired_blocks,
    sparse_layers,
)
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields
from jaxthd.models.blocks import MLP, Attention


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
            "num_local_experts": value_at(
                llm, "blocks.E.experts"
            ),  # what newer versions of the library write
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_layers(llm.letters),
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of attention, MLP and experts."""
        return paired_blocks(llm, {})


QWEN3 = Qwen3(
    title="Qwen3ForCausalLM",
    model_types=("qwen3",),
    layers=("*-",),
    expected={"hidden_act": "silu", "use_sliding_window": False},
    sizes=SIZES,
    blocks={
        "*": BlockFields(
            Attention(qk_norm=True),
            {
                "heads": "num_attention_heads",
                "kv_heads": "num_key_value_heads",
                "head_dim": Field(
                    "head_dim",
                    read=lambda x, fields: x or fields["hidden_size"] // fields["num_attention_heads"],
                ),
                "bias": Field("attention_bias", False),
            },
        ),
        "-": BlockFields(MLP(form="swiglu"), {"inner": "intermediate_size"}),
        "E": BlockFields(
            SOFTMAX_EXPERTS,
            {
                "experts": "num_experts",
                "experts_per_token": "num_experts_per_tok",
                "inner": "moe_intermediate_size",
                "router.normalised": Field("norm_topk_prob", False),
            },
        ),
    },
)
QWEN3_MOE = replace(QWEN3, title="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), layers=("*-", "*E"))
FAMILIES = (QWEN3.family(), QWEN3_MOE.family())
