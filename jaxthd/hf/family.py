"""What a family of checkpoints is: its settings in config.json, and its name table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.names import Names

Fields = Mapping[str, Any]
"""A config.json."""


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint. Adding one: a file like parakeet.py, and a line in FAMILIES (checkpoint.py).

    model_types: what config.json says under model_type.
    covers: our arrays that such a checkpoint holds, by what their names begin with.
    configure: (fields, model) -> the model with the checkpoint's settings; what only sets speed stays. Raises
        UserError for a model that ours cannot be.
    fields: (model) -> config.json of an export; raises UserError where the family cannot hold the model.
    write: (model, fields, names) writes the name table; fields are those of the checkpoint, or of the export.
    ignored: patterns of tensors that are left out where the name table does not have them: no part of a
        speech LLM, or one that the model does without.
    """

    model_types: tuple[str, ...]
    covers: tuple[str, ...]
    configure: Callable[[Fields, ModelConfig], ModelConfig]
    fields: Callable[[ModelConfig], dict[str, Any]]
    write: Callable[[ModelConfig, Fields, Names], None]
    ignored: tuple[str, ...] = ()


def required(fields: Fields, name: str, where: str = "config.json") -> Any:
    """A field that has no default."""
    if fields.get(name) is None:
        raise UserError(f"{where} has no {name!r}; expected the settings of a whole checkpoint: complete it")
    return fields[name]


def must_be(fields: Fields, expected: Fields, where: str = "config.json") -> None:
    """Settings under which the checkpoint's model is ours; one that is absent has the value it must have."""
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
