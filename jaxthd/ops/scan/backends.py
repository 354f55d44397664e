"""The scan's back-ends by name. A new one is a file that ends in a ScanBackend, and a line here."""

from jax import Array
from jaxtyping import Float

from jaxthd.ops.backend import find_backend
from jaxthd.ops.scan import pallas, ssd
from jaxthd.ops.scan.contract import ScanBackend
from jaxthd.packing.segments import Segments

BACKENDS: dict[str, ScanBackend] = {b.name: b for b in (pallas.BACKEND, ssd.BACKEND)}
"""In the order in which "auto" tries them. The last one runs everywhere."""


def scan(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    *,
    chunk: int,
    backend: str,
) -> Float[Array, "N H P"]:
    """ops/scan/ssd.py's scan by the back-end called `backend`. Raises ValueError for one that is not
    there."""
    run = find_backend(BACKENDS, "scan", backend).scan
    return run(x_NHP, dt_NH, a_H, b_NGS, c_NGS, segments, chunk=chunk)
