"""Facts about this machine: its memory, its GPUs, and what else a comparison of kernels holds for."""

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxthd.ops.backend import Machine
from jaxthd.parallel.mesh import device_platform

PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
}
"""Most bfloat16 operations a second of dense matrix products, by words of the device's name, the more exact
names first. From NVIDIA's data sheets, without sparsity."""
MEMORY_BANDWIDTH = {
    "GB200": 8e12,
    "B200": 8e12,
    "H200": 4.8e12,
    "GH200": 4e12,
    "H100 PCIe": 2e12,
    "H100 NVL": 3.9e12,
    "H100": 3.35e12,
    "A100": 2e12,
    "L40S": 864e9,
    "L4": 300e9,
    "A10G": 600e9,
    "A10": 600e9,
}
"""Most bytes a second of a device's memory, as PEAK_FLOPS. Of an A100 with 80 GB, a GH200 with 96 GB."""
SMI_SECONDS = 20.0
"""Seconds that nvidia-smi may take: it wakes GPUs that sleep."""
_DRIVER = Path("/proc/driver/nvidia/version")


def this_machine() -> Machine:
    """Starts jax's back-end: simulated CPU devices must have been set up before. Raises UserError as
    device_platform does.
    """
    device_platform()
    first, cuda = jax.local_devices()[0], _cuda_versions()
    return Machine(
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


def peak_flops(kind: str) -> float | None:
    """Most bfloat16 operations a second of a device, by jax's name of it; None where that is unknown."""
    return _of_device(PEAK_FLOPS, kind)


def memory_bandwidth(kind: str) -> float | None:
    """Bytes a second of a device's memory, by jax's name of it; None where that is unknown."""
    return _of_device(MEMORY_BANDWIDTH, kind)


def _of_device(table: dict[str, float], kind: str) -> float | None:
    words = kind.replace("-", " ").split()
    return next((x for name, x in table.items() if set(name.split()) <= set(words)), None)


def installed(distribution: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def host_memory() -> int:
    """Bytes of memory of this machine, or of the control group that the process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


class GPU(NamedTuple):
    """An NVIDIA GPU, as its driver tells of it. memory, free: bytes. driver: its version."""

    name: str
    memory: int
    free: int
    driver: str


def nvidia_gpus() -> list[GPU]:
    """The GPUs that nvidia-smi lists, whether jax can use them or not; none where there is no driver."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        found = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=SMI_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in found.stdout.splitlines()]
    # A part of a GPU (MIG) has no memory of its own in this list: "[N/A]".
    whole = [row for row in rows if len(row) == 4 and row[1].isdigit() and row[2].isdigit()]
    return [GPU(name, int(most) << 20, int(free) << 20, driver) for name, most, free, driver in whole]


def _cuda_versions() -> Any:
    """jaxlib's module of CUDA's library versions; None without CUDA."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError:
        return None
    return cuda_versions


def _driver() -> str | None:
    """The version of the NVIDIA kernel module."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None
