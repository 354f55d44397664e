"""The devices of this process: starting them, and saying why they do not start."""

import os

import jax

from jaxthd.errors import UserError


def device_platform() -> str:
    """Returns jax's name of the back-end, such as "cpu" or "gpu", which this starts.

    Raises UserError where it cannot be started, as with JAX_PLATFORMS=cuda where there is no GPU.
    """
    try:
        return jax.default_backend()
    # jax asserts that there is a back-end: with "cuda" it only warns of a plugin that is not installed.
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS") or jax.config.read("jax_platforms") or ""
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "it has no device here"
        raise UserError(
            f"JAX_PLATFORMS is {asked!r}, and jax cannot start that ({reason}); expected a platform that "
            "this machine has: leave JAX_PLATFORMS unset, set it to cpu, or make the accelerator visible to "
            "jax (driver, CUDA_VISIBLE_DEVICES, and pip install 'jaxthd[cuda12]' for NVIDIA GPUs)"
            if asked
            else f"jax cannot start a device ({reason}); expected a CPU or an accelerator: set "
            "JAX_PLATFORMS=cpu to do without an accelerator, or correct its driver"
        ) from error
