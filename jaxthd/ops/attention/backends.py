"""The attention back-ends by name, and where each was verified."""

from jaxthd.ops.attention import blockwise, cudnn, te
from jaxthd.ops.attention.contract import Backend

BACKENDS: dict[str, Backend] = {b.name: b for b in (te.BACKEND, cudnn.BACKEND, blockwise.BACKEND)}
"""In the order in which "auto" tries them; the last one runs everywhere."""

_ON_CPU = "CPU, jax 0.10.2, 0.11.2 and 0.12.0.1, 2026-11-22"
VERIFIED = {
    "te": "not yet run; its own Python code, 2.18.0 and 2.20.2, over dense kernels on a CPU, jax 0.10.2, "
    "2026-11-22",
    "cudnn": f"not yet run; jax's own code over dense kernels, and lowered for CUDA, on a {_ON_CPU}",
    "xla": f"{_ON_CPU}; not yet run on a GPU",
}
"""Where, with which versions and when each one ran."""
