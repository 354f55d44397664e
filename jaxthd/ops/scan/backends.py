"""The scan's back-ends by name. A new one is a file that ends in a ScanBackend, and a line here."""

from jax import Array
from jaxtyping import Float

from jaxthd.ops.backend import find_backend
from jaxthd.ops.scan import pallas, ssd
from jaxthd.ops.scan.contract import ScanBackend, ScanInputs
from jaxthd.ops.scan.prefixes import ssd_and_prefix_outputs
from jaxthd.packing.segments import Segments

BACKENDS: dict[str, ScanBackend] = {b.name: b for b in (pallas.BACKEND, ssd.BACKEND)}
"""In the order in which "auto" tries them. The last one runs everywhere."""


def scan(inputs: ScanInputs, segments: Segments, *, chunk: int, backend: str) -> Float[Array, "N H P"]:
    """ops/scan/ssd.py's scan by the back-end called `backend`. A document that continues another one
    (segments.prefixes) starts from the state at that one's end, and so does a context chunk that continues a
    document (segments.splits). Raises ValueError for a back-end that is not there.
    """
    segments = segments.for_mixers
    run = find_backend(BACKENDS, "scan", backend).scan
    if segments.prefixes is None:
        return run(inputs, segments, chunk=chunk)
    alone_NHP, more_NHP = ssd_and_prefix_outputs(inputs, segments, chunk=chunk)
    return more_NHP + (alone_NHP if backend == ssd.BACKEND.name else run(inputs, segments, chunk=chunk))
