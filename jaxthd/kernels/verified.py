"""Where each back-end ran, with which versions and when. `jaxthd doctor` prints it."""

_ON_CPU = "CPU, jax 0.10.2, 0.11.2 and 0.12.0.1, 2026-11-22"
_EVERYWHERE = f"{_ON_CPU}; not yet run on a GPU"
_PALLAS = (
    "not yet run; interpreted on a CPU, jax 0.10.2 and 0.12.0.1, lowered for CUDA by 0.10.2, and compiled "
    "for an H100 without one by 0.12.0.1, 2026-11-23"
)

VERIFIED = {
    "attention": {
        "te": "not yet run; its own Python code, 2.18.0 and 2.20.2, over dense kernels on a CPU, jax 0.10.2, "
        "2026-11-22",
        "cudnn": f"not yet run; jax's own code over dense kernels, and lowered for CUDA, on a {_ON_CPU}",
        "pallas": _PALLAS,
        "xla": _EVERYWHERE,
    },
    "encoder attention": {
        "pallas": _PALLAS,
    },
    "scan": {
        "pallas": f"not yet run; interpreted, and lowered for CUDA, on a {_ON_CPU}",
        "xla": _EVERYWHERE,
    },
}


def verified_on(kind: str, backend: str) -> str:
    """kind: a key of VERIFIED. A back-end that is not listed has not run anywhere."""
    return VERIFIED[kind].get(backend, "not yet run")
