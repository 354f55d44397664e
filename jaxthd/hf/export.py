"""Writes a model as a published checkpoint: config.json, safetensors files, a tokenizer's files."""

import json
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import ArraySlice, Shape, Tensor
from jaxthd.files.tokenizer_files import BESIDE, copy_files
from jaxthd.hf.adapter_files import is_of_adapter, write_adapter
from jaxthd.hf.checkpoint import open_checkpoint
from jaxthd.hf.family import Family
from jaxthd.hf.fields import Fields
from jaxthd.hf.rotary import has_axes_alone
from jaxthd.hf.safetensors_files import write_safetensors

KEPT_FLOAT32 = ("*.A_log", "*.D", "*.dt_bias", "*.e_score_correction_bias", "*.running_mean", "*.running_var")
"""Tensors that are never rounded."""

_ORIGINALS = (
    *("vision_config", "vision_hidden_size", "projector_hidden_size", "video_temporal_patch_size"),
    *("pretrained_llm", "pretrained_asr", "pretrained_weights", "perception", "prompt_format"),
    *("freeze_params", "prevent_freeze_params", "audio_locator_tag", "use_nemo_automodel"),
)
"""Settings that stay the original's: of a vision tower, and of how NeMo uses a model."""


def export(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    take: Callable[[ArraySlice], Shaped[np.ndarray, "..."]],
    family: Family,
    folder: Path,
    *,
    dtype: str = "float32",
    like: Path | None = None,
    settings: Fields | None = None,
    beside: Path | None = None,
    limit: int = 4 * 2**30,
) -> list[str]:
    """Writes a checkpoint into `folder`, one tensor at a time; returns the names of its tensors.

    shapes: of our arrays, by name. take: (slice) -> its elements.
    dtype: float32 or bfloat16, for all tensors but KEPT_FLOAT32 and Family.float32.
    like: the checkpoint that the model came from. Its settings, its tokenizer, and the tensors that a speech
        LLM has no use for (a vision tower) are copied; those that were quantized are written in `dtype`.
    settings: fields for config.json, added to the model's. beside: a folder whose tokenizer is copied.
    limit: most bytes of a file.
    Raises UserError for a folder that holds a checkpoint already and for a model that the family cannot hold.
    """
    if (folder.exists() and any(folder.glob("*.safetensors"))) or (folder / "config.json").exists():
        raise UserError(f"{folder} holds a checkpoint already; expected a new folder: choose another --out")
    fields = _overlaid(family.fields(model), settings or {})
    original = open_checkpoint(like) if like else None
    if original is not None:
        fields = _overlaid(original.fields, fields, family.meaningless(model))
        fields.pop("quantization_config", None)  # what is written is not quantized
        if family.lora and "lora" not in (settings or {}):
            fields.pop("lora", None)  # it has been merged
    fields["dtype"] = dtype
    tensors = list(family.tensors(model, fields, shapes))
    counters = {t.name for t in tensors if not t.slices and original and t.name in original.reader.shapes}
    tensors = [t for t in tensors if t.name not in counters]
    kept = (*KEPT_FLOAT32, *family.float32)
    kinds = {t.name: (t.shape, _dtype(t, dtype, kept)) for t in tensors}
    copied: list[str] = []
    if original is not None:
        copied = [*sorted(counters), *original.unread(kinds)]
        for name in copied:
            stored = dtype if original.is_decoded(name) else original.reader.dtype(name)
            kinds[name] = (original.reader.shapes[name], stored)
    low_rank = [t for t in tensors if family.adapter and is_of_adapter(t.name)]
    if family.adapter:
        fields[family.adapter], lora = bool(low_rank), fields.pop("lora", {})
    if low_rank:
        own = {t.name: kinds.pop(t.name) for t in low_rank}
        write_adapter(folder, lora, own, (_elements(tensor, take) for tensor in low_rank))
    ours = (_elements(tensor, take) for tensor in tensors if tensor not in low_rank)
    theirs = (original.reader.read(name) for name in copied) if original else ()
    write_safetensors(folder, kinds, chain(ours, theirs), limit)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    for source in (x for x in (like, beside) if x is not None):
        copy_files(source, folder, BESIDE)
    return [*kinds, *(tensor.name for tensor in low_rank)]


def _elements(
    tensor: Tensor, take: Callable[[ArraySlice], Shaped[np.ndarray, "..."]]
) -> Shaped[np.ndarray, "..."]:
    if not tensor.slices:
        return np.zeros((), np.int64)
    return tensor.join([take(part) for part in tensor.slices])


def _dtype(tensor: Tensor, dtype: str, kept: Collection[str]) -> str:
    """kept: patterns of tensors that are never rounded."""
    if not tensor.slices:
        return "int64"
    return "float32" if any(fnmatch(tensor.name, pattern) for pattern in kept) else dtype


def _overlaid(original: Fields, ours: Mapping[str, Any], meaningless: Collection[str] = ()) -> dict[str, Any]:
    """The original's settings with ours over them, all but _ORIGINALS, meaningless ones, and a rotary
    embedding's axes."""
    merged = dict(original)
    for name, value in ours.items():
        old = {"text_config": "llm_config", "audio_config": "sound_config"}.get(name, name)
        key = name if name in original or old not in original else old
        if key != name and key in ours:
            continue  # under its other name it is ours too
        is_unscaled = value is None or has_axes_alone(name, ours)
        if key in _ORIGINALS or key in meaningless or (is_unscaled and has_axes_alone(key, original)):
            merged.setdefault(key, value)
        elif isinstance(value, Mapping) and isinstance(original.get(key), Mapping):
            merged[key] = _overlaid(original[key], value, meaningless)
        else:
            merged[key] = value
    return merged
