"""Bamba and Granite 4 (transformers: BambaForCausalLM, GraniteMoeHybridForCausalLM).

A layer of theirs is two blocks of ours: Mamba2 or attention, then a gated MLP, or, in Granite, experts beside
an MLP that all tokens share. Granite has four multipliers, and rotates queries and keys or does not.
"""

from collections.abc import Mapping
from typing import Any

from jaxthd.config import LLMConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Table, matrix, packed
from jaxthd.hf.decoder import SIZES, SOFTMAX_EXPERTS, BlockFields, Decoder, layer_types
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields, required
from jaxthd.hf.llama import BIASES, GATED, MULTIPLIED, SCALE
from jaxthd.hf.nemotron_h import limits, written_limits
from jaxthd.models.blocks import MLP, Attention, Mamba2

_TYPES = {"mamba": "M", "attention": "*"}
_LETTERS = {**_TYPES, "linear_attention": "M", "full_attention": "*"}
"""Types of layers, also as libraries since transformers 5 write them."""


def mamba_width(fields: Fields) -> int:
    """Features of Mamba2: a multiple of the model's dim, where no field has them (Falcon-H1)."""
    return int(fields.get("mamba_d_ssm") or (fields.get("mamba_expand") or 2) * fields["hidden_size"])


def _head_dim(value: Any, fields: Fields) -> int:
    """The dim of a Mamba2 head; "auto": what the heads share of the width."""
    heads, width = fields.get("mamba_n_heads") or 128, mamba_width(fields)
    dim = int(width // heads if value in ("auto", None) else value)
    if dim * heads != width:
        raise UserError(
            f"config.json has {heads} Mamba2 heads of {dim} features, and {width} in all (mamba_d_ssm, or "
            "mamba_expand * hidden_size); expected as many as the heads have: correct them, or choose "
            "another checkpoint"
        )
    return dim


MAMBA: Settings = {
    "heads": Field("mamba_n_heads", 128),
    "head_dim": Field("mamba_d_head", "auto", read=_head_dim),
    "state": Field("mamba_d_state", 256),
    "groups": Field("mamba_n_groups", 1),
    "conv": Field("mamba_d_conv", 4),
    "dt_limit": Field("time_step_limit", read=limits, write=written_limits),
    "bias": Field("mamba_proj_bias", False),
    "conv_bias": Field("mamba_conv_bias", True),
}
"""Fields of Mamba2."""
_NO_MAMBA = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 2}
"""Fields of a model without Mamba2, whose sizes the library checks all the same."""


class Bamba(Decoder):
    """Checkpoints of Bamba."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the share of each head that the library rotates, whatever stands beside them."""
        return {**fields, "partial_rotary_factor": 0.5}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: Mamba2 or attention, and an MLP."""
        attention = {*(fields.get("attn_layer_indices") or ())}
        count = int(required(fields, "num_hidden_layers", where))
        return "".join("*-" if i in attention else "M-" for i in range(count))

    def rope_fields(self, rope: RopeConfig, block: str) -> dict[str, Any]:
        """The share of each head beside the others, also where it is all of it."""
        fields = super().rope_fields(rope, block)
        fields["rope_parameters"]["partial_rotary_factor"] = rope.fraction
        return fields

    def absent_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """Also sizes of Mamba2 that the library accepts, where there is none."""
        return super().absent_fields(llm) | ({} if "M" in llm.blocks else _NO_MAMBA)

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The layers with attention, and the width of Mamba2. Raises UserError for one that is no multiple of
        the model's."""
        layers = [i for i, letter in enumerate(llm.letters[::2]) if letter == "*"]
        return {"attn_layer_indices": layers, **self.width(llm)}

    def width(self, llm: LLMConfig) -> dict[str, Any]:
        """The field for the width of Mamba2. Raises UserError as more_fields."""
        mamba = llm.blocks.get("M")
        if not isinstance(mamba, Mamba2):
            return {}
        if mamba.inner % llm.dim:
            raise UserError(
                f"model.llm.blocks.M has heads of {mamba.inner} features together; expected a multiple of "
                f"model.llm.dim, {llm.dim}, for {self.title}: choose another format"
            )
        return {"mamba_expand": mamba.inner // llm.dim}

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of Mamba2, attention and MLP."""
        mlp = Below("mixer.", MLP().tensors())
        return mixer_tables(llm) | {"-": {"pre_ff_layernorm": "norm", "feed_forward.": mlp}}


class GraniteHybrid(Bamba):
    """Checkpoints of Granite 4. Some have attention alone."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the types of layers by their present name, and the library's number of experts."""
        types = fields.get("layer_types") or fields.get("layers_block_type")
        return {"num_local_experts": 8, **fields, "layer_types": types}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: Mamba2 or attention, and experts or an MLP."""
        ffn = "E" if fields["num_local_experts"] else "-"
        return "".join(f"{mixer}{ffn}" for mixer in layer_types(fields, _LETTERS, ["mamba"]))

    def rope(self, fields: Fields) -> RopeConfig:
        """The rotary embedding, which most do not have."""
        return super().rope(fields) if fields.get("position_embedding_type") == "rope" else RopeConfig()

    def rope_fields(self, rope: RopeConfig, block: str) -> dict[str, Any]:
        """Whether there is one, and which."""
        if not rope.theta:
            return {"position_embedding_type": "nope"}
        return {**Decoder.rope_fields(self, rope, block), "position_embedding_type": "rope"}

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The types of layers, and the width of Mamba2. Raises UserError as Bamba, and where some layers have
        experts and others do not."""
        if len(set(llm.letters[1::2])) > 1:
            raise UserError(
                f"model.llm.pattern is {llm.pattern!r}; expected experts in all layers or in none for "
                f"{self.title}: choose another format"
            )
        types = {letter: name for name, letter in _TYPES.items()}
        return {
            **({} if "E" in llm.blocks else {"num_local_experts": 0}),
            "layer_types": [types[letter] for letter in llm.letters[::2]],
            **self.width(llm),
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of Mamba2, attention, experts and MLP."""
        mlp: Table = {"input_linear.weight": matrix("gate.w", "up.w"), "output_linear": "down"}
        experts: Table = {
            "router.layer": "router",
            "input_linear.weight": packed("gate", "up"),
            "output_linear.weight": packed("down"),
        }
        norm: Table = {"post_attention_layernorm": "norm"}
        shared = Below("mixer.shared.", mlp)
        return mixer_tables(llm) | {
            "-": {**norm, "shared_mlp.": Below("mixer.", mlp)},
            "E": {**norm, "block_sparse_moe.": Below("mixer.", experts), "shared_mlp.": shared},
        }


def mixer_tables(llm: LLMConfig) -> dict[str, Table]:
    """The tables of Mamba2 and attention."""
    parts = {"M": "mamba.", "*": "self_attn."}
    return {
        letter: {"input_layernorm": "norm", parts[letter]: Below("mixer.", block.tensors())}
        for letter, block in llm.blocks.items()
        if letter in parts
    }


def _shared(value: int | None, fields: Fields) -> int:
    value = 1024 if value is None else value
    if not value:
        raise UserError(
            "config.json has shared_intermediate_size 0; expected more, since each layer has an MLP that all "
            "tokens share: choose another checkpoint"
        )
    return value


_SHARED = Field("shared_intermediate_size", 1024, read=_shared)
BAMBA = Bamba(
    title="BambaForCausalLM",
    model_types=("bamba",),
    layers=("M-", "*-"),
    rotary="partial",
    expected={"hidden_act": "silu"},
    sizes={**SIZES, "norm_eps": Field("rms_norm_eps", 1e-5)},
    norm="final_layernorm",
    blocks={
        "M": BlockFields(Mamba2(), MAMBA),
        "*": BlockFields(Attention(), BIASES),
        "-": BlockFields(GATED, {"inner": "intermediate_size", "bias": Field("mlp_bias", False)}),
    },
)
GRANITE_HYBRID = GraniteHybrid(
    title="GraniteMoeHybridForCausalLM",
    model_types=("granitemoehybrid",),
    layers=("ME", "*E", "M-", "*-"),
    expected={"hidden_act": "silu"},
    sizes={**SIZES, **MULTIPLIED, "norm_eps": Field("rms_norm_eps", 1e-6)},
    blocks={
        "M": BlockFields(Mamba2(), MAMBA),
        "*": BlockFields(Attention(), {**BIASES, "scale": SCALE}),
        "-": BlockFields(GATED, {"inner": _SHARED}),
        # Their softmax is over the experts chosen, which is that over all experts, normalised.
        "E": BlockFields(
            SOFTMAX_EXPERTS,
            {
                "experts": "num_local_experts",
                "experts_per_token": Field("num_experts_per_tok", 2),
                "inner": "intermediate_size",
                "shared_inner": _SHARED,
            },
        ),
    },
)
FAMILIES = tuple(decoder.family() for decoder in (BAMBA, GRANITE_HYBRID))
