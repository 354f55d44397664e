"""Block-scaled FP8, as DeepSeek-V3 publishes its matrices: decoded as they are read.

Beside a matrix NAME of float8_e4m3 lies NAME_scale_inv in float32, a number for each block of 128 x 128
elements (blocks at the edges may be smaller). An element is the product of the two, which float32 holds
without rounding it twice.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Shaped

from jaxthd.errors import UserError
from jaxthd.hf.family import Fields
from jaxthd.hf.names import Shape
from jaxthd.hf.safetensors_files import SafetensorsFolder

SCALES = "_scale_inv"
"""What the name of a matrix's scales ends with."""
STORED = "float8_e4m3fn"


def decoded(
    x_FD: Shaped[np.ndarray, "F D"], scale_fd: Float[np.ndarray, "f d"], block: tuple[int, int]
) -> Float[np.ndarray, "F D"]:
    """x times its block's scale, in float32. block: rows and columns of a block."""
    scale_Fd = np.repeat(scale_fd.astype(np.float32), block[0], axis=0)[: len(x_FD)]
    scale_FD = np.repeat(scale_Fd, block[1], axis=1)[:, : x_FD.shape[1]]
    return x_FD.astype(np.float32) * scale_FD


class BlockScaledFolder:
    """A folder of safetensors files, some of whose matrices are block-scaled FP8: as it would be in float32.

    fields: its config.json, whose quantization_config names the blocks. Raises UserError for another kind of
    FP8, and for scales that are missing or not those of such blocks.
    """

    form = "matrices of block-scaled FP8"

    def __init__(self, folder: SafetensorsFolder, fields: Fields) -> None:
        self._folder, self.path = folder, folder.path
        about = fields["quantization_config"]
        rows, columns = about.get("weight_block_size") or (0, 0)
        if not (rows and columns) or about.get("fmt", "e4m3") != "e4m3":
            raise UserError(
                f"{folder.path / 'config.json'} has the quantization_config {dict(about)!r}; expected fmt "
                "'e4m3' and a weight_block_size, which are block-scaled FP8: convert it to bfloat16"
            )
        self._block = (int(rows), int(columns))
        found = folder.shapes
        self.shapes: dict[str, Shape] = {name: x for name, x in found.items() if not name.endswith(SCALES)}
        self._scaled = {name for name in self.shapes if f"{name}{SCALES}" in found}
        self._refuse_unpaired()
        for name in self._scaled:
            expected = tuple(-(-n // b) for n, b in zip(found[name], self._block, strict=False))
            if found[f"{name}{SCALES}"] != expected or len(found[name]) != 2:
                raise UserError(
                    f"{name}{SCALES} in {folder.path} is {list(found[f'{name}{SCALES}'])}; expected "
                    f"{list(expected)}, a scale for each block of {rows} x {columns} of {name} "
                    f"{list(found[name])}: copy the checkpoint anew"
                )

    def _refuse_unpaired(self) -> None:
        """A matrix without its scales would be read as if they were 1."""
        scales = {name.removesuffix(SCALES) for name in self._folder.shapes if name.endswith(SCALES)}
        unpaired = [f"{name}{SCALES} without {name}" for name in sorted(scales - self._scaled)] + [
            f"{name} in {self._folder.dtype(name)} without {name}{SCALES}"
            for name in self.shapes
            if name not in self._scaled and self._folder.dtype(name).startswith("float8")
        ]
        if unpaired:
            more = f" and {len(unpaired) - 4} more" if len(unpaired) > 4 else ""
            raise UserError(
                f"{self.path} has {', '.join(unpaired[:4])}{more}; expected scales beside each matrix of FP8 "
                "and beside nothing else: copy the checkpoint anew"
            )

    def dtype(self, name: str) -> str:
        return "float32" if name in self._scaled else self._folder.dtype(name)

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        if name not in self._scaled:
            return self._folder.read(name)
        stored = self._folder.dtype(name)
        if stored != STORED:
            raise UserError(
                f"{name} in {self.path} has scales and is stored as {stored}; expected {STORED}: copy the "
                "checkpoint anew"
            )
        return decoded(self._folder.read(name), self._folder.read(f"{name}{SCALES}"), self._block)

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        return self._folder.in_file_order(names)

    def is_decoded(self, name: str) -> bool:
        """Whether the tensor is stored in FP8."""
        return name in self._scaled
