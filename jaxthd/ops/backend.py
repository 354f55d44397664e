"""Shared by the back-ends of attention and of the scan: what their requirements read, and finding one by
name.

A requirement is a pure function (shape, machine) -> why the kernel cannot compute this shape there, in one
line, or None where it can. It stands in the kernel's file and reads nothing but what it is given, so that ops
ask no machine anything: jaxthd/kernels/ finds the facts and decides.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Found = TypeVar("Found")


RAN_ON_CPU = "CPU, jax 0.10.2, 0.11.2 and 0.12.0.1, 2026-11-22"
RAN_ON_GPU = "one H200, jax 0.11.2, 2026-11-26"
"""Where the back-ends of XLA's code ran, and others in part."""


@dataclass(frozen=True)
class Machine:
    """Facts about a machine's devices, and the libraries that run on them; None for what is missing.

    platform: jax's name, "cpu", "gpu", ... kind: the first device's name. compute_capability: of an NVIDIA
    GPU, such as "9.0". The rest are versions; cuda and cudnn as these count, 91002 for cuDNN 9.10.2.
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


def not_nvidia(platform: str) -> str | None:
    """A requirement of all CUDA kernels. platform: jax's name."""
    return None if platform in ("gpu", "cuda") else f"it runs on NVIDIA GPUs, and this is {platform}"


def below_capability(machine: Machine, least: tuple[int, int], name: str) -> str | None:
    """The requirement of compute capability `least`; name: of its generation of GPUs."""
    here = machine.compute_capability
    if here is not None and version_numbers(here) >= least:
        return None
    return f"it needs compute capability {least[0]}.{least[1]} ({name}) or later, and this is {here}"


def version_numbers(text: str) -> tuple[int, ...]:
    """A version as numbers that compare: "0.11.1.dev3" -> (0, 11, 1). What is no number ends it."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def resolve_backend(name: str, otherwise: str = "xla") -> str:
    """The back-end that a config names; `otherwise` for "auto" where no run has settled that
    (jaxthd.kernels.choose.with_admitted)."""
    return otherwise if name == "auto" else name


def find_backend(backends: Mapping[str, Found], kind: str, name: str) -> Found:
    """The back-end called `name`. Raises ValueError for a name that is not there. kind: for the message."""
    if name not in backends:
        raise ValueError(
            f'{kind} back-end "{name}"; expected one of {", ".join(backends)} '
            "(jaxthd.kernels.choose.with_admitted replaces auto by one of these)"
        )
    return backends[name]
