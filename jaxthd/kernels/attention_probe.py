"""The problem that attention's kernels must solve before they are used (kernels/admission.py): both calls of
the contract, local and remote, forward and backward, on small ragged documents, compared with the blockwise
back-end. A back-end that takes any intervals solves windows, shared keys and decoding too.

Legend: N queries and keys, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import Kernel, as_in_a_step, error, error_bound
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
a later one under the whole-buffer layout, and as of split documents."""
MOST = 6
"""Most documents that the calls are told of: more than there are, so that some packed segments stay empty."""
BLOCK = 64
WINDOW = 40
SHARED = [(1, 151, 10, 140), (215, 312, 10, 140)]
"""Rectangles of the second and the fourth document, which continue the same prefix."""
QUERIES = (16, 32, 64)
"""Queries of each call of decoding, which a kernel may compute in smaller tiles (pallas.tiles_for)."""
QUANTITIES = ("output", "log-sum-exp", "dq", "dk", "dv")


def _rectangles(rectangles: Sequence[tuple[int, int, int, int]]) -> KeyIntervals:
    """Key intervals of a remote call, from its rectangles; other queries see nothing."""
    begin_N, end_N = (np.zeros(TOKENS, np.int32) for _ in range(2))
    for first, end, first_key, end_key in rectangles:
        begin_N[first:end], end_N[first:end] = first_key, end_key
    return _intervals(begin_N, end_N)


def _local_intervals(window: int) -> KeyIntervals:
    """Each document alone; a query sees no more than `window` keys."""
    ends = np.cumsum(DOCUMENTS)
    begin_N, end_N = (np.zeros(TOKENS, np.int32) for _ in range(2))
    for end, length in zip(ends, DOCUMENTS, strict=True):
        end_N[end - length : end] = np.arange(end - length, end) + 1
        begin_N[end - length : end] = np.maximum(end - length, end_N[end - length : end] - window)
    return _intervals(begin_N, end_N)


def _decoding(queries: int) -> KeyIntervals:
    """A query a document, which sees a prompt of its own; the last one has ended, and sees none."""
    mean = TOKENS // queries
    lengths = 1 + 7 * np.arange(queries) % (2 * mean - 1)
    ends = np.minimum(np.cumsum(lengths), TOKENS)
    ends[-1] = 0
    return _intervals(ends - np.minimum(lengths, ends), ends)


def _intervals(begin_N: np.ndarray, end_N: np.ndarray) -> KeyIntervals:
    begin, end = (jnp.asarray(x, jnp.int32) for x in (begin_N, end_N))
    found: KeyIntervals = key_intervals(begin, end, BLOCK)
    return found


def probe_calls(backend: AttentionBackend) -> list[list[Call]]:
    """The calls of each softmax: a local one with remote ones, whose parts are merged; a local one alone. For
    a back-end that takes any intervals also one in a window, with keys that documents share.
    """
    local, remote = _local_intervals(TOKENS), map(_rectangles, RECTANGLES)
    parts = [Call(local, True, BLOCK, MOST), *(Call(seen, False, BLOCK, MOST) for seen in remote)]
    found = [parts, [Call(local, True, BLOCK, MOST, alone=True)]]
    if backend.takes_any_intervals:
        seen = _local_intervals(WINDOW), _rectangles(SHARED)
        found.append([Call(x, causal, BLOCK, None) for x, causal in zip(seen, (True, False), strict=True)])
    return found


@cache
def _programs(
    backend: AttentionBackend, scale: float, causal: bool, documents: int | None, alone: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The back-end's forward and backward calls of one kind, compiled once."""
    if backend is blockwise.BACKEND:  # one program, as it takes no notice of these
        documents, alone = MOST, False

    def forward(intervals: KeyIntervals, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        """The back-end's forward call."""
        return backend.forward(q, k, v, Call(intervals, causal, BLOCK, documents, alone), scale)

    def backward(intervals: KeyIntervals, *given: Array) -> tuple[Array, ...]:
        """The back-end's backward call."""
        q, k, v, out, lse, dout = given
        call = Call(intervals, causal, BLOCK, documents, alone)
        return backend.backward(q, k, v, out.astype(lse.dtype), lse, dout, call, scale)

    return as_in_a_step(forward), as_in_a_step(backward)


def _run(
    backend: AttentionBackend, arrays: dict[str, Array], scale: float, softmaxes: Sequence[Sequence[Call]]
) -> dict[str, list[np.ndarray]]:
    """QUANTITIES of each call: forward; then backward, given the output and log-sum-exp of all calls of its
    softmax merged.
    """
    q, dout, pairs = arrays["q"], arrays["dout"], list(zip(arrays["k"], arrays["v"], strict=True))
    found: dict[str, list[Array]] = {name: [] for name in QUANTITIES}
    for calls in softmaxes:
        programs = [_programs(backend, scale, call.causal, call.documents, call.alone) for call in calls]
        given = list(zip(programs, calls, pairs, strict=False))
        parts = [forward(call.intervals, q, *pair) for (forward, _), call, pair in given]
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = merge(out, lse, *part)
        gradients = [
            backward(call.intervals, q, *pair, out, lse, dout) for (_, backward), call, pair in given
        ]
        columns = [*zip(*parts, strict=True), *zip(*gradients, strict=True)]
        for name, column in zip(QUANTITIES, columns, strict=True):
            found[name] += column
    return {name: [np.asarray(x, np.float64) for x in jax.device_get(xs)] for name, xs in found.items()}


def _decode(backend: AttentionBackend, arrays: dict[str, Array], scale: float) -> list[np.ndarray]:
    """Output and log-sum-exp of the calls of decoding."""
    forward, _ = _programs(backend, scale, False, None, False)
    keys = arrays["k"][0], arrays["v"][0]
    found = [part for n in QUERIES for part in forward(_decoding(n), arrays["q"][:n], *keys)]
    return [np.asarray(x, np.float64) for x in jax.device_get(found)]


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
    scale, softmaxes = shape.head_dim**-0.5, probe_calls(backend)
    takes_any = backend.takes_any_intervals

    def run(backend: AttentionBackend, arrays: dict[str, Array]) -> dict[str, list[np.ndarray]]:
        """QUANTITIES of all calls, those of decoding too."""
        found = _run(backend, arrays, scale, softmaxes)
        if takes_any:
            decoded = _decode(backend, arrays, scale)
            found["output"] += decoded[::2]
            found["log-sum-exp"] += decoded[1::2]
        return found

    with jax.default_matmul_precision("highest"):
        want = run(blockwise.BACKEND, exact)
    found = run(backend, given)
    return {
        name: max(error(a, b) for a, b in zip(found[name], want[name], strict=True)) for name in QUANTITIES
    }


def attention_kernel(backend: AttentionBackend, shape: AttentionShape) -> Kernel:
    """The back-end with its probe for this shape."""
    return Kernel(
        "attention",
        backend.name,
        shape,
        partial(backend.unfit, shape),
        partial(probe_errors, backend, shape),
        QUANTITIES,
        error_bound(shape.dtype),
        backend.verified,
    )


def attention_kernels(shape: AttentionShape) -> list[Kernel]:
    """One for every back-end, in the order in which "auto" tries them."""
    return [attention_kernel(backend, shape) for backend in BACKENDS.values()]
