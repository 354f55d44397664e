"""A rule, and helpers that the files of rules share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxthd.config import Config, MeshConfig
from jaxthd.config.findings import Finding
from jaxthd.errors import UserError
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.parallel.mesh import device_platform
from jaxthd.steps.blueprint import Blueprint


@dataclass(frozen=True)
class DeviceFacts:
    """Facts that a run depends on besides its configuration.

    platform: jax's name of the backend, such as "cpu" or "gpu". devices: their number. kind: their name.
    compute_capability: that of an NVIDIA GPU, such as "9.0"; None where unknown.
    x64: whether jax's 64-bit mode is on.
    vocabulary: number of the tokenizer's ids; None where unknown (that of "bytes" is known).
    """

    platform: str
    devices: int
    kind: str
    compute_capability: str | None = None
    x64: bool = False
    vocabulary: int | None = None

    @classmethod
    def of_this_machine(cls, vocabulary: int | None = None) -> "DeviceFacts":
        """Asks jax, which starts its backend: set up simulated CPU devices before. Raises UserError as
        device_platform does.
        """
        device_platform()
        first = jax.devices()[0]
        return cls(
            platform=first.platform,
            devices=jax.device_count(),
            kind=first.device_kind,
            compute_capability=getattr(first, "compute_capability", None),
            x64=bool(jax.config.read("jax_enable_x64")),
            vocabulary=vocabulary,
        )


Rule = Callable[[Config, DeviceFacts], Iterable[Finding]]
"""A rule finds faults and doubts about one subject, of a configuration whose single values are sound."""


def found_by(rules: Iterable[Rule], config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """The findings, rule by rule."""
    for rule in rules:
        yield from rule(config, device)


def refusals(read: Callable[[], Any]) -> Iterator[Finding]:
    """The finding that the UserError of `read` tells of, if it raises one."""
    try:
        read()
    except UserError as error:
        found, _, rest = str(error).partition("; expected ")
        expected, _, change = rest.rpartition(": ")
        yield Finding(found, expected, change)


def shapes_of(config: Config, tensor: int = 1) -> SpeechLM | None:
    """The model with shapes for arrays; None where it cannot be built: other rules say why."""
    try:
        return Blueprint(replace(config, mesh=MeshConfig(tensor=tensor))).model
    except ValueError:
        return None
