"""Qwen3-Next (transformers: Qwen3NextForCausalLM).

A layer of theirs is two blocks of ours: the gated delta rule or attention, then experts or an MLP ("DE",
"*E", "D-", "*-"). Their norms' weights are stored as the difference from 1, as ours with norm_zero_centred.
A published checkpoint has one module of multi-token prediction, "*E". The library does not read it, and
config.json does not tell of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.config.listing import value_at
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Shape, Table, Tensor, tensors
from jaxthd.hf.decoder import (
    ANY,
    SOFTMAX_EXPERTS,
    BlockFields,
    Decoder,
    dense_layers,
    ffn_block,
    layer_types,
    paired_blocks,
    sparse_layers,
)
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields
from jaxthd.models.blocks import MLP, Attention, GatedDelta

TYPES = {"linear_attention": "D", "full_attention": "*"}


def shared_inner(value: int, fields: Fields) -> int:
    if not value:
        raise UserError(
            "config.json has shared_expert_intermediate_size 0; expected more, since each layer of experts "
            "has a shared one beside them: choose another checkpoint"
        )
    return value


class Qwen3Next(Decoder):
    """Checkpoints of Qwen3-Next."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the library's defaults that decide about layers and rotated shares."""
        return {"partial_rotary_factor": 0.25, "num_experts": 512, **fields}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: the gated delta rule or attention, and experts or an MLP."""
        return sparse_layers(fields, self.mixers(fields))

    def mixers(self, fields: Fields) -> str:
        """The letters of the layers' mixers."""
        every = fields.get("full_attention_interval") or 4
        return layer_types(fields, TYPES, ["linear_attention"] * (every - 1) + ["full_attention"])

    def mtp(self, fields: Fields, letters: str) -> tuple[str, int]:
        """One module: attention, and what the layers have behind it."""
        return ("*E" if "E" in letters else "*-"), 1

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The kinds of layers. Raises UserError for another form of multi-token prediction or experts."""
        return {
            **self.mixer_fields(llm),
            **({} if "E" in llm.letters else {"num_experts": 0}),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_layers(llm.letters),
        }

    def mixer_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """Fields of the layers' mixers. Raises UserError as more_fields."""
        if llm.mtp_pattern:
            self.must_hold(llm, {"mtp_pattern": self.mtp({}, llm.letters)[0], "mtp_modules": 1})
        if "E" in llm.letters and not value_at(llm, "blocks.E.shared_inner"):
            raise UserError(
                f"model.llm.blocks.E.shared_inner is 0; expected more for {self.title}, whose experts have a "
                "shared one beside them: choose another format"
            )
        types = {letter: name for name, letter in TYPES.items()}
        return {
            "layer_types": [types[letter] for letter in llm.letters[::2]],
            "partial_rotary_factor": value_at(llm, "blocks.*.rope.fraction") if "*" in llm.blocks else 1.0,
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of the delta rule, attention, experts and MLP."""
        special: dict[str, Table] = {}
        if "D" in llm.blocks:
            delta = Below("mixer.", self.delta_tensors(llm.blocks["D"].tensors()))
            special["D"] = {"input_layernorm": "norm", "linear_attn.": delta}
        if "E" in llm.blocks:
            usual = llm.blocks["E"].tensors().items()
            renamed = {name.replace("shared_experts.", "shared_expert."): x for name, x in usual}
            special["E"] = ffn_block({**renamed, "shared_expert_gate": "shared_gate"})
        return paired_blocks(llm, special)

    def delta_tensors(self, usual: Table) -> Table:
        """The table of a gated delta rule's mixer. usual: the block's."""
        return usual

    def mtp_tensors(self, llm: LLMConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """One layer, with its norms and its projection beside it."""
        yield from self.layer_tensors(llm, fields, shapes, llm.mtp_pattern, "mtp.", "mtp.")
        around = {
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "norm": "final_layernorm",
            "fc": "eh_proj",
        }
        yield from tensors(around, shapes, "mtp.", "mtp.depths.", (0,))


QWEN3_NEXT = Qwen3Next(
    title="Qwen3NextForCausalLM",
    model_types=("qwen3_next",),
    layers=("DE", "*E", "D-", "*-"),
    rotary="partial",
    expected={"attention_bias": False, "hidden_act": "silu"},
    form={"norm_zero_centred": True, "mtp_pattern": ANY},
    sizes={
        "vocab_size": Field("vocab_size", 151936),
        "dim": Field("hidden_size", 2048),
        "norm_eps": Field("rms_norm_eps", 1e-6),
        "tied_embedding": Field("tie_word_embeddings", False),
    },
    blocks={
        "D": BlockFields(
            GatedDelta(),
            {
                "key_heads": Field("linear_num_key_heads", 16),
                "value_heads": Field("linear_num_value_heads", 32),
                "key_dim": Field("linear_key_head_dim", 128),
                "value_dim": Field("linear_value_head_dim", 128),
                "conv": Field("linear_conv_kernel_dim", 4),
            },
        ),
        "*": BlockFields(
            Attention(qk_norm=True, gate=True),
            {
                "heads": Field("num_attention_heads", 16),
                "kv_heads": Field("num_key_value_heads", 2),
                "head_dim": Field("head_dim", 256),
            },
        ),
        "-": BlockFields(MLP(form="swiglu"), {"inner": Field("intermediate_size", 5632)}),
        "E": BlockFields(
            replace(SOFTMAX_EXPERTS, shared_gate=True),
            {
                "experts": Field("num_experts", 512),
                "experts_per_token": Field("num_experts_per_tok", 10),
                "inner": Field("moe_intermediate_size", 512),
                "shared_inner": Field("shared_expert_intermediate_size", 512, shared_inner),
                "router.normalised": Field("norm_topk_prob", True),
            },
        ),
    },
)
FAMILY = QWEN3_NEXT.family()
