"""Kimi-Linear (transformers: KimiLinearForCausalLM).

A layer of theirs is two blocks of ours: Kimi delta attention or latent attention without rotation, then an
MLP or experts ("K-", "KE", "L-", "LE"). config.json says which layers are which by numbers from 1 on
(linear_attn_config) or, as the library writes it, by names (layer_types, mlp_layer_types). The library saves
dense MLPs under the name of the experts' block; published folders, and the exports here, have them apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.config.listing import value_at
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Table, matrix
from jaxthd.hf.decoder import BlockFields, Decoder, ffn_block, layer_types, mixer_block, paired_blocks
from jaxthd.hf.family import Family, Field
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.reader import Reader
from jaxthd.models.blocks import MLP, KimiDelta, LatentAttention, MoE

_MIXERS = {"linear_attention": "K", "full_attention": "L"}
_FFNS = {"dense": "-", "sparse": "E"}
_NUMBERED = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
_LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""The library's names of the delta attention's settings -> those below linear_attn_config."""
_OTHERS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
"""Names that the library has in memory -> those of config.json."""
_AT_EXPERTS = "block_sparse_moe."


def _numbered(linear: Fields, count: int) -> list[str] | None:
    """The types of the layers by the lists of their numbers; None where there are no lists.

    Raises UserError unless each layer is in one of them.
    """
    lists = {kind: linear.get(name) for kind, name in _NUMBERED.items()}
    if any(numbers is None for numbers in lists.values()):
        return None
    named = {number: kind for kind, numbers in lists.items() for number in numbers or ()}
    if sorted(x for numbers in lists.values() for x in numbers or ()) != [*range(1, count + 1)]:
        raise UserError(
            f"config.json has linear_attn_config.kda_layers {lists['linear_attention']} and full_attn_layers "
            f"{lists['full_attention']}; expected each of the layers 1 to {count} in one of them: correct it"
        )
    return [named[number] for number in range(1, count + 1)]


class KimiLinear(Decoder):
    """Checkpoints of Kimi-Linear."""

    def complete(self, fields: Fields) -> Fields:
        """The fields by the names of published folders, with the kinds of layers by theirs. Raises UserError
        where there are fewer heads of keys than of queries, and for lists of layers that do not fit."""
        must_be(fields, {"num_key_value_heads": fields.get("num_attention_heads", 32)})
        linear = fields.get("linear_attn_config") or {}
        renamed = {ours: fields[theirs] for theirs, ours in _OTHERS.items() if theirs in fields}
        own = {ours: linear[theirs] for ours, theirs in _LINEAR.items() if linear.get(theirs) is not None}
        numbered = _numbered(linear, int(required(fields, "num_hidden_layers")))
        types = {"layer_types": numbered} if numbered and not fields.get("layer_types") else {}
        return {**renamed, **fields, **own, **types}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: delta or latent attention, and an MLP or experts."""
        count = int(required(fields, "num_hidden_layers"))
        default = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
        first = fields.get("first_k_dense_replace")
        dense = min(1 if first is None else int(first), count)
        ffns = fields.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (count - dense)
        unknown = {*ffns} - {*_FFNS}
        if unknown or len(ffns) != count:
            raise UserError(
                f"config.json has num_hidden_layers {count}, and {len(ffns)} mlp_layer_types: "
                f"{', '.join(dict.fromkeys(ffns))}; expected {count} of {' and '.join(_FFNS)}: correct them, "
                "or choose another checkpoint"
            )
        mixers = layer_types(fields, _MIXERS, default)
        return "".join(mixer + _FFNS[ffn] for mixer, ffn in zip(mixers, ffns, strict=True))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The kinds of layers, in both forms. Raises UserError for another form of experts."""
        mixers, ffns = llm.letters[::2], llm.letters[1::2]
        shared = value_at(llm, "blocks.E.shared_inner") if "E" in llm.blocks else 1
        if shared % (value_at(llm, "blocks.E.inner") if "E" in llm.blocks else 1):
            raise UserError(
                f"model.llm.blocks.E.shared_inner is {shared}; expected a multiple of inner for "
                f"{self.title}, whose shared experts are of the routed ones' size: choose another format"
            )
        kinds = {letter: kind for kind, letter in (_MIXERS | _FFNS).items()}
        linear = {
            name: [number for number, letter in enumerate(mixers, 1) if letter == _MIXERS[kind]]
            for kind, name in _NUMBERED.items()
        }
        delta = llm.blocks.get("K", KimiDelta())
        settings = self.blocks["K"].settings
        for ours, field in settings.items():
            assert isinstance(field, Field)
            linear[_LINEAR[field.theirs]] = value_at(delta, ours)
        return {
            "num_key_value_heads": value_at(llm, "blocks.L.heads") if "L" in llm.blocks else None,
            "linear_attn_config": linear,
            "layer_types": [kinds[x] for x in mixers],
            "mlp_layer_types": [kinds[x] for x in ffns],
            "first_k_dense_replace": len(ffns) - len(ffns.lstrip("-")),
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of delta attention, latent attention, MLP and experts."""
        special: dict[str, Table] = {}
        if "L" in llm.blocks:
            latent = llm.blocks["L"]
            assert isinstance(latent, LatentAttention)
            special["L"] = mixer_block(latent.tensors(is_paired=False))
        if "K" in llm.blocks:
            special["K"] = mixer_block(llm.blocks["K"].tensors())
        if "E" in llm.blocks:
            names = {"w1": "gate", "w2": "down", "w3": "up"}
            of_expert: Table = {f"{theirs}.weight": matrix(ours) for theirs, ours in names.items()}
            experts = {**llm.blocks["E"].tensors(), "experts.{}.": Below("", of_expert, "up")}
            special["E"] = _at_experts(ffn_block(experts))
        return paired_blocks(llm, special)

    def family(self) -> Family:
        """The family of checkpoints."""
        return replace(super().family(), opened=self._opened)

    def _opened(self, family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
        """The family with the names of dense MLPs as the folder has them."""
        is_saved_again = any(f"{_AT_EXPERTS}down_proj" in name for name in reader.shapes)
        return (_SavedAgain(**vars(self)).family() if is_saved_again else family), fields, reader


class _SavedAgain(KimiLinear):
    """Folders that the library saved."""

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables, with the MLP's below the name of the experts' block."""
        tables = dict(super().block_tensors(llm, fields))
        return {**tables, **({"-": _at_experts(tables["-"])} if "-" in tables else {})}


def _at_experts(table: Table) -> Table:
    """The table of a block, its mixer by the name of the experts' block."""
    return {_AT_EXPERTS if name == "mlp." else name: entry for name, entry in table.items()}


KIMI_LINEAR = KimiLinear(
    title="KimiLinearForCausalLM",
    model_types=("kimi_linear",),
    memory={
        f".{_AT_EXPERTS}": ".mlp.",
        ".self_attn.f_a_proj.": ".self_attn.forget_gate.f_a_proj.",
        ".self_attn.f_b_proj.": ".self_attn.forget_gate.f_b_proj.",
    },
    layers=("K-", "KE", "L-", "LE"),
    rotary="none",
    expected={
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        # The library has the head by itself whatever this says.
        "tie_word_embeddings": False,
    },
    unset=("pad_token_id",),
    sizes={
        "vocab_size": Field("vocab_size", 163840),
        "dim": Field("hidden_size", 2304),
        "norm_eps": Field("rms_norm_eps", 1e-5),
    },
    blocks={
        "K": BlockFields(
            KimiDelta(),
            {
                "head_dim": Field("linear_head_dim", 128),
                "heads": Field("linear_num_heads", 32),
                "conv": Field("linear_conv_kernel_dim", 4),
            },
        ),
        "L": BlockFields(
            LatentAttention(),
            {
                "heads": Field("num_attention_heads", 32),
                "q_lora_rank": Field(
                    "q_lora_rank", None, lambda x, _: x or 0, lambda block: block.q_lora_rank or None
                ),
                "kv_lora_rank": Field("kv_lora_rank", 512),
                "qk_nope_head_dim": Field("qk_nope_head_dim", 128),
                "qk_rope_head_dim": Field("qk_rope_head_dim", 64),
                "v_head_dim": Field("v_head_dim", 128),
            },
        ),
        "-": BlockFields(MLP(form="swiglu"), {"inner": Field("intermediate_size", 9216)}),
        "E": BlockFields(
            MoE(form="swiglu"),
            {
                "experts": Field("num_experts", 256),
                "experts_per_token": Field("num_experts_per_token", 8),
                "inner": Field("moe_intermediate_size", 1024),
                "router.scale": Field("routed_scaling_factor", 2.446),
                "router.normalised": Field("moe_renormalize", True),
                "router.groups": Field("num_expert_group", 1, lambda x, _: x or 1),
                "router.groups_per_token": Field(
                    "topk_group",
                    1,
                    lambda x, _: x or 1,
                    lambda block: min(block.router.groups_per_token, block.router.groups),
                ),
                "shared_inner": Field(
                    "num_shared_experts",
                    1,
                    lambda count, fields: count * (fields.get("moe_intermediate_size") or 1024),
                    lambda block: block.shared_inner // block.inner,
                ),
            },
        ),
    },
)
FAMILY = KIMI_LINEAR.family()
