"""Admission by measurement: a kernel is used only after a comparison with XLA's own code on this device.

Published kernels have been silently wrong: gradients 8 to 960 times too large on one architecture, NaN on
zero lengths, wrong results for batches of more than one. So before a run each process puts a small ragged
problem, of the run's own sizes and dtype, through a kernel, forward and backward, in a manual shard_map as a
step does, and compares with the "xla" back-end in float32. What was measured is kept, by device, versions,
problem and the sources of both.

Here is what attention (kernels/attention_probe.py) and the scan (kernels/scan_probe.py) have in common.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.files.atomic import write_atomically
from jaxthd.files.cache import user_cache
from jaxthd.kernels.machine import Machine
from jaxthd.parallel.mesh import AXES, on_ranks
from jaxthd.parallel.processes import exchange


@dataclass(frozen=True)
class Kernel:
    """One way to compute something, for one problem.

    kind: what it computes, "attention" or "scan". name: of the back-end. problem: a dataclass, whose str is
    for people. unfit: why it cannot run here, in one line; None where it can. measure: the error of each of
    quantities, on the first device of this process. bound: on all of them. sources: files that a measurement
    is of.
    """

    kind: str
    name: str
    problem: Any
    unfit: Callable[[Machine], str | None]
    measure: Callable[[], dict[str, float]]
    quantities: tuple[str, ...]
    bound: float
    sources: tuple[Path, ...]


class Verdict(NamedTuple):
    """refusal: why the back-end is not admitted, in one line; None where it is.

    errors: of each quantity, the largest difference / the largest value (inf where something is not finite,
    or nothing was to be there); empty where nothing was measured. bound: on all. fits: it could run here.
    is_cached: measured before.
    """

    backend: str
    refusal: str | None
    errors: dict[str, float]
    bound: float
    fits: bool
    is_cached: bool = False


def admit(kernel: Kernel, machine: Machine, folder: Path | None = None) -> Verdict:
    """Whether the kernel may be used for its problem here: measured, or as it was measured before.

    folder: where measurements are kept; by default that of the user's cache. All processes call it: they
    measure together, or none does, since XLA shares the choice of a program's kernels out among them.
    """
    reason = next(filter(None, exchange(kernel.unfit(machine))), None)
    if reason:
        return Verdict(kernel.name, reason, {}, kernel.bound, fits=False)
    key = _key(kernel, machine)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or user_cache() / "admission") / f"{kernel.kind}-{kernel.name}-{digest}.json"
    stored = _read(file, key, kernel.quantities)
    if not all(exchange(stored is not None)):
        stored = None
    if stored is None:
        try:
            errors = kernel.measure()
        except Exception as error:  # a kernel's library may raise anything
            lines = str(error).splitlines()
            what = f"the probe failed with {type(error).__name__}: {lines[0] if lines else ''}"
            return Verdict(kernel.name, what, {}, kernel.bound, fits=True)
        _write(file, {"measured": time.strftime("%Y-%m-%d"), "errors": errors, **key})
    else:
        errors = stored
    refusal = None if all(error <= kernel.bound for error in errors.values()) else _numbers(kernel, errors)
    return Verdict(kernel.name, refusal, errors, kernel.bound, fits=True, is_cached=stored is not None)


def as_in_a_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """run, compiled for the first device of this process, inside a shard_map whose axes are the mesh's, all
    manual, of one rank each: libraries ask what mesh they are under, and some then refuse.
    """
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape([1] * len(AXES)), AXES)
    return jax.jit(on_ranks(run, mesh, PartitionSpec(), PartitionSpec()))


def error(found: np.ndarray, want: np.ndarray) -> float:
    """Largest difference / largest value; -inf must be where it is wanted, all else finite: else inf."""
    absent = np.isneginf(want)
    if found.shape != want.shape or not np.isneginf(found[absent]).all():
        return float("inf")
    there, wanted = (np.asarray(x, np.float64)[~absent] for x in (found, want))
    if not np.isfinite(there).all():
        return float("inf")
    return float(np.abs(there - wanted).max() / np.abs(wanted).max())


def _numbers(kernel: Kernel, errors: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return f"it is off from xla, by {shown} of the largest value; expected {kernel.bound:.1e} at most"


def _key(kernel: Kernel, machine: Machine) -> dict[str, Any]:
    """All that a measurement holds for. sources: whose change, or this file's, asks for a new one."""
    sources = hashlib.sha256()
    for path in (Path(__file__), *sorted(kernel.sources)):
        sources.update(path.read_bytes())
    return {
        "kind": kernel.kind,
        "backend": kernel.name,
        "problem": asdict(kernel.problem),
        "machine": asdict(replace(machine, devices=0)),
        "sources": sources.hexdigest()[:16],
    }


def _read(file: Path, key: dict[str, Any], quantities: tuple[str, ...]) -> dict[str, float] | None:
    """The errors that were measured; None where there are none, or they cannot be read."""
    try:
        stored = json.loads(file.read_text())
        same = all(stored[name] == value for name, value in key.items())
        return {name: float(stored["errors"][name]) for name in quantities} if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; a cache that cannot be written is none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content, indent=2) + "\n")
