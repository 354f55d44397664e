"""What attention's kernels are measured on before they are used (jaxthd/kernels/admission.py): both calls of the
contract, local and remote, forward and backward, on a small ragged problem, against the blockwise back-end.

Legend: N queries and keys, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import Kernel, as_in_a_step, error
from jaxthd.ops.attention import blockwise
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import Backend, Call, Problem
from jaxthd.ops.attention.ring import merge
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
def _programs(backend: Backend, scale: float, causal: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its forward and backward calls of a kind, compiled once."""

    def forward(intervals: KeyIntervals, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        return backend.forward(q, k, v, Call(intervals, causal, BLOCK, MOST), scale)

    def backward(intervals: KeyIntervals, *given: Array) -> tuple[Array, ...]:
        q, k, v, out, lse, dout = given
        return backend.backward(q, k, v, out, lse, dout, Call(intervals, causal, BLOCK, MOST), scale)

    return as_in_a_step(forward), as_in_a_step(backward)


def _run(backend: Backend, arrays: dict[str, Array], scale: float) -> dict[str, list[np.ndarray]]:
    """All calls forward, merged, and backward with the output and log-sum-exp of all."""
    q, dout, pairs = arrays["q"], arrays["dout"], list(zip(arrays["k"], arrays["v"], strict=True))
    programs = [_programs(backend, scale, number == 0) for number in range(len(pairs))]
    intervals = probe_intervals()
    parts = [
        forward(seen, q, *pair) for (forward, _), seen, pair in zip(programs, intervals, pairs, strict=True)
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge(out, lse, *part)
    gradients = [
        backward(seen, q, *pair, out, lse, dout)
        for (_, backward), seen, pair in zip(programs, intervals, pairs, strict=True)
    ]
    columns = [*zip(*parts, strict=True), *zip(*gradients, strict=True)]
    return {name: jax.device_get(list(column)) for name, column in zip(QUANTITIES, columns, strict=True)}


def measure(backend: Backend, problem: Problem) -> dict[str, float]:
    """The error of each of QUANTITIES, the largest over all calls."""
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
        name: max(error(a, b) for a, b in zip(found[name], want[name], strict=True)) for name in QUANTITIES
    }


def kernel_of(backend: Backend, problem: Problem) -> Kernel:
    return Kernel(
        "attention",
        backend.name,
        problem,
        partial(backend.unfit, problem),
        partial(measure, backend, problem),
        QUANTITIES,
        error_bound(problem.dtype),
        (Path(__file__), *Path(blockwise.__file__).parent.glob("*.py")),
    )


def attention_kernels(problem: Problem) -> list[Kernel]:
    """Of every back-end, in the order in which "auto" tries them."""
    return [kernel_of(backend, problem) for backend in BACKENDS.values()]
