"""Readers of published checkpoints' tensors."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from jaxthd.files.tensor_names import Shape


@runtime_checkable
class Reader(Protocol):
    """The tensors of a checkpoint, by name."""

    path: Path
    shapes: dict[str, Shape]

    def dtype(self, name: str) -> str:
        """NumPy's name of the tensor's dtype."""
        ...

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor, from the disk."""
        ...

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names in the order in which their tensors are best read."""
        ...


class Decoded:
    """The tensors of `reader`, some of them made of several stored ones as they are read, in float32.

    stored: each tensor's name -> what it is made of; of one alone, it is that one. shapes: of those that are
    made of several. decode: (their elements) -> the tensor. form: what these are, for people; "": nothing
    is said of them.
    """

    def __init__(
        self,
        reader: Reader,
        stored: Mapping[str, tuple[str, ...]],
        shapes: Mapping[str, Shape],
        decode: Callable[..., Shaped[np.ndarray, "..."]],
        form: str = "",
    ) -> None:
        self.path, self.form = reader.path, form
        self._reader, self._stored, self._decode = reader, stored, decode
        self.shapes: dict[str, Shape] = {
            name: shapes.get(name) or reader.shapes[of[0]] for name, of in stored.items()
        }

    def is_decoded(self, name: str) -> bool:
        """Whether the tensor is made of several."""
        return len(self._stored[name]) > 1

    def dtype(self, name: str) -> str:
        """NumPy's name of the tensor's dtype."""
        return "float32" if self.is_decoded(name) else self._reader.dtype(self._stored[name][0])

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor, from the disk."""
        found = [self._reader.read(each) for each in self._stored[name]]
        return self._decode(*found) if self.is_decoded(name) else found[0]

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """The names in the order in which their tensors are best read."""
        first = {self._stored[name][0]: name for name in names}
        return [first[each] for each in self._reader.in_file_order(first)]


_LOW_RANK = re.compile(r"(.+)\.lora_[AB](\.default)?\.weight$")


def merged_lora(reader: Reader, scale: float, only: tuple[str, ...] | None = None) -> Decoded:
    """The tensors of a checkpoint with LoRA, as peft and NeMo Automodel write them, by the names of a model
    without: each projection is w + scale b @ a.

    only: the ends of the names of projections that are merged; the others keep their matrices, and all
    tensors their names. None: all are merged.
    Sums are computed and given in float32. All other tensors are the reader's.
    """
    found = (match for name in reader.shapes if (match := _LOW_RANK.match(name)))
    adapters = {match[1]: match[2] or "" for match in found if only is None or match[1].endswith(only)}
    stored: dict[str, tuple[str, ...]] = {}
    for name in reader.shapes:
        of_module = _LOW_RANK.match(name)
        module = name.removesuffix(".weight").removesuffix(".base_layer")
        plain = f"{module}.weight" if module in adapters else name
        if only is None:
            plain = re.sub(r"^(.*?)base_model\.model\.", r"\1", plain)
        if module in adapters and name.endswith(".weight"):
            low_rank = (f"{module}.lora_{x}{adapters[module]}.weight" for x in "AB")
            stored[plain] = (name, *low_rank)
        elif of_module is None or of_module[1] not in adapters:
            stored[plain] = (name,)
    return Decoded(reader, stored, {}, partial(_merged, np.float32(scale)))


def _merged(
    scale: np.float32,
    w_FD: Shaped[np.ndarray, "F D"],
    a_RD: Shaped[np.ndarray, "R D"],
    b_FR: Shaped[np.ndarray, "F R"],
) -> Shaped[np.ndarray, "F D"]:
    w, a, b = (x.astype(np.float32) for x in (w_FD, a_RD, b_FR))
    return np.asarray(w + scale * (b @ a))
