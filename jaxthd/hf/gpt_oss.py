"""GPT-OSS (transformers: GptOssForCausalLM).

A layer of theirs is two blocks of ours: attention, in a window or not, then experts ("WE" or "*E"). Their
experts' gates and ups are the even and the odd columns of one matrix.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.files.tensor_names import Table, in_turn
from jaxthd.hf.decoder import (
    SIZES,
    SOFTMAX_EXPERTS,
    BlockFields,
    Decoder,
    ffn_block,
    layer_types,
    paired_blocks,
)
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields
from jaxthd.models.blocks import Attention, Router

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The library's default."""
_TYPES = {"sliding_attention": "W", "full_attention": "*"}


_ATTENTION: Settings = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "bias": Field("attention_bias", True),
}


class GptOss(Decoder):
    """Checkpoints of GPT-OSS."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the library's rotary embedding where they give none."""
        has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
        rope = {"rope_theta": fields.get("rope_theta") or _ROPE["rope_theta"]}
        return {**fields, **(rope if has_rope else {"rope_parameters": _ROPE})}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: attention, in a window or not, and experts."""
        return "".join(f"{mixer}E" for mixer in layer_types(fields, _TYPES, [*_TYPES]))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The types of the layers."""
        types = {letter: name for name, letter in _TYPES.items()}
        return {"layer_types": [types[letter] for letter in llm.letters[::2]]}

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of attention and experts."""
        experts: Table = {
            "router": "router",
            "experts.gate_up_proj": in_turn("gate", "up"),
            "experts.gate_up_proj_bias": in_turn("gate_bias", "up_bias"),
            "experts.down_proj": "down",
            "experts.down_proj_bias": "down_bias",
        }
        return paired_blocks(llm, {"E": ffn_block(experts)})


GPT_OSS = GptOss(
    title="GptOssForCausalLM",
    model_types=("gpt_oss",),
    layers=("WE", "*E"),
    expected={"hidden_act": "silu"},
    sizes=SIZES,
    blocks={
        "*": BlockFields(Attention(sinks=True), _ATTENTION),
        "W": BlockFields(Attention(sinks=True, window=128), {**_ATTENTION, "window": "sliding_window"}),
        # Their softmax is over the experts chosen, which is that over all experts, normalised.
        "E": BlockFields(
            replace(
                SOFTMAX_EXPERTS, form="clamped_swiglu", bias=True, router=Router(scores="softmax", bias=True)
            ),
            {
                "experts": "num_local_experts",
                "experts_per_token": "num_experts_per_tok",
                "inner": "intermediate_size",
                "alpha": Field("swiglu_alpha", 1.702),
                "limit": Field("swiglu_limit", 7.0),
            },
        ),
    },
)
FAMILY = GPT_OSS.family()
