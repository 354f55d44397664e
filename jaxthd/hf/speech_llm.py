"""Speech LLMs of transformers: an audio encoder, a projector, a decoder; each family is a few tables, which
are read in both directions.

config.json holds the encoder's settings under audio_config or another name, the decoder's under text_config.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxthd.config import FrontEnd, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Copy, Shape, Table, Tensor, tensors
from jaxthd.hf.decoder import Decoder, token_fields
from jaxthd.hf.family import (
    ADAPTER,
    ENCODER,
    LLM,
    Family,
    Settings,
    TokenIds,
    read_settings,
    updated,
    write_settings,
)
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.rotary import without_axes

TEXT, AUDIO = "text_config", "audio_config"
TIED = "tie_word_embeddings"
_HEAD = "lm_head.weight"
WHISPER_NAMES = {
    "num_hidden_layers": "encoder_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""The library's names of an encoder's sizes -> Whisper's."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """An object of config.json with settings of the encoder.

    settings: those that it holds. type: its model_type; "": it has none. aliases: other names of its fields
    -> the names that `settings` has. expected: (encoder, decoder's dim) -> fields of it and the only values
    that jaxthd computes with.
    """

    settings: Settings
    type: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    expected: Callable[[Any, int], dict[str, Any]] = lambda encoder, dim: {}


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of tensors on disk. text: (a decoder's name) -> the name. audio, projector: before those of the
    encoder and the projector. projection: the table of the adapter's tensors. encoder: (encoder) -> the table
    of its own. memory: as in Family."""

    text: Callable[[str], str]
    audio: str
    projector: str
    projection: Table
    encoder: Callable[[FrontEnd], Table] = lambda encoder: encoder.tensors()
    memory: Mapping[str, str] = field(default_factory=dict)


def below_language_model(name: str) -> str:
    """The name of a decoder's tensor in folders of Qwen2-Audio and those like it."""
    return f"language_model.{name}"


Q2A_NAMES = Names(
    text=below_language_model,
    audio="audio_tower.",
    projector="multi_modal_projector.",
    projection={"linear_1": "up", "linear_2": "out"},
    memory={
        "language_model.model.": "model.language_model.",
        **{f"{part}.": f"model.{part}." for part in ("audio_tower", "multi_modal_projector")},
    },
)
"""Qwen2-Audio's names, which most of these families have."""


@dataclass(frozen=True, kw_only=True)
class SpeechLLM:
    """A family of speech LLMs: tables.

    format, title, model_types: as in Family.
    decoders: the families of decoders that text_config may be of. text: its settings where they are absent.
    text_ties: whether text_config says that the embedding is tied, where nothing above does; the library
        does not ask it. ties: False where the library has a head of its own, whatever the settings say: an
        export of a tied embedding has it twice.
    encoder: with the settings that no field holds. parts: the objects that hold the others, by name; "" for
        config.json itself.
    adapter: (encoder, decoder's dim) -> the settings of the adapter (ModelConfig), which no field holds.
    audio_token: the field with the id of the placeholder.
    names: on disk. ignored, float32, data: as in Family.
    unread: the parts of the folder that are not read.
    above: the field of config.json that holds all of these; "": they are its own. inner: the class and the
        model_type that this field's value has; those of config.json where none are given. The library builds
        another model, with its defaults, where they are not found.
    """

    format: str
    title: str
    model_types: tuple[str, ...]
    decoders: tuple[Decoder, ...]
    text: Fields
    text_ties: bool = False
    ties: bool = True
    encoder: FrontEnd
    parts: Mapping[str, Part]
    adapter: Callable[[FrontEnd, int], dict[str, Any]]
    audio_token: str = "audio_token_id"
    names: Names = Q2A_NAMES
    ignored: tuple[str, ...] = ()
    unread: str = ""
    float32: tuple[str, ...] = ()
    data: Fields = field(default_factory=dict)
    above: str = ""
    inner: tuple[str, str] | None = None

    def own(self, fields: Fields) -> Fields:
        """The fields of the model."""
        found: Fields = required(fields, self.above) if self.above else fields
        return found

    def recognises(self, fields: Fields) -> bool:
        """Whether a config.json is of this form."""
        own = (fields.get(self.above) or {}) if self.above else fields
        return all(name in own for name in self.parts if name)

    def decoder(self, fields: Fields) -> tuple[Decoder, Fields]:
        """(the family of the decoder, its fields). Raises UserError for one that the library does not
        combine with this encoder."""
        own = self.own(fields)
        text = {**self.text, **(own.get(TEXT) or {})}
        text[TIED] = self.ties and bool(own.get(TIED, (text if self.text_ties else self.text).get(TIED)))
        text = without_axes(text)
        kind = text.get("model_type", self.decoders[0].model_types[0])
        for decoder in self.decoders:
            if kind in decoder.model_types:
                return decoder, text
        known = ", ".join(name for decoder in self.decoders for name in decoder.model_types)
        raise UserError(
            f"{TEXT} has model_type {kind!r}; expected one of {known} for {self.title}: choose another "
            "checkpoint"
        )

    def configure(self, fields: Fields, model: ModelConfig) -> ModelConfig:
        """The model with the checkpoint's settings."""
        decoder, text = self.decoder(fields)
        llm = decoder.read(text, model.llm, TEXT)
        if model.encoder is None:
            return replace(model, llm=llm)
        own, encoder = self.own(fields), self.encoder
        stored = {name: (own.get(name) or {}) if name else own for name in self.parts}
        given = {
            name: {part.aliases.get(x, x): value for x, value in stored[name].items()}
            for name, part in self.parts.items()
        }
        for name, part in self.parts.items():
            encoder = updated(encoder, read_settings(given[name], part.settings, name or "config.json"))
        for name, part in self.parts.items():
            must_be(given[name], part.expected(encoder, llm.dim), name or "config.json")
        return replace(model, llm=llm, encoder=encoder, **self.adapter(encoder, llm.dim))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """config.json of an export. Raises UserError where the family cannot hold the model."""
        encoder = model.audio_encoder
        if type(encoder) is not type(self.encoder):
            raise UserError(
                f"model.encoder is {encoder.title}; expected {self.encoder.title} for {self.title}: choose "
                "another format"
            )
        text = self._text_fields(model)
        own = {"architectures": [self.title], "model_type": self.model_types[0], TEXT: text, TIED: text[TIED]}
        for name, part in self.parts.items():
            written = write_settings(encoder, part.settings) | part.expected(encoder, model.llm.dim)
            own |= {name: ({"model_type": part.type} if part.type else {}) | written} if name else written
        if self.above:
            top = {name: own[name] for name in ("architectures", "model_type")}
            if self.inner:
                own |= {"architectures": [self.inner[0]], "model_type": self.inner[1]}
            own = {**top, self.above: own}
        self._must_hold(model, self.configure(own, model))
        return own

    def _text_fields(self, model: ModelConfig) -> dict[str, Any]:
        refusals = []
        for decoder in self.decoders:
            try:
                text = decoder.write(model.llm)
            except UserError as error:
                refusals.append(error)
            else:
                del text["architectures"]
                return text | {TIED: self.ties and text[TIED]}
        raise refusals[0]

    def _must_hold(self, model: ModelConfig, read: ModelConfig) -> None:
        """Raises UserError where the model is not the one that its fields are read as."""
        names = self.adapter(read.audio_encoder, read.llm.dim)
        here, there = (
            asdict(x.audio_encoder) | {name: getattr(x, name) for name in names} for x in (model, read)
        )
        differing = [
            f"\n  {name}: {here[name]!r} (the format stands for {value!r})"
            for name, value in there.items()
            if here[name] != value
        ]
        if differing:
            raise UserError(
                f"{self.title} cannot hold this model:{''.join(differing)}\nExpected an encoder and an "
                "adapter with these settings: choose another format"
            )

    def tensors(self, model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        """The tensors of the model."""
        names = self.names
        if model.encoder is not None:
            yield from tensors(names.encoder(model.encoder), shapes, names.audio, "encoder.")
            yield from tensors(names.projection, shapes, names.projector, "adapter.")
        decoder, text = self.decoder(fields)
        for tensor in decoder.tensors(model.llm, text, shapes):
            yield tensor._replace(name=names.text(tensor.name))
        if not self.ties and model.llm.tied_embedding:
            yield from tensors({names.text(_HEAD): Copy("embedding")}, shapes)

    def token_fields(self, tokens: TokenIds) -> dict[str, Any]:
        """Fields for the special tokens."""
        fields = {TEXT: token_fields(tokens), self.audio_token: tokens.audio_id}
        return {self.above: fields} if self.above else fields

    def family(self) -> Family:
        """The family of checkpoints."""
        return Family(
            format=self.format,
            title=self.title,
            gives="encoder, adapter and LLM" + (f", without its {self.unread}" if self.unread else ""),
            model_types=self.model_types,
            covers=(*ENCODER, *ADAPTER, *LLM),
            configure=self.configure,
            fields=self.fields,
            tensors=self.tensors,
            # A tied embedding may be copied as the head.
            ignored=(self.names.text(_HEAD), *self.ignored),
            token_fields=self.token_fields,
            recognises=self.recognises,
            float32=self.float32,
            data=lambda fields: dict(self.data),
            memory=self.names.memory,
        )
