"""The problem that attention's kernels must solve before they are used (kernels/admission.py): both calls of
the contract, local and remote, forward and backward, on small ragged documents, compared with the blockwise
back-end.

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
from jaxthd.ops.attention.contract import AttentionBackend, AttentionShape, Call
from jaxthd.ops.attention.ring import merge
from jaxthd.packing.intervals import KeyIntervals, key_intervals

TOKENS = 384
DOCUMENTS = (1, 150, 64, 97)
"""Lengths of the probe's documents; the rest is padding."""
RECTANGLES = (
    [(0, 120, 100, 192)],
    [(192, 282, 300, 384)],
    [(1, 151, 20, 90), (215, 312, 200, 260)],
)
"""(first query, end, first key, end) of each rectangle of each remote call: as from an earlier rank and from
a later one under the whole-buffer layout, and as under the per-document layout."""
MOST = 6
"""Most documents that the calls are told of: more than there are, so that some packed segments stay empty."""
BLOCK = 64
QUANTITIES = ("output", "log-sum-exp", "dq", "dk", "dv")


def error_bound(dtype: str) -> float:
    """Four roundings of the dtype, eight times what the blockwise back-end takes; more in float32."""
    return max(4 * float(jnp.finfo(dtype).eps), 1e-4)


def probe_intervals() -> list[KeyIntervals]:
    """Those of the probe's local call, then of its remote calls."""
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
def _programs(
    backend: AttentionBackend, scale: float, causal: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The back-end's forward and backward calls of one kind, compiled once."""

    def forward(intervals: KeyIntervals, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        return backend.forward(q, k, v, Call(intervals, causal, BLOCK, MOST), scale)

    def backward(intervals: KeyIntervals, *given: Array) -> tuple[Array, ...]:
        q, k, v, out, lse, dout = given
        return backend.backward(q, k, v, out, lse, dout, Call(intervals, causal, BLOCK, MOST), scale)

    return as_in_a_step(forward), as_in_a_step(backward)


def _run(backend: AttentionBackend, arrays: dict[str, Array], scale: float) -> dict[str, list[np.ndarray]]:
    """QUANTITIES of each call: forward; then backward, given the output and log-sum-exp of all calls
    merged."""
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


def probe_errors(backend: AttentionBackend, shape: AttentionShape) -> dict[str, float]:
    """The error of each of QUANTITIES, the largest over all calls."""
    rng, calls = np.random.default_rng(0), 1 + len(RECTANGLES)
    sizes = {
        "q": (TOKENS, shape.q_heads, shape.head_dim),
        "k": (calls, TOKENS, shape.kv_heads, shape.head_dim),
        "v": (calls, TOKENS, shape.kv_heads, shape.head_dim),
        "dout": (TOKENS, shape.q_heads, shape.head_dim),
    }
    # Queries of twice the usual size: then scores differ enough that the softmax is far from a mean.
    given = {
        name: jnp.asarray((2 if name == "q" else 1) * rng.normal(size=size), shape.dtype)
        for name, size in sizes.items()
    }
    exact = {name: x.astype(jnp.float32) for name, x in given.items()}
    scale = shape.head_dim**-0.5
    with jax.default_matmul_precision("highest"):
        want = _run(blockwise.BACKEND, exact, scale)
    found = _run(backend, given, scale)
    return {
        name: max(error(a, b) for a, b in zip(found[name], want[name], strict=True)) for name in QUANTITIES
    }


def attention_kernel(backend: AttentionBackend, shape: AttentionShape) -> Kernel:
    return Kernel(
        "attention",
        backend.name,
        shape,
        partial(backend.unfit, shape),
        partial(probe_errors, backend, shape),
        QUANTITIES,
        error_bound(shape.dtype),
        (Path(__file__), *Path(blockwise.__file__).parent.glob("*.py")),
    )


def attention_kernels(shape: AttentionShape) -> list[Kernel]:
    """One for every back-end, in the order in which "auto" tries them."""
    return [attention_kernel(backend, shape) for backend in BACKENDS.values()]
