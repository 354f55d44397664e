"""MXFP4, as GPT-OSS publishes its experts' matrices: decoded as they are read.

In place of NAME, [matrices, in, out], lie NAME_blocks, [matrices, out, in / 32, 16], whose bytes hold two
4-bit numbers each, the low half first; and NAME_scales, [matrices, out, in / 32], the exponent of each 32
numbers plus 127 (OCP Microscaling Formats, 2023). Float32 holds all products.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped, UInt8

from jaxthd.errors import UserError
from jaxthd.hf.names import Shape
from jaxthd.hf.safetensors_files import SafetensorsFolder

BLOCKS, SCALES = "_blocks", "_scales"
METHOD = "mxfp4"
"""quant_method of config.json's quantization_config."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
"""By the four bits: sign, two of exponent, one of mantissa."""
_BIAS = 127


def decoded(
    blocks: UInt8[np.ndarray, "E F B 16"], scales: UInt8[np.ndarray, "E F B"]
) -> Float[np.ndarray, "E D F"]:
    """The matrices that they stand for, float32; D = 32 * B."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = VALUES[halves].reshape(*scales.shape, 32)
    scaled = np.ldexp(numbers, scales.astype(np.int32)[..., None] - _BIAS)
    return scaled.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


class Mxfp4Folder:
    """A folder of safetensors files, some of whose matrices are MXFP4: as it would be in float32.

    Raises UserError for blocks without scales, and for shapes that are not those of MXFP4.
    """

    form = "stacks of matrices of MXFP4"

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder, self.path, found = folder, folder.path, folder.shapes
        self._coded = {x.removesuffix(BLOCKS) for x in found if x.endswith(BLOCKS)}
        hidden = {f"{name}{end}" for name in self._coded for end in (BLOCKS, SCALES)}
        self.shapes: dict[str, Shape] = {name: x for name, x in found.items() if name not in hidden}
        for name in self._coded:
            blocks, scales = found[f"{name}{BLOCKS}"], found.get(f"{name}{SCALES}")
            if len(blocks) != 4 or blocks[3] != 16 or scales != blocks[:3]:
                raise UserError(
                    f"{name}{BLOCKS} in {folder.path} is {list(blocks)} and {name}{SCALES} "
                    f"{'missing' if scales is None else list(scales)}; expected [matrices, out, in / 32, 16] "
                    "and the same without the 16: copy the checkpoint anew"
                )
            self.shapes[name] = (blocks[0], 32 * blocks[2], blocks[1])

    def dtype(self, name: str) -> str:
        return "float32" if name in self._coded else self._folder.dtype(name)

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        if name not in self._coded:
            return self._folder.read(name)
        parts: list[Any] = []
        for end in (BLOCKS, SCALES):
            stored = self._folder.dtype(f"{name}{end}")
            if stored != "uint8":
                raise UserError(
                    f"{name}{end} in {self.path} is stored as {stored}; expected uint8: copy the "
                    "checkpoint anew"
                )
            parts.append(self._folder.read(f"{name}{end}"))
        return decoded(*parts)

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        stored = {f"{name}{BLOCKS}" if name in self._coded else name: name for name in names}
        return [stored[name] for name in self._folder.in_file_order(stored)]

    def is_decoded(self, name: str) -> bool:
        """Whether the tensor is stored in MXFP4."""
        return name in self._coded
