"""Block-scaled FP8, as DeepSeek-V3 publishes its matrices: decoded as they are read.

Beside a matrix NAME of float8_e4m3 lies NAME_scale_inv in float32, a number for each block of 128 x 128
elements (blocks at the edges may be smaller). An element is the product of the two, which float32 holds
without rounding it twice.
"""

from functools import partial

import numpy as np
from jaxtyping import Float, Shaped

from jaxthd.errors import UserError
from jaxthd.hf.fields import Fields
from jaxthd.hf.reader import Decoded, Reader

SCALES = "_scale_inv"
"""The end of the name of a matrix's scales."""
STORED = "float8_e4m3fn"


def decoded(
    x_FD: Shaped[np.ndarray, "F D"], scale_fd: Float[np.ndarray, "f d"], block: tuple[int, ...]
) -> Float[np.ndarray, "F D"]:
    """x times its block's scale, in float32. block: rows and columns of a block."""
    scale_Fd = np.repeat(scale_fd.astype(np.float32), block[0], axis=0)[: len(x_FD)]
    scale_FD = np.repeat(scale_Fd, block[1], axis=1)[:, : x_FD.shape[1]]
    return x_FD.astype(np.float32) * scale_FD


def block_scaled(folder: Reader, fields: Fields) -> Decoded:
    """A folder of safetensors files, some of whose matrices are block-scaled FP8: as it would be in float32.

    fields: its config.json, whose quantization_config names the blocks. Raises UserError for another kind of
    FP8, and for scales that are missing or not those of such blocks.
    """
    about = fields["quantization_config"]
    block = tuple(map(int, about.get("weight_block_size") or ()))
    if len(block) != 2 or not all(block) or about.get("fmt", "e4m3") != "e4m3":
        raise UserError(
            f"{folder.path / 'config.json'} has the quantization_config {dict(about)!r}; expected fmt "
            "'e4m3' and a weight_block_size, which are block-scaled FP8: convert it to bfloat16"
        )
    found = folder.shapes
    stored: dict[str, tuple[str, ...]] = {name: (name,) for name in found if not name.endswith(SCALES)}
    scaled = {name: f"{name}{SCALES}" for name in stored if f"{name}{SCALES}" in found}
    stored |= {name: (name, scales) for name, scales in scaled.items()}
    kinds = {name: folder.dtype(name) for name in stored}
    wrong = [
        f"{name} without {name.removesuffix(SCALES)}"
        for name in sorted(found)
        if name.endswith(SCALES) and name not in scaled.values()
    ]
    for name, kind in kinds.items():
        if name not in scaled and kind.startswith("float8"):
            wrong.append(f"{name} in {kind} without {name}{SCALES}")
        elif name in scaled and kind != STORED:
            wrong.append(f"{name} in {kind} with {name}{SCALES}")
    if wrong:
        # A matrix without its scales would be read as if they were 1.
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(
            f"{folder.path} has {', '.join(wrong[:4])}{more}; expected scales beside each matrix of {STORED} "
            "and beside nothing else: copy the checkpoint anew"
        )
    for name, scales in scaled.items():
        expected = tuple(-(-n // b) for n, b in zip(found[name], block, strict=False))
        if found[scales] != expected or len(found[name]) != 2:
            raise UserError(
                f"{scales} in {folder.path} is {list(found[scales])}; expected {list(expected)}, a scale for "
                f"each block of {block[0]} x {block[1]} of {name} {list(found[name])}: copy the checkpoint "
                "anew"
            )
    return Decoded(folder, stored, {}, partial(decoded, block=block), "matrices of block-scaled FP8")
