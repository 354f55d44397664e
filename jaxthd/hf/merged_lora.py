"""Tensors of a checkpoint with LoRA, as peft writes them, read as those of a model without."""

import re
from functools import partial

import numpy as np
from jaxtyping import Shaped

from jaxthd.hf.reader import Decoded, Reader

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


def merged_lora(reader: Reader, scale: float) -> Decoded:
    """The tensors of `reader` by the names of a model without LoRA, each projection as w + scale b @ a.

    Sums are computed and given in float32. All other tensors are the reader's.
    """
    stored: dict[str, tuple[str, ...]] = {}
    for name in reader.shapes:
        plain = re.sub(r"^(.*?)base_model\.model\.", r"\1", name).replace(_BASE, ".")
        if name.endswith(f"{_BASE}weight"):
            module = name.removesuffix(f"{_BASE}weight")
            stored[plain] = (name, module + _A, module + _B)
        elif not name.endswith((_A, _B)):
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
