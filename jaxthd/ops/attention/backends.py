"""The attention back-ends by name, and where each was verified."""

from jaxthd.ops.attention import blockwise, cudnn, te
from jaxthd.ops.attention.contract import Backend

BACKENDS: dict[str, Backend] = {b.name: b for b in (te.BACKEND, cudnn.BACKEND, blockwise.BACKEND)}
"""In the order in which "auto" tries them; the last one runs everywhere."""

VERIFIED = {
    "te": "not yet run",
    "cudnn": "not yet run; lowered for CUDA on a CPU, jax 0.10.2 and 0.12.0.1, 2026-11-21",
    "xla": "CPU, jax 0.10.2 and 0.12.0.1, 2026-11-21; not yet run on a GPU",
}
"""Where, with which versions and when each one ran."""
