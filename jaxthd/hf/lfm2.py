"""LFM2 (transformers: Lfm2ForCausalLM).

A layer of theirs is two blocks of ours: a short convolution or attention, then a gated MLP, whose width
follows from three fields beside that which holds it.
"""

from collections.abc import Mapping
from typing import Any

from jaxthd.config import LLMConfig
from jaxthd.files.tensor_names import Below, Table
from jaxthd.hf.decoder import SIZES, BlockFields, Decoder, layer_types
from jaxthd.hf.family import Field
from jaxthd.hf.fields import Fields, required
from jaxthd.hf.llama import GATED, HEADS
from jaxthd.models.blocks import MLP, Attention, ShortConv

_TYPES = {"conv": "C", "full_attention": "*"}
_RENAMED = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""Older fields, which the library prefers -> their present names."""


def _inner(value: int | None, fields: Fields) -> int:
    """The width of the MLPs."""
    value = 12288 if value is None else value
    if not fields.get("block_auto_adjust_ff_dim", True):
        return value
    width, factor = int(2 * value / 3), fields.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = fields.get("block_multiple_of") or 256
    return -(-int(factor * width) // multiple) * multiple


class Lfm2(Decoder):
    """Checkpoints of LFM2."""

    def complete(self, fields: Fields) -> Fields:
        """The fields by their present names, with the library's base of the rotary embedding."""
        older = {new: fields[old] for old, new in _RENAMED.items() if fields.get(old) is not None}
        return {"rope_theta": 1e6, **fields, **older}

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: a short convolution or attention, and an MLP."""
        count = int(required(fields, "num_hidden_layers", where))
        attention = fields.get("full_attn_idxs")
        default = ["full_attention" if attention is None or i in attention else "conv" for i in range(count)]
        return "".join(f"{mixer}-" for mixer in layer_types(fields, _TYPES, default))

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The types of layers, and what older fields hold: the MLPs' width as it is. Raises UserError for
        convolutions of another width than the model's."""
        if "C" in llm.blocks:
            self.must_hold(llm, {"blocks.C.inner": llm.dim})
        types = {letter: name for name, letter in _TYPES.items()}
        mlp = llm.blocks["-"]
        assert isinstance(mlp, MLP)
        return {
            "layer_types": [types[letter] for letter in llm.letters[::2]],
            "full_attn_idxs": [i for i, letter in enumerate(llm.letters[::2]) if letter == "*"],
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": mlp.inner,
            "tie_embedding": llm.tied_embedding,
        }

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of short convolution, attention and MLP."""
        attention: Table = {
            **{f"{x}_proj": x for x in "qkv"},
            "out_proj": "out",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
        }
        mlp: Table = {"w1": "gate", "w3": "up", "w2": "down"}
        return {
            "C": {"operator_norm": "norm", "conv.": Below("mixer.", ShortConv().tensors())},
            "*": {"operator_norm": "norm", "self_attn.": Below("mixer.", attention)},
            "-": {"ffn_norm": "norm", "feed_forward.": Below("mixer.", mlp)},
        }


LFM2 = Lfm2(
    title="Lfm2ForCausalLM",
    model_types=("lfm2",),
    layers=("C-", "*-"),
    norm="embedding_norm",
    expected={},
    sizes={
        **SIZES,
        "norm_eps": Field("norm_eps", 1e-5),
        "tied_embedding": Field("tie_word_embeddings", True),
    },
    blocks={
        "C": BlockFields(
            ShortConv(),
            {
                "inner": "hidden_size",
                "conv": Field("conv_L_cache", 3),
                "bias": Field("conv_bias", False),
            },
        ),
        "*": BlockFields(Attention(qk_norm=True), HEADS),
        "-": BlockFields(GATED, {"inner": Field("intermediate_size", 12288, read=_inner)}),
    },
)
FAMILY = LFM2.family()
