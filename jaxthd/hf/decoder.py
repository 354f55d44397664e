"""Decoders (LLMs): each of their families is a few tables, which are read in both directions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxthd.config import LLMConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import LLM, Family, Settings, TokenIds, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.generation_config import one_or_all
from jaxthd.hf.names import Below, Shape, Table, Tensor, matrix, tensors
from jaxthd.hf.rotary import must_rotate, rope_config, rope_fields
from jaxthd.models.mixers import LAYER_KINDS

ANY = object()
"""Stands in a form for a setting that may have any value, or that the family checks by itself."""
PLAIN: Mapping[str, Any] = {
    "rope": RopeConfig(),
    "qk_norm": False,
    "attention_bias": False,
    "attention_sinks": False,
    "attention_gate": False,
    "norm_zero_centred": False,
    "ffn_form": "swiglu",
    "ffn_bias": False,
    "tied_embedding": False,
    "mtp_pattern": "",
}
PLAIN_MOE: Mapping[str, Any] = {
    "router": "softmax",
    "router_bias": False,
    "router_groups": 1,
    "router_normalised": True,
    "router_scale": 1.0,
    "shared_expert_dim": 0,
    "shared_expert_gate": False,
    "latent_dim": 0,
}
"""Our settings as they are in a family that has no field for them, unless its form says otherwise; PLAIN_MOE
where there are experts."""

ATTENTION: Table = {
    **{f"{theirs}_proj": ours for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))},
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "sinks": "sinks",
}
MLP: Table = {f"{part}_proj": part for part in ("gate", "up", "down")}
EXPERTS: Table = {
    "gate": "router",
    "gate.e_score_correction_bias": "correction_bias",
    "experts.{}.": Below("", {f"{part}_proj.weight": matrix(part) for part in ("gate", "up", "down")}, "up"),
    "shared_experts.": Below("shared.", MLP),
    "fc1_latent_proj": "latent_in",
    "fc2_latent_proj": "latent_out",
}
"""The usual names of the mixers' tensors. Those of arrays that a model does not have count for nothing."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A family of decoders: tables. A class of the family's own has methods for what no table can say.

    title: the library's class. model_types: what config.json says under model_type or architectures; the
        first is written.
    layers: what a layer on disk may be, as letters of our blocks.
    sizes, moe_sizes: the settings that fields hold; moe_sizes where there are experts.
    expected: fields -> the only values of them that jaxthd computes with.
    form, moe_form: settings that no field holds, where they are not PLAIN and PLAIN_MOE.
    rotary: whether heads are rotated, and whether that may be a share of each.
    embedding, body, norm: names on disk: of the embedding, before those of the layers and of the final norm,
        and of that.
    """

    title: str
    model_types: tuple[str, ...]
    layers: tuple[str, ...]
    sizes: Settings
    expected: Fields
    form: Mapping[str, Any]
    moe_sizes: Settings
    moe_form: Mapping[str, Any]
    rotary: Literal["none", "whole", "partial"] = "whole"
    embedding: str = "model.embed_tokens.weight"
    body: str = "model."
    norm: str = "norm"

    def complete(self, fields: Fields) -> Fields:
        """The fields by their newest names, with the library's defaults where these depend on others."""
        return fields

    def letters(self, fields: Fields, where: str) -> str:
        """The letters of the model's blocks. where: the name of config.json in messages."""
        raise NotImplementedError

    def mtp(self, fields: Fields, letters: str) -> tuple[str, int]:
        """(blocks of a module of multi-token prediction, number of modules), of a model of these blocks."""
        return "", 0

    def more_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """Fields that are in no table. Raises UserError for a model that the family cannot hold."""
        return {}

    def blocks(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The table of a block by its letter, below its layer on disk."""
        raise NotImplementedError

    def mtp_tensors(self, llm: LLMConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """The tensors of multi-token prediction, of a model and a checkpoint that have it."""
        raise NotImplementedError

    def mtp_prefixes(self, fields: Fields) -> tuple[str, ...]:
        """The beginnings of the names of tensors of multi-token prediction."""
        return ("mtp.",)

    def read(self, fields: Fields, llm: LLMConfig, where: str = "config.json") -> LLMConfig:
        """`llm` with the checkpoint's settings; the stage marks of its pattern stay.

        Raises UserError for settings that jaxthd has no model for.
        """
        fields = self.complete(fields)
        must_be(fields, self.expected, where)
        letters = self.letters(fields, where)
        pattern, modules = self.mtp(fields, letters)
        pattern = pattern if modules else ""
        blocks = letters + pattern
        settings = self.form_of(blocks) | read_settings(fields, self.table(blocks), where)
        if self.rotary != "none":
            settings["rope"] = rope_config(fields, partial=self.rotary == "partial")
        settings["pattern"] = llm.pattern if llm.letters == letters else letters
        settings["mtp_pattern"] = pattern
        # One set of weights serves any number of depths that share it.
        if modules and not (modules == 1 and llm.mtp_shared):
            settings |= {"mtp_depths": modules, "mtp_shared": False}
        return updated(llm, settings)

    def write(self, llm: LLMConfig) -> dict[str, Any]:
        """config.json of an export. Raises UserError where the family cannot hold the model."""
        size = len(self.layers[0])
        for name, letters in (("pattern", llm.letters), ("mtp_pattern", llm.mtp_pattern)):
            unknown = {letters[i : i + size] for i in range(0, len(letters), size)} - {*self.layers}
            if unknown:
                raise UserError(
                    f"model.llm.{name} is {getattr(llm, name)!r}, with {', '.join(sorted(unknown))}; "
                    f"expected {', '.join(self.layers)} alone for {self.title}: choose another format"
                )
        if self.rotary != "none":
            must_rotate(llm.rope, self.title, partial=self.rotary == "partial")
        blocks = llm.letters + llm.mtp_pattern
        self.must_hold(llm, self.form_of(blocks))
        return {
            "architectures": [self.title],
            "model_type": self.model_types[0],
            **write_settings(llm, self.table(blocks)),
            **self.expected,
            "num_hidden_layers": len(llm.letters) // size,
            **(rope_fields(llm.rope) if self.rotary != "none" else {}),
            **self.more_fields(llm),
        }

    def table(self, letters: str) -> Settings:
        """The settings that fields hold, of a model of these blocks."""
        return {**self.sizes, **(self.moe_sizes if "E" in letters else {})}

    def form_of(self, letters: str) -> dict[str, Any]:
        """The settings that no field holds, with their values, of a model of these blocks."""
        form = {**PLAIN, **self.form}
        if "E" in letters:
            form |= {**PLAIN_MOE, **self.moe_form}
        if self.rotary != "none":
            form["rope"] = ANY
        held = self.table(letters)
        return {name: value for name, value in form.items() if value is not ANY and name not in held}

    def must_hold(self, llm: LLMConfig, expected: Mapping[str, Any]) -> None:
        """Raises UserError where a setting is another one than the family stands for."""
        differing = [
            f"\n  model.llm.{name}: {getattr(llm, name)!r} (the format stands for {value!r})"
            for name, value in expected.items()
            if getattr(llm, name) != value
        ]
        if differing:
            raise UserError(
                f"{self.title} cannot hold this model:{''.join(differing)}\nExpected an LLM with these "
                "settings: choose another format"
            )

    def tensors(self, llm: LLMConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """The tensors of the model; those of multi-token prediction where the checkpoint has them too."""
        yield from tensors({self.embedding: "embedding"}, shapes)
        yield from self.layer_tensors(llm, fields, shapes, llm.letters, self.body, "decoder.")
        yield from tensors({f"{self.body}{self.norm}": "decoder.norm", "lm_head.weight": "head"}, shapes)
        if llm.mtp_pattern and self.mtp(fields, llm.letters)[1]:
            yield from self.mtp_tensors(llm, fields, shapes)

    def layer_tensors(
        self,
        llm: LLMConfig,
        fields: Fields,
        shapes: Mapping[str, Shape],
        letters: str,
        theirs: str,
        ours: str,
        first: int = 0,
    ) -> Iterator[Tensor]:
        """The tensors of blocks with these letters.

        theirs, ours: what names have in front of "layers.". first: the number of their first layer on disk.
        """
        blocks, before = self.blocks(llm, fields), Counter[str]()
        for number, letter in enumerate(letters):
            layer = f"{theirs}layers.{first + number // len(self.layers[0])}."
            stack = f"{ours}layers.{LAYER_KINDS[letter].name}."
            yield from tensors(blocks[letter], shapes, layer, stack, (before[letter],))
            before[letter] += 1

    def family(self) -> Family:
        """The family of checkpoints that hold such a decoder alone."""
        return Family(
            format="llm",
            title=self.title,
            gives="the LLM",
            model_types=self.model_types,
            covers=LLM,
            configure=lambda fields, model: replace(model, llm=self.read(fields, model.llm)),
            fields=lambda model: self.write(model.llm),
            tensors=lambda model, fields, shapes: self.tensors(model.llm, fields, shapes),
            ignored=("lm_head.weight",),  # a tied embedding may be copied as the head
            token_fields=token_fields,
            mtp_tensors=self.mtp_prefixes,
        )


def mixer_block(mixer: Table) -> Table:
    """The table of a block that mixes tokens, where a layer on disk is two blocks; `mixer`: of its mixer."""
    return {"input_layernorm": "norm", "self_attn.": Below("mixer.", mixer)}


def ffn_block(mixer: Table) -> Table:
    """The table of the block behind it, an MLP or experts."""
    return {"post_attention_layernorm": "norm", "mlp.": Below("mixer.", mixer)}


def token_fields(tokens: TokenIds) -> dict[str, Any]:
    """Fields of config.json for a text model's special tokens."""
    return {
        "bos_token_id": tokens.bos_id,
        "eos_token_id": one_or_all(tokens.eos_ids),
        "pad_token_id": tokens.pad_id,
    }


def layer_types(fields: Fields, letters: Mapping[str, str], default: list[str]) -> str:
    """The letters of the mixers of layer_types.

    letters: by the type's name. default: the library's types, which repeat until there are enough.

    Raises UserError for another type, and where there are more or fewer than num_hidden_layers.
    """
    count = int(required(fields, "num_hidden_layers"))
    types = fields.get("layer_types") or [default[i % len(default)] for i in range(count)]
    if {*types} - {*letters} or len(types) != count:
        raise UserError(
            f"config.json has num_hidden_layers {count}, and {len(types)} layer_types: "
            f"{', '.join(dict.fromkeys(types))}; expected {count} of {' and '.join(letters)}: correct them, "
            "or choose another checkpoint"
        )
    return "".join(letters[each] for each in types)


def sparse_layers(fields: Fields, mixers: str) -> str:
    """The letters of layers with these mixers, each followed by experts or an MLP, as the fields say."""
    dense, every = set(fields.get("mlp_only_layers") or []), fields.get("decoder_sparse_step") or 1
    has_experts = bool(fields.get("num_experts"))
    return "".join(
        mixer + ("E" if has_experts and i not in dense and (i + 1) % every == 0 else "-")
        for i, mixer in enumerate(mixers)
    )


def dense_layers(letters: str) -> list[int]:
    """The numbers of the layers with an MLP: mlp_only_layers."""
    return [number for number, ffn in enumerate(letters[1::2]) if ffn == "-"]
