"""Facts about this machine that decide which kernels run, and for which a measurement of them holds."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """platform: jax's name of the back-end, "cpu", "gpu", ... kind: of the first device, its name.

    compute_capability: of an NVIDIA GPU, such as "9.0". The rest are versions, None where there is none;
    cudnn as cuDNN counts, 91002 for 9.10.2.
    """

    platform: str
    kind: str
    devices: int
    compute_capability: str | None
    jax: str
    jaxlib: str
    python: str
    cuda: int | None
    cudnn: int | None
    driver: str | None
    transformer_engine: str | None

    @classmethod
    def of_this(cls) -> "Machine":
        """Starts jax's back-end: simulated CPU devices must have been set up before."""
        first, cuda = jax.local_devices()[0], _cuda_versions()
        return cls(
            platform=first.platform,
            kind=first.device_kind,
            devices=jax.device_count(),
            compute_capability=getattr(first, "compute_capability", None),
            jax=jax.__version__,
            jaxlib=version("jaxlib"),
            python=platform.python_version(),
            cuda=cuda and cuda.cuda_runtime_get_version(),
            cudnn=cuda and cuda.cudnn_get_version(),
            driver=_driver(),
            transformer_engine=installed("transformer-engine-jax") or installed("transformer-engine"),
        )

    @property
    def capability(self) -> tuple[int, ...] | None:
        return numbers(self.compute_capability) if self.compute_capability else None


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """Of a version, for comparing: "0.11.1.dev3" -> (0, 11, 1); what is no number ends it."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def cudnn_text(number: int) -> str:
    """91002 -> 9.10.2."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cuda_versions() -> Any:
    """jaxlib's module of CUDA's library versions; None without CUDA."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return cuda_versions


def _driver() -> str | None:
    """Of the NVIDIA kernel module."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None
