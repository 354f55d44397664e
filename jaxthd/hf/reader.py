"""What reads a published checkpoint's tensors."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from jaxthd.hf.names import Shape


@runtime_checkable
class Reader(Protocol):
    """The tensors of a checkpoint, by name. `dtype` is NumPy's name of a tensor's dtype."""

    path: Path
    shapes: dict[str, Shape]

    def dtype(self, name: str) -> str: ...

    def read(self, name: str) -> Shaped[np.ndarray, "..."]: ...

    def in_file_order(self, names: Iterable[str]) -> list[str]: ...
