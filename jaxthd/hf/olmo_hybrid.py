"""OLMo Hybrid (transformers: OlmoHybridForCausalLM).

A layer of theirs is two blocks of ours: the gated delta rule and an MLP, with norms before them ("D-"), or
attention and an MLP with norms on what they add ("*F"). Published ones have no rotary embedding. What the
library saves is not as its authors publish it: the norm after attention has the name of the one before MLPs,
and the taps of queries, keys and values are together cut into three equal parts. It is read, and an export
has the published form.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import LLMConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Below, Table, matrix
from jaxthd.hf.decoder import SIZES, BlockFields, Decoder, layer_types
from jaxthd.hf.family import Family, Field
from jaxthd.hf.fields import Fields, required
from jaxthd.hf.llama import BIASES, GATED
from jaxthd.hf.reader import Reader
from jaxthd.models.blocks import MLP, Attention, GatedDelta

_TYPES = {"linear_attention": "D-", "full_attention": "*F"}
_AFTER, _AFTER_MLP = "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"
_BEFORE_MLP = "feedforward_layer_norm.weight"
_FIRST_TAPS = re.compile(r"(.+\.)q_conv1d\.weight$")
_UNROTATED = {"rope_type": "default", "rope_theta": None}
"""rope_parameters of a model without a rotary embedding; null is the library's default one."""


class OlmoHybrid(Decoder):
    """Checkpoints of OLMo Hybrid."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the library's defaults that follow from others."""
        heads, dim = required(fields, "num_attention_heads"), required(fields, "hidden_size")
        found = {name: x for name, x in fields.items() if x is not None}
        keys = found.setdefault("linear_num_key_heads", heads)
        found.setdefault("linear_num_value_heads", heads)
        key_dim = found.setdefault("linear_key_head_dim", int(0.75 * dim / max(keys, 1)))
        found.setdefault("linear_value_head_dim", 2 * key_dim)
        return found

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: the gated delta rule or attention, each with its MLP."""
        count = int(required(fields, "num_hidden_layers", where))
        default = [
            "full_attention" if i % 4 == 3 or i == count - 1 < 3 else "linear_attention" for i in range(count)
        ]
        return layer_types(fields, _TYPES, default)

    def rope(self, fields: Fields) -> RopeConfig:
        """The rotary embedding, which most do not have."""
        given = fields.get("rope_parameters") or {}
        has_none = "rope_theta" in given and given["rope_theta"] is None
        return RopeConfig() if has_none else super().rope(fields)

    def rope_fields(self, rope: RopeConfig, block: str) -> dict[str, Any]:
        """Whether there is one, and which."""
        return super().rope_fields(rope, block) if rope.theta else {"rope_parameters": _UNROTATED}

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The types of layers. Raises UserError for a model of one type, which the library refuses."""
        types = {letters: name for name, letters in _TYPES.items()}
        found = [types[llm.letters[i : i + 2]] for i in range(0, len(llm.letters), 2)]
        if len({*found}) < len(_TYPES):
            raise UserError(
                f"model.llm.pattern is {llm.pattern!r}; expected {' and '.join(types)}, both, for "
                f"{self.title}: choose another format"
            )
        return {"layer_types": found}

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The tables of the delta rule, attention and MLPs."""
        mlp = Below("mixer.", MLP().tensors())
        delta: Table = {
            **{f"{x}_proj": x for x in "qkv"},
            **{f"{x}_conv1d.weight": matrix(f"conv_{x}", tail=(1, 0)) for x in "qkv"},
            "a_proj": "dt",
            "b_proj": "rate",
            "g_proj": "z",
            "o_norm": "norm",
            "o_proj": "out",
            "dt_bias": "dt_bias",
            "A_log": "a_log",
        }
        attention = Below("mixer.", Attention().tensors())
        return {
            "D": {"attention_layer_norm": "norm", "linear_attn.": Below("mixer.", delta)},
            "-": {"feedforward_layer_norm": "norm", "mlp.": mlp},
            "*": {"post_attention_layernorm": "norm_after", "self_attn.": attention},
            "F": {"post_feedforward_layernorm": "norm_after", "mlp.": mlp},
        }

    def family(self) -> Family:
        """The family of checkpoints."""
        return replace(super().family(), opened=_opened)


class _Saved:
    """The tensors of a folder that the library saved, as its authors publish them."""

    def __init__(self, reader: Reader) -> None:
        self.path, self._reader = reader.path, reader
        shapes = reader.shapes
        after = {name.removesuffix(_AFTER_MLP) for name in shapes if name.endswith(_AFTER_MLP)}
        self._stored = {
            f"{layer}{_AFTER}" if (layer := name.removesuffix(_BEFORE_MLP)) in after else name: name
            for name in shapes
        }
        self.shapes = {name: shapes[stored] for name, stored in self._stored.items()}
        self._cut = {
            f"{head[1]}{part}_conv1d.weight": (head[1], rows)
            for head in map(_FIRST_TAPS.match, shapes)
            if head is not None
            for part, rows in self._rows(head[1]).items()
        }
        for name, (_, rows) in self._cut.items():
            self.shapes[name] = (rows.stop - rows.start, *shapes[name][1:])

    def _rows(self, head: str) -> dict[str, slice]:
        """The rows of queries, keys and values among all taps of a layer; {} where they do not fit."""
        shapes = self._reader.shapes
        sizes = [shapes.get(f"{head}{part}_proj.weight", (0,))[0] for part in "qkv"]
        if sum(sizes) != sum(shapes.get(f"{head}{part}_conv1d.weight", (0,))[0] for part in "qkv"):
            return {}
        ends = np.cumsum(sizes).tolist()
        return {part: slice(end - size, end) for part, size, end in zip("qkv", sizes, ends, strict=True)}

    def dtype(self, name: str) -> str:
        """NumPy's name of the tensor's dtype."""
        return self._reader.dtype(self._stored[name])

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor, from the disk."""
        if name not in self._cut:
            return self._reader.read(self._stored[name])
        head, rows = self._cut[name]
        return np.concatenate([self._reader.read(f"{head}{part}_conv1d.weight") for part in "qkv"])[rows]

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names in the order in which their tensors are best read."""
        published = {self._stored[name]: name for name in names}
        return [published[stored] for stored in self._reader.in_file_order(published)]


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The family with the tensors as they are published."""
    is_published = any(name.endswith(_AFTER) for name in reader.shapes)
    return family, fields, reader if is_published else _Saved(reader)


OLMO_HYBRID = OlmoHybrid(
    title="OlmoHybridForCausalLM",
    model_types=("olmo_hybrid",),
    layers=("D-", "*F"),
    expected={"hidden_act": "silu"},
    unset=("pad_token_id",),
    sizes={
        **SIZES,
        "vocab_size": Field("vocab_size", 100352),
        "norm_eps": Field("rms_norm_eps", 1e-6),
    },
    blocks={
        "D": BlockFields(
            GatedDelta(norm_eps=1e-5),
            {
                "key_heads": "linear_num_key_heads",
                "value_heads": "linear_num_value_heads",
                "key_dim": "linear_key_head_dim",
                "value_dim": "linear_value_head_dim",
                "conv": Field("linear_conv_kernel_dim", 4),
                "negative_eigenvalues": Field("linear_allow_neg_eigval", True),
            },
        ),
        "*": BlockFields(Attention(qk_norm=True, joint_norm=True, norm_after=True), BIASES),
        "-": BlockFields(GATED, {"inner": Field("intermediate_size", 11008)}),
        "F": BlockFields(replace(GATED, norm_after=True), {"inner": Field("intermediate_size", 11008)}),
    },
)
FAMILY = OLMO_HYBRID.family()
