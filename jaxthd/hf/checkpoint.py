"""A published checkpoint: its settings, and its tensors read into our arrays."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.paths import home_path
from jaxthd.files.tensor_names import ArraySlice, Shape, Tensor
from jaxthd.files.tokenizer_files import has_tokenizer
from jaxthd.files.weight_fields import compare_models
from jaxthd.hf import salm
from jaxthd.hf.adapter_files import TENSORS, with_adapter
from jaxthd.hf.block_scaled import block_scaled
from jaxthd.hf.family import Family
from jaxthd.hf.fields import Fields, check_fields, read_fields
from jaxthd.hf.mxfp4 import METHOD as MXFP4
from jaxthd.hf.mxfp4 import mxfp4
from jaxthd.hf.nemo import CONFIG, NemoArchive
from jaxthd.hf.nemo_encoder import archive_family
from jaxthd.hf.reader import Decoded, Reader, merged_lora
from jaxthd.hf.registry import FAMILIES, parts_of
from jaxthd.hf.safetensors_files import SafetensorsFolder


@dataclass(frozen=True)
class Checkpoint:
    """A folder of a family, or a .nemo archive. fields: its config.json."""

    family: Family
    fields: Fields
    reader: Reader

    @property
    def path(self) -> Path:
        """The folder or the archive."""
        return self.reader.path

    @property
    def tokenizer(self) -> Path | None:
        """The folder with its tokenizer; None: there is none."""
        folders = (self.path, *self.family.tokenizers(self.path, self.fields))
        return next((x for x in folders if has_tokenizer(x)), None)

    def covers(self, name: str) -> bool:
        """Whether the checkpoint holds our array of this name."""
        return self.family.holds(name)

    @property
    def lora(self) -> AdaptConfig | None:
        """The LoRA that it has, as settings of a run. Raises UserError for one that jaxthd does not have."""
        return self.family.lora(self.fields) if self.family.lora else None

    def for_run(self, adapt: AdaptConfig, shapes: Mapping[str, Shape]) -> "Checkpoint":
        """The checkpoint as a run with these settings takes it in: itself where the run has the same LoRA,
        else with its low-rank matrices merged into their projections.

        shapes: of our arrays, by name.
        """
        lora = self.lora
        if lora is None:
            return self
        scale = lora.lora_alpha / lora.lora_rank
        own = {name.removesuffix(".lora.a") for name in shapes if name.endswith(".lora.a")}
        theirs = {name.removesuffix(".w") for name in shapes if name.removesuffix(".w") in lora.lora_targets}
        is_same = own == theirs and not adapt.dora and lora.lora_rank == adapt.lora_rank
        if is_same and adapt.lora_alpha / adapt.lora_rank == scale:
            return self
        fields = {name: x for name, x in self.fields.items() if name != "lora"}
        return replace(self, fields=fields, reader=merged_lora(self.reader, scale))

    def configure(self, model: ModelConfig) -> ModelConfig:
        """`model` with this checkpoint's settings, for the parts that the checkpoint holds.

        A text-only model (encoder None) stays one. A checkpoint without tensors of multi-token prediction
        gives none, whatever its settings say.
        Raises UserError for settings that jaxthd has no model for, and where the checkpoint holds none of the
        model's parts.
        """
        if not any(self.covers(name) for names in parts_of(model).values() for name in names):
            raise UserError(
                f"{self.path} holds {self.family.gives} alone, and model.encoder is None: a text-only model "
                "has no use for it; expected weights of an LLM: leave this source out, or give the model an "
                "encoder"
            )
        return self._with_own_mtp(self.family.configure(self.fields, model))

    def _with_own_mtp(self, model: ModelConfig) -> ModelConfig:
        tensors = self.family.mtp_tensors(self.fields)
        if not self.covers("head") or any(x in name for name in self.reader.shapes for x in tensors):
            return model
        return replace(model, llm=model.llm.without_mtp())

    def decoded(self, names: Iterable[str]) -> str:
        """The number of these tensors that are decoded as they are read, for people; "" for none."""
        form = self.reader.form if isinstance(self.reader, Decoded) else ""
        count = sum(map(self.is_decoded, names)) if form else 0
        return f"{count} {form}" if count else ""

    def is_decoded(self, name: str) -> bool:
        """Whether the tensor is decoded as it is read."""
        return isinstance(self.reader, Decoded) and self.reader.is_decoded(name)

    def unread(self, table: Collection[str]) -> list[str]:
        """Its tensors that are not among those named, and that may be left unread (Family.ignored)."""
        mtp = (f"{prefix}*" for prefix in self.family.mtp_tensors(self.fields))
        patterns = (*self.family.ignored, *mtp)
        ignored = [p for p in patterns if not any(fnmatch(name, p) for name in table)]
        return [name for name in self.reader.shapes if any(fnmatch(name, p) for p in ignored)]

    def tensors(self, model: ModelConfig, shapes: Mapping[str, Shape]) -> list[Tensor]:
        """The tensors that our arrays are made of, in the order in which they lie on the disk.

        shapes: of our arrays, by name. Reads headers only. Raises UserError where the settings are not the
        model's, and naming tensors that are missing, unknown, or of another shape.
        """
        compare_models(self.path, self.configure(model), model)
        tensors = self.family.tensors(self._with_own_mtp(model), self.fields, shapes)
        table = {tensor.name: tensor for tensor in tensors}
        self._compare(table)
        read = {name: tensor for name, tensor in table.items() if tensor.slices and not tensor.is_copy}
        filled = {part.name for tensor in read.values() for part in tensor.slices}
        missed = [name for name in shapes if self.covers(name) and name not in filled]
        assert all(".lora." in name for name in missed), missed
        return [read[name] for name in self.reader.in_file_order(read)]

    def _compare(self, table: Mapping[str, Tensor]) -> None:
        """Raises UserError where the tensors on disk are not those of the table."""
        found, unread = self.reader.shapes, set(self.unread(table))
        wrong = {
            "missing": [n for n, t in table.items() if n not in found and t.slices and not t.is_copy],
            "unknown": [n for n in found if n not in table and n not in unread],
            "of another shape": [
                f"{n} {list(found[n])}, not {list(t.shape)}"
                for n, t in table.items()
                if n in found and found[n] != t.shape
            ],
        }
        if any(wrong.values()):
            listed = "".join(f"\n  {what}: {_first(names)}" for what, names in wrong.items() if names)
            raise UserError(
                f"the tensors in {self.path} are not those of its settings:{listed}\nNothing was read. "
                "Expected a whole checkpoint of one model: copy it anew, or correct its config.json"
            )

    def read(self, tensors: Iterable[Tensor]) -> Iterator[tuple[ArraySlice, Shaped[np.ndarray, "..."]]]:
        """(each slice of our arrays, its elements); the host holds one tensor at a time."""
        for tensor in tensors:
            yield from zip(tensor.slices, tensor.split(self.reader.read(tensor.name)), strict=True)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A folder with config.json and safetensors files, or a .nemo archive. Reads headers only.

    Raises FileNotFoundError; UserError as check_fields does, for what is no checkpoint, and for a family that
    jaxthd does not know.
    """
    path = home_path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"no checkpoint at {path}; expected a folder or a .nemo file: correct the path"
        )
    if path.is_file():
        archive, where = NemoArchive(path), f"{CONFIG} in {path}"
        check_fields(archive.fields, where)
        return Checkpoint(archive_family(where), archive.fields, archive)
    fields = read_fields(path)
    kinds = {fields.get("model_type"), *(fields.get("architectures") or ())}
    kinds = {salm.KIND} if salm.is_salm(fields) else kinds
    for family in FAMILIES:
        if kinds & set(family.model_types) and family.recognises(fields):
            reader = _reader(path, fields, TENSORS if family.adapter else "")
            own: tuple[Fields, Reader] = with_adapter(fields, reader) if family.adapter else (fields, reader)
            found: tuple[Family, Fields, Reader] = family, *own
            return Checkpoint(*(family.opened(*found) if family.opened else found))
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UserError(
        f"{path / 'config.json'} has model_type {fields.get('model_type')!r}; expected one of {known}: "
        "choose another checkpoint"
    )


def _reader(path: Path, fields: Fields, beside: str) -> Reader:
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if method is None:
        return SafetensorsFolder(path, beside)
    if method == "fp8":
        return block_scaled(SafetensorsFolder(path), fields)
    if method == MXFP4:
        return mxfp4(SafetensorsFolder(path))
    raise UserError(
        f"{path / 'config.json'} has the quant_method {method!r}; expected fp8, {MXFP4}, or no "
        "quantization_config: convert it to bfloat16"
    )


def model_config(*paths: str | Path, model: ModelConfig | None = None) -> ModelConfig:
    """The settings of a model that is made of these checkpoints: for config files.

    model: settings that no checkpoint holds. None: the defaults, and the model is text-only (encoder None)
    where none of the checkpoints has an encoder. For a text-only `model` the LLM's settings alone are read.
    Raises as open_checkpoint and Checkpoint.configure.
    """
    found = [open_checkpoint(path) for path in paths]
    if model is None:
        has_encoder = any(checkpoint.covers("encoder.") for checkpoint in found)
        model = ModelConfig() if has_encoder else ModelConfig(encoder=None)
    for checkpoint in found:
        model = checkpoint.configure(model)
    return model


def _first(names: list[str]) -> str:
    """The first eight of the names."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(sorted(names)[:8])}{more}"
