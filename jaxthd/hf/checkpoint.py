"""A published checkpoint: its settings, and its tensors streamed into our arrays or written from them."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
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

_COPIED = (
    "*tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
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

    def read(self, name: str) -> Shaped[np.ndarray, "..."]: ...

    def in_file_order(self, names: Iterable[str]) -> list[str]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A folder of a family, or a .nemo archive.

    fields: its config.json. left_out: its tensors that are no part of a speech LLM.
    """

    family: Family
    fields: Fields
    reader: Reader
    left_out: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.reader.path

    def configure(self, model: ModelConfig) -> ModelConfig:
        """`model` with this checkpoint's settings in what it covers."""
        return self.family.configure(self.fields, model)

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
        self._compare_settings(model)
        names = Names(shapes)
        self.family.write(model, self.fields, names)
        table = {tensor.name: tensor for tensor in names.tensors}
        wrong = {
            "missing": [n for n in table if n not in self.reader.shapes and table[n].parts],
            "unknown": [
                n for n in self.reader.shapes if n not in table and not _matches(n, self.family.ignored)
            ],
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
        missed = [
            n for n in shapes if self.covers(n) and n not in {p.name for t in table.values() for p in t.parts}
        ]
        assert not missed or all(".lora." in n for n in missed), missed
        self.left_out[:] = [n for n in self.reader.shapes if n not in table]
        return [table[n] for n in self.reader.in_file_order(n for n in table if table[n].parts)]

    def pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Part, Shaped[np.ndarray, "..."]]]:
        """Every part of every tensor with its elements, as our array has them; one tensor in memory."""
        for tensor in tensors:
            yield from zip(tensor.parts, tensor.split(self.reader.read(tensor.name)), strict=True)

    def _compare_settings(self, model: ModelConfig) -> None:
        here, there = (_flat(asdict(m)) for m in (model, self.configure(model)))
        differing = [
            f"\n  model.{name}: {value} there, {here[name]} here"
            for name, value in there.items()
            if value != here[name]
        ]
        if differing:
            raise UserError(
                f"{self.path} holds another model:{''.join(differing)}\nSet these fields as they are there "
                "(jaxthd.hf.checkpoint.model_config reads them), or choose other weights"
            )


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
    limit: int = 4 * 2**30,
) -> list[str]:
    """Writes a checkpoint into `folder`, a tensor at a time; returns the names of its tensors.

    shapes: of our arrays. take: elements of an array at a part's place. dtype: float32 or bfloat16, of all
    but KEPT_FLOAT32. like: the checkpoint that the model came from: its settings, tokenizer and tensors that
    are no part of a speech LLM (a vision tower) go along. limit: most bytes of a file. Raises UserError for a
    folder that holds a checkpoint already, and for a model that the family cannot hold.
    """
    if (folder.exists() and any(folder.glob("*.safetensors"))) or (folder / "config.json").exists():
        raise UserError(f"{folder} holds a checkpoint already; expected a new folder: choose another --out")
    fields = family.fields(model)
    original = open_checkpoint(like) if like else None
    if original is not None:
        fields = _overlaid(original.fields, fields)
    fields["dtype"] = dtype
    names = Names(shapes)
    family.write(model, fields, names)
    kinds = {t.name: (t.shape, _dtype(t, dtype)) for t in names.tensors}
    others: list[str] = []
    if original is not None:
        others = [
            n for n in original.reader.shapes if n not in kinds and _matches(n, original.family.ignored)
        ]
        kinds |= {n: (original.reader.shapes[n], str(original.reader.read(n).dtype)) for n in others}
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
    if like is not None:
        for file in sorted(like.iterdir()):
            if file.is_file() and _matches(file.name, _COPIED) and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
    return list(kinds)


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
