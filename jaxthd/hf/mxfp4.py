"""MXFP4, as GPT-OSS publishes its experts' matrices: decoded as they are read.

In place of NAME, [matrices, in, out], lie NAME_blocks, [matrices, out, in / 32, 16], whose bytes hold two
4-bit numbers each, the low half first; and NAME_scales, [matrices, out, in / 32], the exponent of each 32
numbers plus 127 (OCP Microscaling Formats, 2023). Float32 holds all products.
"""

import numpy as np
from jaxtyping import Float, UInt8

from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape
from jaxthd.hf.reader import Decoded, Reader

BLOCKS, SCALES = "_blocks", "_scales"
METHOD = "mxfp4"
"""quant_method of config.json's quantization_config."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
"""Numbers by their four bits: sign, two of exponent, one of mantissa."""
_BIAS = 127


def decoded(
    blocks: UInt8[np.ndarray, "E F B 16"], scales: UInt8[np.ndarray, "E F B"]
) -> Float[np.ndarray, "E D F"]:
    """The matrices that they stand for, float32; D = 32 * B."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = VALUES[halves].reshape(*scales.shape, 32)
    scaled = np.ldexp(numbers, scales.astype(np.int32)[..., None] - _BIAS)
    return scaled.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def mxfp4(folder: Reader) -> Decoded:
    """A folder of safetensors files, some of whose matrices are MXFP4: as it would be in float32.

    Raises UserError for blocks without scales, and for shapes and dtypes that are not those of MXFP4.
    """
    found = folder.shapes
    coded = [name.removesuffix(BLOCKS) for name in found if name.endswith(BLOCKS)]
    parts = {name: (f"{name}{BLOCKS}", f"{name}{SCALES}") for name in coded}
    hidden = {each for pair in parts.values() for each in pair}
    shapes: dict[str, Shape] = {}
    for name, pair in parts.items():
        blocks, scales = found[pair[0]], found.get(pair[1])
        if len(blocks) != 4 or blocks[3] != 16 or scales != blocks[:3]:
            raise UserError(
                f"{pair[0]} in {folder.path} is {list(blocks)} and {pair[1]} "
                f"{'missing' if scales is None else list(scales)}; expected [matrices, out, in / 32, 16] "
                "and the same without the 16: copy the checkpoint anew"
            )
        for each in pair:
            if folder.dtype(each) != "uint8":
                raise UserError(
                    f"{each} in {folder.path} is stored as {folder.dtype(each)}; expected uint8: copy the "
                    "checkpoint anew"
                )
        shapes[name] = (blocks[0], 32 * blocks[2], blocks[1])
    plain: dict[str, tuple[str, ...]] = {name: (name,) for name in found if name not in hidden}
    return Decoded(folder, plain | parts, shapes, decoded, "stacks of matrices of MXFP4")
