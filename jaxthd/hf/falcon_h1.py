"""Falcon-H1 (transformers: FalconH1ForCausalLM).

A layer of theirs is two blocks of ours: attention beside Mamba2, then a gated MLP. Fourteen factors come from
muP (Yang et al., 2022). The factor on keys is one on the scores of attention.
"""

from collections.abc import Mapping
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Table
from jaxthd.hf.bamba import MAMBA
from jaxthd.hf.decoder import SIZES, BlockFields, Decoder
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields, required
from jaxthd.hf.llama import BIASES, GATED
from jaxthd.hf.rotary import must_rotate, rope_config, rope_fields
from jaxthd.models.blocks import MLP, Attention, Mamba2, Parallel


def _key_factor(value: Any, fields: Fields) -> float:
    """The factor on scores; 0 stands for the usual one."""
    dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return 0.0 if value in (None, 1) else float(value * dim**-0.5)


def _factors(count: int) -> Any:
    """Reads so many factors. Raises UserError for another number of them."""

    def read(value: Any, fields: Fields) -> tuple[float, ...]:
        """The factors as floats."""
        value = (1.0,) * count if value is None else value
        if len(value) != count:
            raise UserError(
                f"config.json has {list(value)} as factors; expected {count} numbers: correct it, or choose "
                "another checkpoint"
            )
        return tuple(map(float, value))

    return read


def _norm(value: bool | None, fields: Fields) -> str:
    """Where the norm stands: the library's kernels for training gate first whatever the field says."""
    before = fields.get("mamba_norm_before_gate")
    return "none" if not value else "after_gate" if before is False else "before_gate"


def _below(part: str, settings: Settings) -> Settings:
    """The settings of a part of the block. Each is written from that part."""

    def entry(ours: str, theirs: str | Field) -> tuple[str, str | Field]:
        """The entry below the part."""
        write = theirs.write if isinstance(theirs, Field) else None
        if write is None:
            return f"{part}.{ours}", theirs
        assert isinstance(theirs, Field)
        return f"{part}.{ours}", theirs._replace(write=lambda block: write(getattr(block, part)))

    return dict(entry(*item) for item in settings.items())


class FalconH1(Decoder):
    """Checkpoints of Falcon-H1."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the library's width of Mamba2; null leaves it to mamba_expand. Raises UserError for
        biases of one projection of Mamba2 alone."""
        biases = [bool(fields.get(name)) for name in ("mamba_proj_bias", "projectors_bias")]
        if biases[0] != biases[1]:
            raise UserError(
                f"config.json has mamba_proj_bias {biases[0]} and projectors_bias {biases[1]}; expected both "
                "or neither, since Mamba2's projections have biases all or none: choose another checkpoint"
            )
        return {"mamba_d_ssm": 1024, **fields}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: attention beside Mamba2, and MLPs, by turns."""
        return "H-" * int(required(fields, "num_hidden_layers", where))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The width of Mamba2, its biases and its norm, and the rotary embedding for libraries of either age.
        Raises UserError for a model without one."""
        block = llm.blocks["H"]
        assert isinstance(block, Parallel)
        rope, mamba = block.self_attention.rope, block.mamba
        must_rotate(rope, "model.llm.blocks.H.self_attention", self.title)
        return {
            "mamba_d_ssm": mamba.inner,
            "projectors_bias": mamba.bias,
            "mamba_norm_before_gate": mamba.norm != "after_gate",
            **rope_fields(rope),
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of attention beside Mamba2, and of the MLP."""
        both: Table = {
            "self_attn.": Below("mixer.self_attention.", Attention().tensors()),
            "mamba.": Below("mixer.mamba.", Mamba2().tensors()),
        }
        mlp = Below("mixer.", MLP().tensors())
        return {
            "H": {"input_layernorm": "norm", **both},
            "-": {"pre_ff_layernorm": "norm", "feed_forward.": mlp},
        }


_ATTENTION: Settings = {
    **BIASES,
    "rope": Field(
        "rope_parameters",
        read=lambda _, fields: rope_config(fields),
        write=lambda attention: rope_fields(attention.rope)["rope_parameters"],
    ),
    "scale": Field(
        "key_multiplier",
        1.0,
        read=_key_factor,
        write=lambda attention: attention.scale / attention.head_dim**-0.5 if attention.scale else 1.0,
    ),
}
_MAMBA: Settings = {
    **MAMBA,
    "norm": Field("mamba_rms_norm", False, read=_norm, write=lambda mamba: mamba.norm != "none"),
    "factors": Field("ssm_multipliers", (1.0,) * 5, read=_factors(5), write=lambda mamba: [*mamba.factors]),
}
FALCON_H1 = FalconH1(
    title="FalconH1ForCausalLM",
    model_types=("falcon_h1",),
    layers=("H-",),
    rotary="none",
    norm="final_layernorm",
    expected={"hidden_act": "silu"},
    sizes={
        **SIZES,
        "norm_eps": Field("rms_norm_eps", 1e-5),
        "embedding_multiplier": Field("embedding_multiplier", 1.0),
        "logits_scaling": Field(
            "lm_head_multiplier",
            1.0,
            read=lambda factor, fields: 1 / (factor or 1),
            write=lambda llm: 1 / llm.logits_scaling,
        ),
    },
    blocks={
        "H": BlockFields(
            Parallel(),
            {
                **_below("self_attention", _ATTENTION),
                **_below("mamba", _MAMBA),
                "attention_in": Field("attention_in_multiplier", 1.0),
                "attention_out": Field("attention_out_multiplier", 1.0),
                "mamba_in": Field("ssm_in_multiplier", 1.0),
                "mamba_out": Field("ssm_out_multiplier", 1.0),
            },
        ),
        "-": BlockFields(
            GATED,
            {
                "inner": "intermediate_size",
                "bias": Field("mlp_bias", False),
                "factors": Field(
                    "mlp_multipliers", (1.0, 1.0), read=_factors(2), write=lambda mlp: [*mlp.factors]
                ),
            },
        ),
    },
)
FAMILY = FALCON_H1.family()
