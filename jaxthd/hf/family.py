"""Families of checkpoints: the settings in config.json, the names of the tensors."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.config.values import with_value
from jaxthd.files.tensor_names import Shape, Tensor
from jaxthd.hf.fields import Fields, required
from jaxthd.hf.reader import Reader

Config = TypeVar("Config")
"""Settings of a block, a front end, the model and others."""

LLM = ("embedding", "decoder.", "head")
ENCODER, ADAPTER = ("encoder.",), ("adapter.",)
"""The beginnings of the names of a part's arrays. Multi-token prediction (mtp.*) belongs to the LLM, which
may lack it."""


class TokenIds(NamedTuple):
    """A tokenizer's special tokens. eos_ids: all that end an answer. audio_id stands for an encoder frame."""

    bos_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    audio_id: int


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
    tensors: (model, fields, shapes of our arrays) -> the tensors; `fields` are the checkpoint's, or the
        export's.
    ignored: patterns of tensors that may be left unread where `tensors` does not name them: those that a
        speech LLM has no use for, and those that a model may do without.
    token_fields: (special tokens) -> config.json's fields for them, which generation_config.json repeats.
        None: the family holds no text model.
    opened: (the family, fields, reader) -> those of a checkpoint, as its files complete and its tensors
        change them. None: they are as they are.
    lora: (fields) -> the LoRA that the checkpoint has, as settings of a run. None where it has none.
    lora_fields: (model, adapt, names of the projections with LoRA) -> the field "lora" of an export; {}: this
        one is merged before. None: the family holds no LoRA.
    adapter: the field of config.json that says whether LoRA lies in files of its own (adapter_files.py); "":
        it never does.
    mtp_tensors: (fields) -> what the names of tensors of multi-token prediction have in front. They may be
        left unread.
    tokenizers: (folder, fields) -> further folders that may have the checkpoint's tokenizer.
    finish: (folder, chat template in Jinja or None, model) completes the files of an export. None: it is
        complete.
    lacks: our arrays that it does not hold, though covers names them, by what their names begin with.
    by_default: whether an export of a model that the family holds whole has its format without being asked.
    recognises: (fields) -> whether a config.json with one of model_types is of this form: others may share
        their names.
    float32: patterns of tensors that an export never rounds, besides KEPT_FLOAT32.
    data: (fields) -> settings of DataConfig with which the published model is used: its template, the form of
        its answers. {}: a chat template beside the tokenizer says it.
    memory: beginnings of names of tensors on disk, and parts of names, which begin with a dot -> what they
        are in transformers' memory, where that is something else.
    marks: whether the head of its models tells times at marks (model.marks), in place of tokens.
    meaningless: (model) -> fields of config.json that say nothing about the model: those of an original stay.
    """

    format: str
    title: str
    gives: str
    model_types: tuple[str, ...]
    covers: tuple[str, ...]
    configure: Callable[[Fields, ModelConfig], ModelConfig]
    fields: Callable[[ModelConfig], dict[str, Any]]
    tensors: Callable[[ModelConfig, Fields, Mapping[str, Shape]], Iterable[Tensor]]
    ignored: tuple[str, ...] = ()
    token_fields: Callable[[TokenIds], dict[str, Any]] | None = None
    opened: Callable[["Family", Fields, Reader], tuple["Family", Fields, Reader]] | None = None
    lora: Callable[[Fields], AdaptConfig | None] | None = None
    lora_fields: Callable[[ModelConfig, AdaptConfig, frozenset[str]], dict[str, Any]] | None = None
    adapter: str = ""
    mtp_tensors: Callable[[Fields], tuple[str, ...]] = lambda fields: ("mtp.",)
    tokenizers: Callable[[Path, Fields], Iterable[Path]] = lambda path, fields: ()
    finish: Callable[[Path, str | None, ModelConfig], None] | None = None
    lacks: tuple[str, ...] = ()
    by_default: bool = True
    recognises: Callable[[Fields], bool] = lambda fields: True
    float32: tuple[str, ...] = ()
    data: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    meaningless: Callable[[ModelConfig], Collection[str]] = lambda model: ()
    memory: Mapping[str, str] = field(default_factory=dict)
    marks: bool = False

    def in_memory(self, name: str) -> str:
        """The name that a tensor on disk has in transformers' memory."""
        beginning = next((disk for disk in self.memory if name.startswith(disk)), "")
        name = self.memory.get(beginning, "") + name.removeprefix(beginning)
        for part, memory in self.memory.items():
            if part.startswith("."):
                name = name.replace(part, memory)
        return name

    def holds(self, name: str) -> bool:
        """Whether such a checkpoint holds our array of this name."""
        return _is_below(name, self.covers) and not _is_below(name, self.lacks)


def _is_below(name: str, beginnings: tuple[str, ...]) -> bool:
    return any(name == what or (what.endswith(".") and name.startswith(what)) for what in beginnings)


class Field(NamedTuple):
    """A field of config.json that holds a setting of ours.

    theirs: its name there. default: the library's, which config.json may leave out, or give as null.
    read: (their value, or None, and all fields) -> ours. write: (the dataclass with our settings) ->
    their value. None: the values are the same.
    """

    theirs: str
    default: Any = None
    read: Callable[[Any, Fields], Any] | None = None
    write: Callable[[Any], Any] | None = None


Settings = Mapping[str, str | Field]
"""Paths of our settings -> theirs. A string: config.json must have it."""


def read_settings(fields: Fields, table: Settings, where: str = "config.json") -> dict[str, Any]:
    """Our settings, by our names. Raises UserError where config.json lacks one that has no default."""
    found: dict[str, Any] = {}
    for ours, entry in table.items():
        match entry:
            case str():
                found[ours] = required(fields, entry, where)
            case Field(theirs, default, read):
                value = fields.get(theirs, default)
                plain = default if value is None else value
                found[ours] = read(value, fields) if read else plain
    return found


def write_settings(config: Any, table: Settings) -> dict[str, Any]:
    """Their fields, of the settings of `config`."""
    fields: dict[str, Any] = {}
    for ours, entry in table.items():
        match entry:
            case str():
                fields[entry] = attrgetter(ours)(config)
            case Field(theirs, write=write):
                fields[theirs] = write(config) if write else attrgetter(ours)(config)
    return fields


def updated(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with other settings, of the types that it has."""
    for path, value in settings.items():
        old = attrgetter(path)(config)
        config = with_value(config, path, type(old)(value) if isinstance(old, bool | int | float) else value)
    return config
