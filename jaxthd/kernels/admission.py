"""Admission: a kernel is used only after its numbers agreed with XLA's own code on this device.

Published kernels have been silently wrong: gradients 8 to 960 times too large on one architecture, NaN on
zero lengths, wrong results for batches of more than one. So before a run each process gives a kernel a small
ragged problem of the run's own shape and dtype, forward and backward, in a manual shard_map as in a step, and
compares the results with those of the "xla" back-end in float32. The errors are kept on disk, under the
device, the versions, the shape and the sources of both.

This file is what attention (kernels/attention_probe.py) and the scan (kernels/scan_probe.py) have in common.
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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.files.atomic import write_atomically
from jaxthd.files.user_cache import user_cache
from jaxthd.ops.backend import Machine
from jaxthd.parallel.mesh import AXES, on_ranks
from jaxthd.parallel.processes import exchange


@dataclass(frozen=True)
class Kernel:
    """A back-end for one shape: all that admission needs to know of it.

    kind: what it computes, "attention" or "scan". name: the back-end's.
    shape: an AttentionShape or ScanShape.
    unfit: the requirement for this shape: why the back-end cannot run on a machine, in one line, or None.
    probe: finds the error of each of `quantities` on the first device of this process.
    bound: on every error. verified: where it ran, for people.
    """

    kind: str
    name: str
    shape: Any
    unfit: Callable[[Machine], str | None]
    probe: Callable[[], dict[str, float]]
    quantities: tuple[str, ...]
    bound: float
    verified: str


MEASURED = tuple(Path(__file__).parents[1] / name for name in ("kernels", "ops", "packing"))
"""Folders of the code that is compared, of its probes, and of what both take. A change of any file in them
makes kept errors worthless."""


class Verdict(NamedTuple):
    """refusal: why the back-end is not admitted, in one line; None if it is.

    errors: of each quantity, the largest difference / the largest value; inf where a value is not finite, or
        is not -inf where it should be. Empty if the kernel was not run. bound: on every error.
    is_cached: the errors were found earlier.
    """

    backend: str
    refusal: str | None
    errors: dict[str, float]
    bound: float
    is_cached: bool = False


def admit(kernel: Kernel, machine: Machine, folder: Path | None = None) -> Verdict:
    """Whether the kernel may be used for its shape here, by its errors now or as kept.

    folder: where errors are kept; by default in the user's cache. All processes call this together. Either
    all run the probe or none does: for a program of several processes XLA divides the choice of kernels among
    them.
    """
    reason = next(filter(None, exchange(kernel.unfit(machine))), None)
    if reason:
        return Verdict(kernel.name, reason, {}, kernel.bound)
    key = _key(kernel, machine)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or user_cache() / "admission") / f"{kernel.kind}-{kernel.name}-{digest}.json"
    stored = _read(file, key, kernel.quantities)
    if not all(exchange(stored is not None)):
        stored = None
    if stored is None:
        try:
            errors = kernel.probe()
        except Exception as error:  # a kernel's library may raise anything
            lines = str(error).splitlines()
            what = f"the probe failed with {type(error).__name__}: {lines[0] if lines else ''}"
            return Verdict(kernel.name, what, {}, kernel.bound)
        _write(file, {"measured": time.strftime("%Y-%m-%d"), "errors": errors, **key})
    else:
        errors = stored
    refusal = None if all(error <= kernel.bound for error in errors.values()) else _too_far(kernel, errors)
    return Verdict(kernel.name, refusal, errors, kernel.bound, is_cached=stored is not None)


def as_in_a_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, compiled for the first device of this process inside a shard_map that is manual over all the
    mesh's axes, each of one rank: some libraries ask what mesh they are under, and refuse.
    """
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape([1] * len(AXES)), AXES)
    return jax.jit(on_ranks(run, mesh, PartitionSpec(), PartitionSpec()))


def error_bound(dtype: str) -> float:
    """The bound on errors of attention: four roundings of the dtype, eight times what the blockwise back-end
    takes; more in float32."""
    return max(4 * float(jnp.finfo(dtype).eps), 1e-4)


def error(found: np.ndarray, want: np.ndarray) -> float:
    """Largest difference / largest value. inf unless -inf is where it is wanted and all else is finite."""
    absent = np.isneginf(want)
    if found.shape != want.shape or not np.isneginf(found[absent]).all():
        return float("inf")
    there, wanted = (np.asarray(x, np.float64)[~absent] for x in (found, want))
    if not np.isfinite(there).all():
        return float("inf")
    return float(np.abs(there - wanted).max() / np.abs(wanted).max())


def _too_far(kernel: Kernel, errors: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return f"it is off from xla, by {shown} of the largest value; expected {kernel.bound:.1e} at most"


def _key(kernel: Kernel, machine: Machine) -> dict[str, Any]:
    """All that the errors hold for. A change of any of it asks for a new probe."""
    sources = hashlib.sha256()
    for path in sorted(path for folder in MEASURED for path in folder.rglob("*.py")):
        sources.update(path.read_bytes())
    return {
        "kind": kernel.kind,
        "backend": kernel.name,
        "shape": asdict(kernel.shape),
        "machine": asdict(replace(machine, devices=0)),
        "sources": sources.hexdigest()[:16],
    }


def _read(file: Path, key: dict[str, Any], quantities: tuple[str, ...]) -> dict[str, float] | None:
    """The errors that are kept under this key; None if there are none, or they cannot be read."""
    try:
        stored = json.loads(file.read_text())
        same = all(stored[name] == value for name, value in key.items())
        return {name: float(stored["errors"][name]) for name in quantities} if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, content: dict[str, Any]) -> None:
    """Writes the whole file or none of it. If the cache cannot be written, nothing is kept."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content, indent=2) + "\n")
