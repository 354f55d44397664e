"""The problem that the scan's kernels must solve before they are used (kernels/admission.py): outputs and all
gradients on small ragged documents, on two context ranks where the run has several, compared with the XLA
scan.

Legend: as ops/scan/ssd.py; R rows, T tokens of the probe, t tokens of one of its ranks r.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import Kernel, as_in_a_step, error
from jaxthd.ops.scan.backends import BACKENDS
from jaxthd.ops.scan.contract import Scan, ScanBackend, ScanInputs, ScanShape
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing.layout import DualChunkSwap, inverse_permutation
from jaxthd.packing.segments import make_segments

QUANTITIES = ("y", "dx", "ddt", "da", "dB", "dC")
PROBE_LENGTHS = (1, 1, 37, 200, 3, 64, 130)
"""Lengths of the probe's documents, repeated until the chunks are full: documents of one token, across edges
of chunks, from the middle of a chunk. Padding follows."""
PROBE_PADDING = 20
RANKS = 2
"""Context ranks of the probe where states enter from other ranks."""


def error_bound(dtype: str) -> float:
    """The bound on every error. Operands, scores and states are rounded once each, 2^-9 in bfloat16; the
    gradient of A, a sum of both signs over all tokens, adds up most of them: 0.9% was the most of either
    back-end. In float32 only the order of sums differs.
    """
    return 2e-2 if dtype == "bfloat16" else 1e-4


def scan_kernel(backend: ScanBackend, shape: ScanShape) -> Kernel:
    """The back-end with its probe for this shape."""
    return Kernel(
        "scan",
        backend.name,
        shape,
        partial(backend.unfit, shape),
        partial(probe_errors, backend.scan, shape),
        QUANTITIES,
        error_bound(shape.dtype),
        backend.verified,
    )


def scan_kernels(shape: ScanShape) -> list[Kernel]:
    """One for every back-end, in the order in which "auto" tries them."""
    return [scan_kernel(backend, shape) for backend in BACKENDS.values()]


def probe_errors(scan: Scan, shape: ScanShape) -> dict[str, float]:
    """The error of each of QUANTITIES, against the XLA scan in float32 on one rank.

    At least two chunks of ragged documents; decay rates from 1e-3 to 1000.
    """
    found = outputs_and_gradients(scan, shape, probe_inputs(shape))
    exact = tuple(x.astype(jnp.float32) for x in probe_inputs(shape))
    with jax.default_matmul_precision("highest"):
        want = outputs_and_gradients(ssd, replace(shape, states_enter=False), exact)
    return {name: error(a, b) for name, a, b in zip(QUANTITIES, found, want, strict=True)}


def probe_lengths(shape: ScanShape) -> tuple[int, ...]:
    """Lengths of documents that fill at least two scan chunks of each context chunk."""
    context_chunks = 2 * RANKS if shape.states_enter else 1
    return PROBE_LENGTHS * -(-2 * context_chunks * shape.chunk // sum(PROBE_LENGTHS))


def probe_inputs(shape: ScanShape, seed: int = 0) -> tuple[Array, ...]:
    """x, dt, a, B, C and y's cotangent, which is 0 in padding."""
    rng, real = np.random.default_rng(seed), sum(probe_lengths(shape))
    tokens = real + PROBE_PADDING
    x, dy = (rng.normal(size=(tokens, shape.heads, shape.head_dim)) for _ in range(2))
    b, c = (rng.normal(size=(tokens, shape.groups, shape.state)) for _ in range(2))
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.3), size=(tokens, shape.heads)))
    a = -np.exp(rng.permutation(np.linspace(np.log(1e-3), np.log(1e3), shape.heads)))
    dy[real:] = 0
    compute = jnp.dtype(shape.dtype)
    dtypes = (compute, jnp.float32, jnp.float32, compute, compute, jnp.float32)
    return tuple(jnp.asarray(v, dtype) for v, dtype in zip((x, dt, a, b, c, dy), dtypes, strict=True))


def outputs_and_gradients(scan: Scan, shape: ScanShape, inputs: tuple[Array, ...]) -> list[np.ndarray]:
    """QUANTITIES for probe_inputs, in float64 and document order; y is 0 in padding."""
    row = row_of(probe_lengths(shape), PROBE_PADDING)
    return [np.asarray(x, np.float64) for x in probe_program(scan, shape)(*row, *inputs)]


def probe_program(scan: Scan, shape: ScanShape) -> Any:
    """(segment ids, positions [1, T], *probe_inputs) -> QUANTITIES, compiled when first called.

    With states_enter, the context ranks are a mapped axis of one device: these are the kernels of a mesh,
    with one dim more in the grid of programs.
    """

    def of_rank(axis: str | None, ids_RT: Array, positions_RT: Array, *inputs: Array) -> tuple[Array, ...]:
        """QUANTITIES of one rank. axis: of the context ranks, or None."""
        *given, dy = inputs
        segments = make_segments(ids_RT, positions_RT, block=64, axis=axis)
        y, pull = jax.vjp(partial(scan, segments=segments, chunk=shape.chunk), ScanInputs(*given))
        return (y * segments.valid[:, None, None], *pull(dy.astype(y.dtype))[0])

    def of_ranks(ids_RT: Array, positions_RT: Array, *inputs: Array) -> tuple[Array, ...]:
        """QUANTITIES of all ranks, in document order; da is summed over them."""
        order_T = DualChunkSwap(RANKS).permutation(ids_RT.shape[1])
        order_rt = order_T.reshape(RANKS, -1)
        rows = (x_RT[:, order_rt].swapaxes(0, 1) for x_RT in (ids_RT, positions_RT))
        x, dt, a, b, c, dy = inputs
        x, dt, b, c, dy = (v[order_rt] for v in (x, dt, b, c, dy))
        mapped = jax.vmap(partial(of_rank, "context"), (0, 0, 0, 0, None, 0, 0, 0), axis_name="context")
        y, dx, ddt, da, db, dc = mapped(*rows, x, dt, a, b, c, dy)
        back_T = inverse_permutation(order_T)
        y, dx, ddt, db, dc = (jax.lax.collapse(v, 0, 2)[back_T] for v in (y, dx, ddt, db, dc))
        return y, dx, ddt, da.sum(0), db, dc

    return as_in_a_step(of_ranks if shape.states_enter else partial(of_rank, None))


def row_of(lengths: Sequence[int], padding: int) -> tuple[Array, Array]:
    """Segment ids and positions [1, T] of documents back to back, with padding at the end."""
    ids = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(padding)])
    return jnp.asarray(ids[None], jnp.int32), jnp.asarray(positions[None], jnp.int32)
