"""LoRA in files of its own beside a model's, as peft and transformers write it.

Such a checkpoint's fields have the settings under "lora", and its tensors have the names of a model whose
projections have low-rank matrices.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape
from jaxthd.hf.fields import Fields
from jaxthd.hf.reader import Decoded, Reader
from jaxthd.hf.safetensors_files import write_safetensors

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_IN_MEMORY, _ON_DISK = "model.language_model.", "language_model.model."
"""Beginnings of a speech LLM's names in transformers 5, and in the files."""


def with_adapter(fields: Fields, reader: Reader) -> tuple[Fields, Reader]:
    """The fields and the tensors with those of the adapter's files, if there are any.

    Raises UserError where the settings are missing or damaged.
    """
    theirs = [name for name in reader.shapes if name.startswith(_PREFIX)]
    if not theirs:
        return fields, reader
    file = reader.path / SETTINGS
    try:
        lora = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the settings of the LoRA in {TENSORS}: copy it anew, "
            "or remove both"
        ) from error
    stored = {name: (name,) for name in reader.shapes if name not in theirs}
    stored |= {_plain(name): (name,) for name in theirs}
    return {**fields, "lora": lora}, Decoded(reader, stored, {}, np.asarray)


def _plain(name: str) -> str:
    name = name.removeprefix(_PREFIX)
    return _ON_DISK + name.removeprefix(_IN_MEMORY) if name.startswith(_IN_MEMORY) else name


def is_of_adapter(name: str) -> bool:
    """Whether a tensor is one of LoRA's matrices."""
    return ".lora_A." in name or ".lora_B." in name


def write_adapter(
    folder: Path,
    lora: Mapping[str, Any],
    kinds: Mapping[str, tuple[Shape, str]],
    arrays: Iterable[Shaped[np.ndarray, "..."]],
) -> None:
    """Writes the files. lora: the settings. kinds, arrays: as for write_safetensors."""
    named = {f"{_PREFIX}{name}": kind for name, kind in kinds.items()}
    write_safetensors(folder, named, arrays, limit=2**62, single=TENSORS)
    (folder / SETTINGS).write_text(json.dumps({"peft_type": "LORA", **lora}, indent=2) + "\n")
