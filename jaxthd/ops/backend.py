"""Shared by the back-ends of attention and of the scan: what their requirements read, and finding one by
name.

A requirement is a pure function (shape, device) -> why the kernel cannot compute this shape there, in one
line, or None where it can. It stands in the kernel's file and reads nothing but what it is given, so that ops
ask no machine anything: jaxthd/kernels/ finds the facts and decides.
"""

import re
from collections.abc import Mapping
from typing import Protocol, TypeVar, runtime_checkable

Found = TypeVar("Found")


@runtime_checkable
class Device(Protocol):
    """Facts about a device and the libraries that run on it; None where there is none."""

    @property
    def platform(self) -> str:
        """jax's name: "cpu", "gpu", ..."""

    @property
    def compute_capability(self) -> str | None:
        """Compute capability of an NVIDIA GPU, such as "9.0"."""

    @property
    def jax(self) -> str:
        """Its version."""

    @property
    def cudnn(self) -> int | None:
        """Its version as cuDNN counts: 91002 for 9.10.2."""

    @property
    def transformer_engine(self) -> str | None:
        """Its version."""


def not_nvidia(platform: str) -> str | None:
    """A requirement of all CUDA kernels. platform: jax's name."""
    return None if platform in ("gpu", "cuda") else f"it runs on NVIDIA GPUs, and this is {platform}"


def below_capability(device: Device, least: tuple[int, int], name: str) -> str | None:
    """The requirement of compute capability `least`; name: of its generation of GPUs."""
    here = device.compute_capability
    if here is not None and version_numbers(here) >= least:
        return None
    return f"it needs compute capability {least[0]}.{least[1]} ({name}) or later, and this is {here}"


def version_numbers(text: str) -> tuple[int, ...]:
    """A version as numbers that compare: "0.11.1.dev3" -> (0, 11, 1). What is no number ends it."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def settled(name: str, otherwise: str = "xla") -> str:
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
