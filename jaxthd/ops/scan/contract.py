"""The contract of a back-end of the scan: one function, differentiable, called inside the manual shard_map.

Legend: N tokens, H heads, P head dim, G groups, S state dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array
from jaxtyping import Float

from jaxthd.ops.backend import Machine


class ScanInputs(NamedTuple):
    """x, B and C in the compute dtype; dt, at least 0, and the rates a, below 0, in promote(float32, x's)."""

    x: Float[Array, "N H P"]
    dt: Float[Array, "N H"]
    a: Float[Array, " H"]
    b: Float[Array, "N G S"]
    c: Float[Array, "N G S"]


@dataclass(frozen=True)
class ScanShape:
    """Shapes and settings that a scan's kernels are compiled for.

    dtype: of x, B and C. heads, groups, head_dim, state: of what one rank scans. chunk: tokens of a scan
    chunk.
    states_enter: states come from other context ranks and pass on to them.
    """

    dtype: str
    heads: int
    groups: int
    head_dim: int
    state: int
    chunk: int
    states_enter: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads} heads of dim {self.head_dim} in {self.groups} groups"
        ranks = ", states from other ranks" * self.states_enter
        return f"{self.dtype}, {heads}, state {self.state}, chunks of {self.chunk}{ranks}"


Scan = Callable[..., Array]
"""(ScanInputs, segments, *, chunk) -> y [N, H, P] in x's dtype or promote(float32, x's dtype), as
ops/scan/ssd.py defines it."""


class ScanBackend(NamedTuple):
    """unfit: the requirement (ops/backend.py). verified: where, when and with which versions it ran;
    docs/kernels.md has it. is_interpreted_on_cpu: a CPU interprets it, slowly, which says
    nothing about its compiled form.
    """

    name: str
    unfit: Callable[[ScanShape, Machine], str | None]
    scan: Scan
    verified: str = "not yet run"
    is_interpreted_on_cpu: bool = False
