"""NemotronH, dense and MoE, with and without latent experts (transformers: NemotronHForCausalLM)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Shape, Table, Tensor, tensors
from jaxthd.hf.decoder import ANY, BlockFields, Decoder
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields, required
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.blocks.mamba2 import COST_CHUNK

_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTERS = {name: letter for letter, name in _BLOCKS.items()} | {"mamba": "M", "attention": "*"}
_OLD_NAMES = {
    "head_dim": "attention_head_dim",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_limit": "mamba_dt_limit",
}
"""The library's names -> their names in older checkpoints."""


def _number(x: Any) -> float:
    """JSON has no infinity: some checkpoints write {"__float__": "Infinity"}."""
    return float(x["__float__"] if isinstance(x, dict) else x)


def limits(value: Any, fields: Fields) -> tuple[float, float]:
    """The limits of a time step. null: none."""
    low, high = (_number(x) for x in value or (0.0, math.inf))
    return low, high


def written_limits(block: Mamba2) -> list[Any]:
    """The limits as config.json holds them."""
    low, high = block.dt_limit
    return [low, high if math.isfinite(high) else {"__float__": "Infinity"}]


class NemotronH(Decoder):
    """Checkpoints of Nemotron-H. Each block of ours is a layer of theirs."""

    def complete(self, fields: Fields) -> Fields:
        """The fields by their present names."""
        return {**fields, **{new: fields[old] for new, old in _OLD_NAMES.items() if old in fields}}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks, one a layer."""
        if fields.get("hybrid_override_pattern"):
            return str(fields["hybrid_override_pattern"])
        return _letters_of(fields.get("layers_block_type") or required(fields, "layer_types", where), where)

    def mtp(self, fields: Fields, letters: str) -> tuple[str, int]:
        """Modules of the blocks that the fields name."""
        modules = int(fields.get("num_nextn_predict_layers") or 0)
        pattern = fields.get("mtp_hybrid_override_pattern")
        blocks = fields.get("mtp_layers_block_type") or ["full_attention", "moe"]
        if not modules:
            return "", 0
        return str(pattern) if pattern else _letters_of(blocks, "config.json"), modules

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The layers' types, by names of now and before, and what the library's scan needs."""
        mamba = llm.blocks.get("M", Mamba2())
        assert isinstance(mamba, Mamba2)
        mtp = {
            "num_nextn_predict_layers": llm.mtp_modules,
            "mtp_layers_block_type": [_BLOCKS[letter] for letter in llm.mtp_pattern],
            "mtp_hybrid_override_pattern": llm.mtp_pattern,
        }
        return {
            "layers_block_type": [_BLOCKS[letter] for letter in llm.letters],
            "hybrid_override_pattern": llm.letters,
            "chunk_size": COST_CHUNK,
            "expand": max(1, mamba.inner // llm.dim),
            # The library's scan on CPUs clamps time steps to this and ignores time_step_limit.
            "time_step_min": max(mamba.dt_limit[0], 1e-30),
            **({} if "E" in llm.blocks else {"moe_latent_size": None}),
            **(mtp if llm.mtp_pattern else {}),
        }

    def meaningless_fields(self, llm: LLMConfig) -> set[str]:
        """Also those of more_fields that follow from Mamba2."""
        of_mamba = set() if "M" in llm.blocks else {"expand", "time_step_min"}
        return super().meaningless_fields(llm) | of_mamba

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of all mixers."""
        return {
            letter: {"norm": "norm", "mixer.": Below("mixer.", block.tensors())}
            for letter, block in llm.blocks.items()
        }

    def mtp_tensors(self, llm: LLMConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """Each module's norms and projection are stored with its first and its last block."""
        size = len(llm.mtp_pattern)
        letters = llm.mtp_pattern * llm.mtp_modules
        yield from self.layer_tensors(llm, fields, shapes, letters, "mtp.", "mtp.")
        for module in range(llm.mtp_modules):
            around = {
                f"{module * size}.enorm": "enorm",
                f"{module * size}.hnorm": "hnorm",
                f"{module * size}.eh_proj": "eh_proj",
                f"{(module + 1) * size - 1}.final_layernorm": "final_layernorm",
            }
            yield from tensors(around, shapes, "mtp.layers.", "mtp.depths.", (module,))


def _letters_of(blocks: Sequence[str], where: str) -> str:
    unknown = sorted({str(block) for block in blocks if block not in _LETTERS})
    if unknown:
        raise UserError(
            f"{where} names layers of type {', '.join(unknown)}; expected {', '.join(_LETTERS)}: choose "
            "another checkpoint"
        )
    return "".join(_LETTERS[block] for block in blocks)


NEMOTRON_H = NemotronH(
    title="NemotronHForCausalLM",
    model_types=("nemotron_h",),
    layers=tuple(_BLOCKS),
    rotary="none",
    embedding="backbone.embeddings.weight",
    body="backbone.",
    memory={"backbone.": "model."},
    norm="norm_f",
    expected={
        "attention_bias": False,
        "use_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    form={"mtp_pattern": ANY},
    sizes={
        "vocab_size": Field("vocab_size", 131072),
        "dim": Field("hidden_size", 4096),
        "norm_eps": Field("layer_norm_epsilon", 1e-5),
    },
    blocks={
        "M": BlockFields(
            Mamba2(),
            {
                "heads": Field("mamba_num_heads", 128),
                "head_dim": Field("mamba_head_dim", 64),
                "state": Field("ssm_state_size", 128),
                "groups": Field("n_groups", 8),
                "conv": Field("conv_kernel", 4),
                "dt_limit": Field("time_step_limit", read=limits, write=written_limits),
            },
        ),
        "*": BlockFields(
            Attention(),
            {
                "heads": Field("num_attention_heads", 32),
                "kv_heads": Field("num_key_value_heads", 8),
                "head_dim": Field("head_dim", 128),
            },
        ),
        "-": BlockFields(MLP(), {"inner": Field("intermediate_size", 21504)}),
        "E": BlockFields(
            MoE(),
            {
                "experts": Field("n_routed_experts", 8),
                "experts_per_token": Field("num_experts_per_tok", 2),
                "inner": Field("moe_intermediate_size", 7688),
                "shared_inner": Field("moe_shared_expert_intermediate_size", 7688),
                "router.scale": Field("routed_scaling_factor", 1.0),
                "latent": Field("moe_latent_size", 0, write=lambda block: block.latent or None),
            },
        ),
    },
)
FAMILY = NEMOTRON_H.family()
