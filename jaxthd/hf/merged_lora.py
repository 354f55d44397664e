"""Tensors of a checkpoint with LoRA, as peft writes them, read as those of a model without."""

import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import Shaped

from jaxthd.hf.names import Shape
from jaxthd.hf.reader import Reader

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


class MergedLora:
    """The tensors of `reader`, each projection as w + scale b @ a, by the names of a model without LoRA.

    Sums are computed and given in float32. All other tensors are the reader's.
    """

    def __init__(self, reader: Reader, scale: float) -> None:
        self._reader, self._scale = reader, scale
        self._theirs = {_plain(name): name for name in reader.shapes if not name.endswith((_A, _B))}
        self.path = reader.path
        self.shapes: dict[str, Shape] = {name: reader.shapes[x] for name, x in self._theirs.items()}

    def dtype(self, name: str) -> str:
        theirs = self._theirs[name]
        return "float32" if self._matrices(theirs) else self._reader.dtype(theirs)

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        theirs = self._theirs[name]
        matrices = self._matrices(theirs)
        found = self._reader.read(theirs)
        if not matrices:
            return found
        a, b = (self._reader.read(x).astype(np.float32) for x in matrices)
        return np.asarray(found.astype(np.float32) + np.float32(self._scale) * (b @ a))

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        ours = {self._theirs[name]: name for name in names}
        return [ours[name] for name in self._reader.in_file_order(ours)]

    def _matrices(self, theirs: str) -> tuple[str, str] | None:
        if _BASE not in theirs or not theirs.endswith(".weight"):
            return None
        module = theirs.removesuffix(f"{_BASE}weight")
        return module + _A, module + _B


def _plain(name: str) -> str:
    return re.sub(r"^(.*?)base_model\.model\.", r"\1", name).replace(_BASE, ".")
