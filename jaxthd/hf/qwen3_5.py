"""Qwen3.5, dense and MoE (transformers: Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, and the two classes with a
vision tower around them, whose folders are the published ones).

The layers are Qwen3-Next's, with the gated delta rule's projections stored each by itself, and without dense
layers among those of experts. Published folders have the decoder's settings in text_config and its tensors
below model.language_model; the experts of a layer are one tensor, but for those of multi-token prediction in
some of them. The rotary embedding's axes are equal for audio and text. The vision tower is not read; an
export copies it from the original.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.files.tensor_names import Shape, Table, Tensor, matrix
from jaxthd.hf.decoder import SOFTMAX_EXPERTS, BlockFields, token_fields
from jaxthd.hf.family import LLM, Family, Field, Settings, TokenIds
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.packed_experts import PACKED, packed
from jaxthd.hf.qwen3_next import QWEN3_NEXT, Qwen3Next, shared_inner
from jaxthd.hf.reader import Reader
from jaxthd.hf.rotary import without_axes

_SMALLEST_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "intermediate_size": 16,
    "num_position_embeddings": 4,
}
"""The smallest vision tower: the library's class needs one. No weights are written for it."""
_TEXT, _TIED = "text_config", "tie_word_embeddings"


class Qwen35(Qwen3Next):
    """Checkpoints of Qwen3.5."""

    def complete(self, fields: Fields) -> Fields:
        """The fields with the library's defaults that decide about layers and rotated shares, and without the
        axes of positions. Raises UserError for another form of multi-token prediction."""
        modules = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        must_be(fields, modules if fields.get("mtp_num_hidden_layers") else {})
        return without_axes({"partial_rotary_factor": 0.25, **fields})

    def letters(self, fields: Fields, where: str) -> str:
        """The blocks: the gated delta rule or attention, each before the same kind of block."""
        return "".join(mixer + self.layers[0][1] for mixer in self.mixers(fields))

    def mtp(self, fields: Fields, letters: str) -> tuple[str, int]:
        """One module as Qwen3-Next's, unless the fields say that there is none."""
        count = fields.get("mtp_num_hidden_layers")
        return super().mtp(fields, letters)[0], 1 if count is None else int(count)

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The kinds of layers. Raises UserError for another form of multi-token prediction or experts."""
        # Absent, an export like a checkpoint that has it keeps what that says: its tensors are copied.
        modules = {"mtp_num_hidden_layers": 1} if llm.mtp_pattern else {}
        return {**self.mixer_fields(llm), **modules}

    def delta_tensors(self, usual: Table) -> Table:
        """The table of the gated delta rule: each projection by itself, but for those before the
        convolution."""
        own: Table = {
            "in_proj_qkv.weight": matrix("q.w", "k.w", "v.w"),
            "in_proj_z": "z",
            "in_proj_b": "rate",
            "in_proj_a": "dt",
        }
        others = {name: x for name, x in usual.items() if not name.startswith("in_proj_")}
        return {**own, **others}

    def family(self) -> Family:
        """The family of folders that hold the decoder alone."""
        return replace(super().family(), opened=_opened)

    def below_language_model(self, title: str, model_type: str) -> Family:
        """The family of folders that hold the decoder beside a vision tower. title: the library's class."""

        def text(fields: Fields) -> dict[str, Any]:
            """The decoder's fields. The library asks the outer ones alone whether the embedding is tied."""
            return {**required(fields, _TEXT), _TIED: bool(fields.get(_TIED))}

        def configure(fields: Fields, model: ModelConfig) -> ModelConfig:
            """The model with the decoder's settings."""
            return replace(model, llm=self.read(text(fields), model.llm, _TEXT))

        def written(model: ModelConfig) -> dict[str, Any]:
            """config.json of an export."""
            own = self.write(model.llm)
            del own["architectures"]
            tower = {**_SMALLEST_TOWER, "out_hidden_size": model.llm.dim}
            top = {"architectures": [title], "model_type": model_type}
            return {**top, _TEXT: own, _TIED: own[_TIED], "vision_config": tower}

        def named(model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
            """The decoder's tensors by their names in such folders."""
            for tensor in self.tensors(model.llm, text(fields), shapes):
                below = tensor.name.replace("model.", "model.language_model.", 1)
                is_inside = tensor.name.startswith("model.")
                yield tensor._replace(name=below if is_inside else tensor.name)

        def tokens(ids: TokenIds) -> dict[str, Any]:
            """Fields for the special tokens."""
            return {_TEXT: token_fields(ids)}

        return Family(
            format="qwen3_5",
            title=title,
            gives="the LLM, without its vision tower",
            model_types=(model_type,),
            covers=LLM,
            configure=configure,
            fields=written,
            tensors=named,
            ignored=("model.visual.*", "lm_head.weight"),
            token_fields=tokens,
            opened=_opened,
            mtp_tensors=self.mtp_prefixes,
            meaningless=lambda model: self.meaningless_fields(model.llm),
        )


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The family with the experts of each layer as the folder has them."""
    end = f".{PACKED['rows'][0]}"
    layers = {x.removesuffix(end) for x in reader.shapes if x.endswith(f".experts{end}")}
    if not layers:
        return family, fields, reader

    def named(model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """The family's tensors, with such layers' experts in one."""
        each = family.tensors(model, fields, shapes)
        return packed(each, lambda layer: "rows" if layer in layers else "each")

    return replace(family, tensors=named), fields, reader


def _attention(kv_heads: int) -> BlockFields:
    form, settings = QWEN3_NEXT.blocks["*"]
    return BlockFields(form, {**settings, "kv_heads": Field("num_key_value_heads", kv_heads)})


def _sizes(dim: int) -> Settings:
    return {
        **QWEN3_NEXT.sizes,
        "vocab_size": Field("vocab_size", 248320),
        "dim": Field("hidden_size", dim),
    }


QWEN3_5 = Qwen35(
    title="Qwen3_5ForCausalLM",
    model_types=("qwen3_5_text",),
    layers=("D-", "*-"),
    rotary="partial",
    expected={"attention_bias": False, "hidden_act": "silu", "attn_output_gate": True},
    form=QWEN3_NEXT.form,
    sizes=_sizes(4096),
    blocks={
        "D": QWEN3_NEXT.blocks["D"],
        "*": _attention(4),
        "-": BlockFields(QWEN3_NEXT.blocks["-"].form, {"inner": Field("intermediate_size", 12288)}),
    },
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    title="Qwen3_5MoeForCausalLM",
    model_types=("qwen3_5_moe_text",),
    layers=("DE", "*E"),
    sizes=_sizes(2048),
    blocks={
        "D": QWEN3_NEXT.blocks["D"],
        "*": _attention(2),
        "E": BlockFields(
            replace(SOFTMAX_EXPERTS, shared_gate=True),
            {
                "experts": Field("num_experts", 256),
                "experts_per_token": Field("num_experts_per_tok", 8),
                "inner": Field("moe_intermediate_size", 512),
                "shared_inner": Field("shared_expert_intermediate_size", 512, shared_inner),
            },
        ),
    },
)
FAMILIES = (
    QWEN3_5.family(),
    QWEN3_5_MOE.family(),
    QWEN3_5.below_language_model("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    QWEN3_5_MOE.below_language_model("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)
