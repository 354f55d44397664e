"""What a family of checkpoints is: its settings in config.json, and its name table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxthd.config import AdaptConfig, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.names import Names, Shape

Fields = Mapping[str, Any]
"""A config.json."""

LLM = ("embedding", "decoder.", "head")
ENCODER, ADAPTER = ("encoder.",), ("adapter.",)
"""What the names of a part's arrays begin with. Multi-token prediction (mtp.*) belongs to the LLM, which may
lack it."""

PLAIN: dict[str, Any] = {
    "attention_sinks": False,
    "ffn_bias": False,
    "router_bias": False,
    "router_groups": 1,
    "attention_gate": False,
    "norm_zero_centred": False,
    "shared_expert_gate": False,
}
"""Settings of families without the additions of GPT-OSS, DeepSeek-V3 and Qwen3-Next."""


@runtime_checkable
class SpecialTokens(Protocol):
    """A tokenizer's special tokens; eos_ids: all that end an answer; audio_id stands for an encoder frame."""

    @property
    def bos_id(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def audio_id(self) -> int: ...


@dataclass(frozen=True)
class Family:
    """One format of checkpoints.

    To add one, write a file such as parakeet.py, and add a line to FAMILIES in registry.py.

    format: what `jaxthd.convert export --format` calls it; families of one format are tried in turn.
    title: the library's class, for help texts and the guide. gives: the parts of a model that it holds.
    model_types: what config.json says under model_type or architectures.
    covers: our arrays that such a checkpoint holds, by what their names begin with.
    configure: (fields, model) -> the model with the checkpoint's settings. Raises UserError for settings that
        jaxthd has no model for.
    fields: (model) -> config.json of an export. Raises UserError where the family cannot hold the model.
    write: (model, fields, names) writes the name table; `fields` are the checkpoint's, or the export's.
    ignored: patterns of tensors that may be left unread where the name table does not have them: those that a
        speech LLM has no use for, and those that a model may do without.
    token_fields: (special tokens) -> config.json's fields for them, which generation_config.json repeats.
        None: the family holds no text model.
    complete: (fields, shapes of the tensors) -> fields, with settings that config.json leaves out.
    lora: (fields) -> the LoRA that the checkpoint has, as settings of a run. None where it has none.
    lora_fields: (adapt, names of the projections with LoRA) -> the field "lora" of an export. None: the
        family holds no LoRA, which is merged before.
    mtp_tensors: (fields) -> what the names of tensors of multi-token prediction have in front. They may be
        left unread.
    by_default: whether an export of a model that the family holds whole has its format without being asked.
    """

    format: str
    title: str
    gives: str
    model_types: tuple[str, ...]
    covers: tuple[str, ...]
    configure: Callable[[Fields, ModelConfig], ModelConfig]
    fields: Callable[[ModelConfig], dict[str, Any]]
    write: Callable[[ModelConfig, Fields, Names], None]
    ignored: tuple[str, ...] = ()
    token_fields: Callable[[SpecialTokens], dict[str, Any]] | None = None
    complete: Callable[[Fields, Mapping[str, Shape]], Fields] | None = None
    lora: Callable[[Fields], AdaptConfig | None] | None = None
    lora_fields: Callable[[AdaptConfig, frozenset[str]], dict[str, Any]] | None = None
    mtp_tensors: Callable[[Fields], tuple[str, ...]] = lambda fields: ("mtp.",)
    by_default: bool = True

    def holds(self, name: str) -> bool:
        """Whether such a checkpoint holds our array of this name."""
        return any(name == what or (what.endswith(".") and name.startswith(what)) for what in self.covers)


def one_or_all(ids: Sequence[int]) -> int | list[int]:
    """Token ids as transformers writes them: one by itself, several as a list."""
    return ids[0] if len(ids) == 1 else list(ids)


def mtp_settings(pattern: str, modules: int, llm: LLMConfig) -> dict[str, Any]:
    """Settings of multi-token prediction with so many sets of weights. One set serves any number of depths
    that share it.
    """
    if not modules or (modules == 1 and llm.mtp_shared):
        return {"mtp_pattern": pattern if modules else ""}
    return {"mtp_pattern": pattern, "mtp_depths": modules, "mtp_shared": False}


def required(fields: Fields, name: str, where: str = "config.json") -> Any:
    """A field that has no default."""
    if fields.get(name) is None:
        raise UserError(f"{where} has no {name!r}; expected the settings of a whole checkpoint: complete it")
    return fields[name]


def must_be(fields: Fields, expected: Fields, where: str = "config.json") -> None:
    """Raises UserError where a setting has another value than the one that jaxthd's model computes with.

    A setting that is absent or null passes.
    """
    differing = [
        f"\n  {name}: {fields[name]!r} (jaxthd computes {value!r})"
        for name, value in expected.items()
        if fields.get(name, value) != value and fields[name] is not None
    ]
    if differing:
        raise UserError(
            f"{where} describes a model that jaxthd does not have:{''.join(differing)}\n"
            "Expected a checkpoint with these settings: choose another"
        )


def must_hold(llm: LLMConfig, expected: Mapping[str, Any], format: str) -> None:
    """Raises UserError where the LLM has another setting than the one that the format stands for."""
    differing = [
        f"\n  model.llm.{name}: {getattr(llm, name)!r} (the format stands for {value!r})"
        for name, value in expected.items()
        if getattr(llm, name) != value
    ]
    if differing:
        raise UserError(
            f"{format} cannot hold this model:{''.join(differing)}\nExpected an LLM with these settings: "
            "choose another format"
        )


def encoder_of(model: ModelConfig, what: str) -> EncoderConfig:
    """The model's encoder. Raises UserError for a text-only model: `what` cannot hold it."""
    if model.encoder is None:
        raise UserError(
            f"model.encoder is None: a text-only model has no {what}; expected an LLM's format: choose "
            "--format llm"
        )
    return model.encoder
