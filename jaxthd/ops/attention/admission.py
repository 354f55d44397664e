"""Admission by measurement: a kernel is used only after a comparison with the blockwise one on this device.

Published kernels have been silently wrong: gradients 8 to 960 times too large on one architecture, NaN on
zero lengths, wrong results for batches of more than one. So before a run each process puts a small ragged
problem, of the run's own heads and dtype, through both calls of the contract, forward and backward, and
compares with the blockwise back-end in float32. What was measured is kept, by device, versions and problem.

Legend: N queries and keys, H query heads, K key/value heads, D head dim.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.cache import user_cache
from jaxthd.ops.attention import blockwise
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import Backend, Call, Problem
from jaxthd.ops.attention.machine import Machine
from jaxthd.ops.ring import merge
from jaxthd.packing.segments import KeyIntervals, key_intervals

TOKENS = 384
DOCUMENTS = (1, 150, 64, 97)
"""Lengths of the probe's documents; the rest is padding."""
RECTANGLES = (
    [(0, 120, 100, 192)],
    [(192, 282, 300, 384)],
    [(1, 151, 20, 90), (215, 312, 200, 260)],
)
"""Of each remote call, (first query, end, first key, end): as from an earlier and from a later rank under the
whole-buffer layout, and under the per-document layout."""
MOST = 6
"""Places for documents, so that some stay empty."""
BLOCK = 64
QUANTITIES = ("output", "log-sum-exp", "dq", "dk", "dv")


class Verdict(NamedTuple):
    """refusal: why the back-end is not admitted, in one line; None where it is.

    errors: of each of QUANTITIES, the largest difference over all calls / the largest value (inf where
    something is not finite, or nothing was to be there); empty where nothing was measured. bound: on all.
    fits: it could run here. is_cached: measured before.
    """

    backend: str
    refusal: str | None
    errors: dict[str, float]
    bound: float
    fits: bool
    is_cached: bool = False


def error_bound(dtype: str) -> float:
    """Four roundings of the dtype, eight times what the blockwise one takes; in float32 more."""
    return max(4 * float(jnp.finfo(dtype).eps), 1e-4)


def probe_intervals() -> list[KeyIntervals]:
    """Of the probe's local call, and of its remote ones."""
    ends = np.cumsum(DOCUMENTS)
    begin_N, end_N = (np.zeros(TOKENS, np.int32) for _ in range(2))
    for end, length in zip(ends, DOCUMENTS, strict=True):
        begin_N[end - length : end] = end - length
        end_N[end - length : end] = np.arange(end - length, end) + 1
    found = [_intervals(begin_N, end_N)]
    for rectangles in RECTANGLES:
        begin_N, end_N = (np.zeros(TOKENS, np.int32) for _ in range(2))
        for first, end, first_key, end_key in rectangles:
            begin_N[first:end], end_N[first:end] = first_key, end_key
        found.append(_intervals(begin_N, end_N))
    return found


def _intervals(begin_N: np.ndarray, end_N: np.ndarray) -> KeyIntervals:
    found: KeyIntervals = key_intervals(jnp.asarray(begin_N), jnp.asarray(end_N), BLOCK)
    return found


@cache
def _programs(backend: Backend, scale: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its forward and backward calls, compiled once for each kind of call."""

    @partial(jax.jit, static_argnums=0)
    def forward(causal: bool, intervals: KeyIntervals, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        return backend.forward(q, k, v, Call(intervals, causal, BLOCK, MOST), scale)

    @partial(jax.jit, static_argnums=0)
    def backward(causal: bool, intervals: KeyIntervals, *given: Array) -> tuple[Array, ...]:
        q, k, v, out, lse, dout = given
        return backend.backward(q, k, v, out, lse, dout, Call(intervals, causal, BLOCK, MOST), scale)

    return forward, backward


def _run(backend: Backend, arrays: dict[str, Array], scale: float) -> dict[str, list[np.ndarray]]:
    """All calls forward, merged, and backward with the output and log-sum-exp of all."""
    forward, backward = _programs(backend, scale)
    q, dout, pairs = arrays["q"], arrays["dout"], list(zip(arrays["k"], arrays["v"], strict=True))
    local_or_remote = [(number == 0, intervals) for number, intervals in enumerate(probe_intervals())]
    parts = [forward(*which, q, *pair) for which, pair in zip(local_or_remote, pairs, strict=True)]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    gradients = [
        backward(*which, q, *pair, out, lse, dout) for which, pair in zip(local_or_remote, pairs, strict=True)
    ]
    columns = [*zip(*parts, strict=True), *zip(*gradients, strict=True)]
    return {name: jax.device_get(list(column)) for name, column in zip(QUANTITIES, columns, strict=True)}


def measure(backend: Backend, problem: Problem) -> dict[str, float]:
    """The errors of a Verdict, on the first device of this process."""
    rng, calls = np.random.default_rng(0), 1 + len(RECTANGLES)
    shapes = {
        "q": (TOKENS, problem.q_heads, problem.head_dim),
        "k": (calls, TOKENS, problem.kv_heads, problem.head_dim),
        "v": (calls, TOKENS, problem.kv_heads, problem.head_dim),
        "dout": (TOKENS, problem.q_heads, problem.head_dim),
    }
    # Queries of twice the usual size: scores then differ enough for a softmax that is far from a mean.
    given = {
        name: jnp.asarray((2 if name == "q" else 1) * rng.normal(size=shape), problem.dtype)
        for name, shape in shapes.items()
    }
    exact = {name: x.astype(jnp.float32) for name, x in given.items()}
    scale = problem.head_dim**-0.5
    with jax.default_matmul_precision("highest"):
        want = _run(blockwise.BACKEND, exact, scale)
    found = _run(backend, given, scale)
    return {
        name: max(_error(a, b) for a, b in zip(found[name], want[name], strict=True)) for name in QUANTITIES
    }


def _error(found: np.ndarray, want: np.ndarray) -> float:
    """Largest difference / largest value; -inf must be where it is wanted."""
    absent = np.isneginf(want)
    if found.shape != want.shape or not np.isneginf(found[absent]).all():
        return float("inf")
    there, wanted = (np.asarray(x, np.float64)[~absent] for x in (found, want))
    if not np.isfinite(there).all():
        return float("inf")
    return float(np.abs(there - wanted).max() / np.abs(wanted).max())


def admit(backend: Backend, problem: Problem, machine: Machine, folder: Path | None = None) -> Verdict:
    """Whether the back-end may be used for such a problem here: measured, or as it was measured before.

    folder: where measurements are kept; by default that of the user's cache.
    """
    bound = error_bound(problem.dtype)
    reason = backend.unfit(problem, machine)
    if reason:
        return Verdict(backend.name, reason, {}, bound, fits=False)
    key = _key(backend, problem, machine)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (folder or user_cache() / "attention") / f"{backend.name}-{digest}.json"
    stored = _read(file, key)
    if stored is None:
        try:
            errors = measure(backend, problem)
        except Exception as error:  # a kernel's library may raise anything
            lines = str(error).splitlines()
            what = f"the probe failed with {type(error).__name__}: {lines[0] if lines else ''}"
            return Verdict(backend.name, what, {}, bound, fits=True)
        _write(file, {"measured": time.strftime("%Y-%m-%d"), "errors": errors, **key})
    else:
        errors = stored
    refusal = None if all(error <= bound for error in errors.values()) else _numbers(errors, bound)
    return Verdict(backend.name, refusal, errors, bound, fits=True, is_cached=stored is not None)


def _numbers(errors: dict[str, float], bound: float) -> str:
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return f"it is off from the blockwise one, by {shown} of the largest value; expected {bound:.1e} at most"


def _key(backend: Backend, problem: Problem, machine: Machine) -> dict[str, Any]:
    """All that a measurement holds for. sources: of this package, whose change asks for a new one."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    facts = asdict(replace(machine, devices=0))
    return {
        "backend": backend.name,
        "problem": asdict(problem),
        "machine": facts,
        "sources": sources.hexdigest()[:16],
    }


def _read(file: Path, key: dict[str, Any]) -> dict[str, float] | None:
    """The errors that were measured; None where there are none, or they cannot be read."""
    try:
        stored = json.loads(file.read_text())
        same = all(stored[name] == value for name, value in key.items())
        return {name: float(stored["errors"][name]) for name in QUANTITIES} if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all; a cache that cannot be written is none."""
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(scratch, file)
    except OSError:
        return


def verdicts(problem: Problem, machine: Machine, folder: Path | None = None) -> Iterator[Verdict]:
    """Of every back-end."""
    for backend in BACKENDS.values():
        yield admit(backend, problem, machine, folder)
