"""A published checkpoint: its settings, and its tensors streamed into our arrays or written from them."""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import compare_models
from jaxthd.hf.adapter import ADAPTER
from jaxthd.hf.family import Family, Fields
from jaxthd.hf.names import Names, Part, Shape, Tensor
from jaxthd.hf.nemo import NemoArchive
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.nemotron_omni import NEMOTRON_OMNI
from jaxthd.hf.parakeet import PARAKEET
from jaxthd.hf.safetensors_files import SafetensorsFolder, SafetensorsWriter

FAMILIES = (NEMOTRON_H, PARAKEET, NEMOTRON_OMNI, ADAPTER)

KEPT_FLOAT32 = ("*.A_log", "*.D", "*.dt_bias", "*.e_score_correction_bias", "*.running_mean", "*.running_var")
"""Tensors that are never rounded on export."""

TOKENIZER_FILES = ("*tokenizer*", "*.jinja", "special_tokens_map.json", "generation_config.json")
_COPIED = (
    *TOKENIZER_FILES,
    "vocab.json",
    "merges.txt",
    "*processor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
"""Files of the original that go with an export."""


@runtime_checkable
class Reader(Protocol):
    """Tensors of a checkpoint, by name."""

    path: Path
    shapes: dict[str, Shape]

    def dtype(self, name: str) -> str: ...

    def read(self, name: str) -> Shaped[np.ndarray, "..."]: ...

    def in_file_order(self, names: Iterable[str]) -> list[str]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A folder of a family, or a .nemo archive.

    fields: its config.json.
    """

    family: Family
    fields: Fields
    reader: Reader

    @property
    def path(self) -> Path:
        return self.reader.path

    def left_out(self, table: Collection[str]) -> list[str]:
        """Its tensors that are not among those named, and need not be."""
        used = [p for p in self.family.ignored if any(fnmatch(name, p) for name in table)]
        ignored = [p for p in self.family.ignored if p not in used]
        return [name for name in self.reader.shapes if _matches(name, ignored)]

    def configure(self, model: ModelConfig) -> ModelConfig:
        """`model` with this checkpoint's settings in what it covers; without multi-token prediction where it
        has no tensors for it, whatever its settings say.
        """
        return self._with_own_depths(self.family.configure(self.fields, model))

    def _with_own_depths(self, model: ModelConfig) -> ModelConfig:
        if not self.covers("head") or any("mtp.layers." in name for name in self.reader.shapes):
            return model
        return replace(model, llm=replace(model.llm, mtp_pattern=""))

    def covers(self, name: str) -> bool:
        """Whether our array of this name is among what it holds."""
        return any(
            name == what or (what.endswith(".") and name.startswith(what)) for what in self.family.covers
        )

    def tensors(self, model: ModelConfig, shapes: Mapping[str, Shape]) -> list[Tensor]:
        """Its tensors as what our arrays are made of, in the order in which they lie on the disk.

        shapes: of our arrays. Raises UserError, before any is read, where the settings are not the model's,
        and naming tensors that are missing, unknown, or of another shape.
        """
        compare_models(self.path, self.configure(model), model)
        names = Names(shapes)
        self.family.write(self._with_own_depths(model), self.fields, names)
        table = {tensor.name: tensor for tensor in names.tensors}
        ignored = set(self.left_out(table))
        wrong = {
            "missing": [n for n in table if n not in self.reader.shapes and table[n].parts],
            "unknown": [n for n in self.reader.shapes if n not in table and n not in ignored],
            "of another shape": [
                f"{n} {list(self.reader.shapes[n])}, not {list(t.shape)}"
                for n, t in table.items()
                if n in self.reader.shapes and self.reader.shapes[n] != t.shape
            ],
        }
        if any(wrong.values()):
            told = "".join(f"\n  {what}: {_some(found)}" for what, found in wrong.items() if found)
            raise UserError(
                f"the tensors in {self.path} are not those of its settings:{told}\nNothing was read. "
                "Expected a whole checkpoint of one model: copy it anew, or correct its config.json"
            )
        filled = {part.name for tensor in table.values() for part in tensor.parts}
        missed = [name for name in shapes if self.covers(name) and name not in filled]
        assert all(".lora." in name for name in missed), missed
        return [table[n] for n in self.reader.in_file_order(n for n in table if table[n].parts)]

    def pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Part, Shaped[np.ndarray, "..."]]]:
        """Every part of every tensor with its elements, as our array has them; one tensor in memory."""
        for tensor in tensors:
            yield from zip(tensor.parts, tensor.split(self.reader.read(tensor.name)), strict=True)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A folder with config.json and safetensors files, or a .nemo archive. Nothing but headers is read.

    Raises FileNotFoundError; UserError for what is no checkpoint, or of a family that jaxthd does not know.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"no checkpoint at {path}; expected a folder or a .nemo file: correct the path"
        )
    if path.is_file():
        archive = NemoArchive(path)
        return Checkpoint(PARAKEET, archive.fields, archive)
    fields = read_fields(path)
    kinds = {fields.get("model_type"), *(fields.get("architectures") or ())}
    for family in FAMILIES:
        if kinds & set(family.model_types):
            return Checkpoint(family, fields, SafetensorsFolder(path))
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UserError(
        f"{path / 'config.json'} has model_type {fields.get('model_type')!r}; expected one of {known}"
    )


def read_fields(path: Path) -> dict[str, Any]:
    """config.json in the folder `path`."""
    file = path / "config.json"
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); expected the checkpoint's settings") from error
    if not isinstance(fields, dict):
        raise UserError(f"{file} is no JSON object; expected the checkpoint's settings")
    return fields


def model_config(*paths: str | Path, model: ModelConfig | None = None) -> ModelConfig:
    """The settings of a model made of these checkpoints: for config files that start from them.

    model: everything that no checkpoint says, such as the compute dtype and block sizes.
    """
    model = model or ModelConfig()
    for path in paths:
        model = open_checkpoint(path).configure(model)
    return model


def export(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    take: Callable[[Part], Shaped[np.ndarray, "..."]],
    family: Family,
    folder: Path,
    *,
    dtype: str = "float32",
    like: Path | None = None,
    settings: Fields | None = None,
    beside: Path | None = None,
    limit: int = 4 * 2**30,
) -> list[str]:
    """Writes a checkpoint into `folder`, a tensor at a time; returns the names of its tensors.

    shapes: of our arrays. take: elements of an array at a part's place. dtype: float32 or bfloat16, of all
    but KEPT_FLOAT32. like: the checkpoint that the model came from: its settings, tokenizer and tensors that
    are no part of a speech LLM (a vision tower) go along. settings: for config.json, besides the model's.
    beside: a folder whose tokenizer goes along where there is no `like`. limit: most bytes of a file. Raises
    UserError for a folder that holds a checkpoint already, and for a model that the family cannot hold.
    """
    if (folder.exists() and any(folder.glob("*.safetensors"))) or (folder / "config.json").exists():
        raise UserError(f"{folder} holds a checkpoint already; expected a new folder: choose another --out")
    fields = _overlaid(family.fields(model), settings or {})
    original = open_checkpoint(like) if like else None
    if original is not None:
        fields = _overlaid(original.fields, fields)
    fields["dtype"] = dtype
    names = Names(shapes)
    family.write(model, fields, names)
    kinds = {t.name: (t.shape, _dtype(t, dtype)) for t in names.tensors}
    others: list[str] = []
    if original is not None:
        others = original.left_out(kinds)
        kinds |= {name: (original.reader.shapes[name], original.reader.dtype(name)) for name in others}
    with SafetensorsWriter(folder, kinds, limit) as writer:
        for tensor in names.tensors:
            whole = (
                tensor.join([take(part) for part in tensor.parts]) if tensor.parts else np.zeros((), np.int64)
            )
            writer.write(tensor.name, whole)
        for name in others:
            assert original is not None
            writer.write(name, original.reader.read(name))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    for source in (x for x in (like, beside) if x is not None):
        copy_files(source, folder, _COPIED)
    return list(kinds)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Files of the folder `source` whose names match go into `folder`, if it has none of that name."""
    for file in sorted(source.iterdir()):
        if file.is_file() and _matches(file.name, patterns) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def _dtype(tensor: Tensor, dtype: str) -> str:
    if not tensor.parts:
        return "int64"
    return "float32" if _matches(tensor.name, KEPT_FLOAT32) else dtype


def _overlaid(original: Fields, ours: Mapping[str, Any]) -> dict[str, Any]:
    """The original's settings, with ours where they say something of the audio or text model."""
    merged = dict(original)
    for name, value in ours.items():
        old = {"text_config": "llm_config", "audio_config": "sound_config"}.get(name, name)
        key = name if name in original or old not in original else old
        if key in (
            "vision_config",
            "vision_hidden_size",
            "projector_hidden_size",
            "video_temporal_patch_size",
        ):
            merged.setdefault(key, value)
        elif isinstance(value, Mapping) and isinstance(original.get(key), Mapping):
            merged[key] = _overlaid(original[key], value)
        else:
            merged[key] = value
    return merged


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(sorted(names)[:8])}{more}"
