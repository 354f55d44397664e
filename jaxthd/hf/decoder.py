"""Decoders (LLMs): each of their families is a few tables, which are read in both directions."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from jaxthd.config import Block, LLMConfig, RopeConfig
from jaxthd.config.listing import value_at
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat
from jaxthd.files.tensor_names import Below, Shape, Table, Tensor, tensors
from jaxthd.hf.family import LLM, Family, Field, Settings, TokenIds, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.generation_config import one_or_all
from jaxthd.hf.rotary import must_rotate, rope_config, rope_fields
from jaxthd.models.blocks import MoE, Router

SIZES: Settings = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "tied_embedding": Field("tie_word_embeddings", False),
}
"""Decoder.sizes of most families."""
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Settings of the decoder that most families do not have."""
ANY = object()
"""Stands in a form for a setting that may have any value, or that the family checks by itself."""
SOFTMAX_EXPERTS = MoE(form="swiglu", shared_inner=0, router=Router(scores="softmax"))
"""Experts without a shared one, as most families have them."""


class BlockFields(NamedTuple):
    """What config.json holds of a kind of block.

    form: the block with the settings that no field holds. settings: those that fields hold. The rotary
    embedding of blocks that have one is read and written besides (Decoder.rotary).
    """

    form: Block
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A family of decoders: tables. A class of the family's own has methods for what no table can say.

    title: the library's class. model_types: what config.json says under model_type or architectures; the
        first is written.
    layers: what a layer on disk may be, as letters of our blocks.
    sizes: the settings of the decoder that fields hold. form: its others that are not as in LLMConfig();
        ANY for those that may have any value, or that the family checks by itself.
    blocks: what fields hold of each kind of block, by its letter.
    expected: fields -> the only values of them that jaxthd computes with.
    rotary: whether heads are rotated, and whether that may be a share of each.
    embedding, body, norm: names on disk: of the embedding, before those of the layers and of the final norm,
        and of that. memory: as in Family.
    unset: fields that a new config.json has as null until the tokens are known: the library's default is one
        of the published tokenizer's, and it cannot build a model whose vocabulary lacks that.
    """

    title: str
    model_types: tuple[str, ...]
    layers: tuple[str, ...]
    sizes: Settings
    blocks: Mapping[str, BlockFields]
    expected: Fields
    form: Mapping[str, Any] = field(default_factory=dict)
    rotary: Literal["none", "whole", "partial"] = "whole"
    embedding: str = "model.embed_tokens.weight"
    body: str = "model."
    memory: Mapping[str, str] = field(default_factory=dict)
    norm: str = "norm"
    unset: tuple[str, ...] = ()

    @property
    def fixed(self) -> dict[str, Any]:
        """The settings of the decoder that no field holds."""
        every = {"norm_zero_centred": False, "tied_embedding": False, "mtp_pattern": ""}
        every |= {**dict.fromkeys(MULTIPLIERS, 1.0), **self.form}
        return {name: x for name, x in every.items() if x is not ANY and name not in self.sizes}

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

    def block_tensors(self, llm: LLMConfig, fields: Fields) -> Mapping[str, Table]:
        """The table of the tensors of a block by its letter, below its layer on disk."""
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
        settings = self.fixed | read_settings(fields, self.sizes, where)
        settings["pattern"] = llm.pattern if llm.letters == letters else letters
        settings["mtp_pattern"] = pattern
        # One set of weights serves any number of depths that share it.
        if modules and not (modules == 1 and llm.mtp_shared):
            settings |= {"mtp_depths": modules, "mtp_shared": False}
        blocks = {x: self.read_block(fields, x, where, llm) for x in sorted({*letters, *pattern})}
        return replace(updated(replace(llm, blocks=blocks), settings), blocks=blocks)

    def read_block(self, fields: Fields, letter: str, where: str, llm: LLMConfig) -> Block:
        """The settings of a kind of block; those without effect are the decoder's own."""
        if letter not in self.blocks:
            raise UserError(
                f"{where} has a block {letter!r}; expected {', '.join(self.blocks)}: choose another "
                "checkpoint"
            )
        of_kind = self.blocks[letter]
        settings = read_settings(fields, of_kind.settings, where)
        if self.rotary != "none" and hasattr(of_kind.form, "rope"):
            settings["rope"] = self.rope(fields)
        found, own = updated(of_kind.form, settings), llm.blocks.get(letter)
        if type(own) is not type(found):
            return found
        return updated(found, {name: value_at(own, name) for name in found.without_effect})

    def rope(self, fields: Fields) -> RopeConfig:
        """The rotary embedding of blocks that have one."""
        return rope_config(fields, partial=self.rotary == "partial")

    def rope_fields(self, rope: RopeConfig, block: str) -> dict[str, Any]:
        """The fields that `rope` reads. block: its path, in messages. Raises UserError as must_rotate."""
        must_rotate(rope, block, self.title, partial=self.rotary == "partial")
        return rope_fields(rope)

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
        self.must_hold(llm, self.fixed)
        return {
            "architectures": [self.title],
            "model_type": self.model_types[0],
            **dict.fromkeys(self.unset),
            **write_settings(llm, self.sizes),
            **self.absent_fields(llm),
            **self.block_fields(llm),
            **self.expected,
            "num_hidden_layers": len(llm.letters) // size,
            **self.more_fields(llm),
        }

    def block_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """The fields of all kinds of blocks. Raises UserError for settings that the family does not stand
        for, and where kinds of blocks that share a field differ."""
        fields: dict[str, Any] = {}
        for letter, of_kind in self.blocks.items():
            if (block := llm.blocks.get(letter)) is None:
                continue
            self.must_hold(llm, dict(self._fixed(letter, block, of_kind)))
            of_block = write_settings(block, of_kind.settings)
            if self.rotary != "none" and hasattr(block, "rope"):
                of_block |= self.rope_fields(block.rope, f"model.llm.blocks.{letter}")
            differing = [x for x in of_block if x in fields and fields[x] != of_block[x]]
            if differing:
                raise UserError(
                    f"{self.title} has one {differing[0]} for all kinds of blocks, and model.llm.blocks "
                    f"{fields[differing[0]]!r} and {of_block[differing[0]]!r}; expected one value: choose "
                    "another format"
                )
            fields |= of_block
        return fields

    def absent_fields(self, llm: LLMConfig) -> dict[str, Any]:
        """Fields of the blocks that the model does not have: libraries want the sizes of attention and MLPs
        all the same."""
        found: dict[str, Any] = {}
        for letter, of_kind in self.blocks.items():
            if letter not in llm.blocks and not of_kind.form.routes:
                found = write_settings(of_kind.form, of_kind.settings) | found
        return found

    def meaningless_fields(self, llm: LLMConfig) -> set[str]:
        """Names of fields that say nothing about the model: where there is an original, its values stay."""
        return {*self.unset, *(self.absent_fields(llm).keys() - self.block_fields(llm).keys())}

    def _fixed(self, letter: str, block: Block, of_kind: "BlockFields") -> Iterator[tuple[str, Any]]:
        """(path in LLMConfig, value that the family stands for) of a block's settings that no field holds."""
        if type(block) is not type(of_kind.form):
            yield f"blocks.{letter}.kind", of_kind.form.kind
            return
        there = flat(asdict(of_kind.form))
        held = [f"{name}." for name in of_kind.settings]
        held += ["rope."] if self.rotary != "none" else []
        for name in there.keys() - of_kind.settings.keys() - {*block.without_effect}:
            if not name.startswith((*held,)):
                yield f"blocks.{letter}.{name}", there[name]

    def must_hold(self, llm: LLMConfig, expected: Mapping[str, Any]) -> None:
        """Raises UserError where a setting is another one than the family stands for. expected: by path."""
        differing = [
            f"\n  model.llm.{path}: {value_at(llm, path)!r} (the format stands for {value!r})"
            for path, value in sorted(expected.items())
            if value_at(llm, path) != value
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
        stacks = dict(llm.stacks)
        blocks, before = self.block_tensors(llm, fields), Counter[str]()
        for number, letter in enumerate(letters):
            layer = f"{theirs}layers.{first + number // len(self.layers[0])}."
            stack = f"{ours}layers.{stacks[letter]}."
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
            meaningless=lambda model: self.meaningless_fields(model.llm),
            tensors=lambda model, fields, shapes: self.tensors(model.llm, fields, shapes),
            ignored=("lm_head.weight",),  # a tied embedding may be copied as the head
            token_fields=token_fields,
            mtp_tensors=self.mtp_prefixes,
            memory=self.memory,
        )


def mixer_block(mixer: Table) -> Table:
    """The table of a block that mixes tokens, where a layer on disk is two blocks; `mixer`: of its mixer."""
    return {"input_layernorm": "norm", "self_attn.": Below("mixer.", mixer)}


def ffn_block(mixer: Table) -> Table:
    """The table of the block behind it, an MLP or experts."""
    return {"post_attention_layernorm": "norm", "mlp.": Below("mixer.", mixer)}


def paired_blocks(llm: LLMConfig, special: Mapping[str, Table]) -> dict[str, Table]:
    """The tables of all blocks where a layer on disk is two. special: by letter, those with other names."""
    usual = {x: (ffn_block if x in "-E" else mixer_block)(y.tensors()) for x, y in llm.blocks.items()}
    return {**usual, **special}


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
