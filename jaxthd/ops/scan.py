"""Which code computes Mamba2's scan, and the measurement that tells whether a GPU's kernels are right.

Legend: as ops/ssd.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxthd.ops.scan_pallas import ssd_pallas, why_unfit
from jaxthd.ops.ssd import ssd
from jaxthd.packing.segments import Segments, make_segments

ScanBackend = Literal["xla", "pallas", "auto"]
QUANTITIES = ("y", "dx", "ddt", "da", "dB", "dC")
PROBE_LENGTHS = (1, 1, 37, 200, 3, 64, 130)
"""Of the probe's documents: of one token, over chunk edges, from the middle of a chunk; padding follows."""
PROBE_PADDING = 19


def scan(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    *,
    chunk: int,
    backend: ScanBackend,
) -> Float[Array, "N H P"]:
    """ops.ssd.ssd by the back-end. "auto" is settled when a run starts; what is left of it here is "xla"."""
    run = ssd_pallas if backend == "pallas" else ssd
    return run(x_NHP, dt_NH, a_H, b_NGS, c_NGS, segments, chunk=chunk)


@dataclass(frozen=True)
class ScanProblem:
    """What a scan's kernels are compiled for: dtype of x, B, C; heads, groups, dims and chunk of a rank."""

    dtype: str
    heads: int
    groups: int
    head_dim: int
    state: int
    chunk: int

    @property
    def unfit(self) -> list[str]:
        """Why the Pallas kernels do not take it, in words; empty if they do."""
        return why_unfit(self.chunk, self.head_dim, self.state, self.dtype)

    @property
    def error_bound(self) -> float:
        """On each error of scan_probe. Operands, scores and states are rounded once each, 2^-9 in bfloat16;
        the gradient of A, a sum with signs over all tokens, adds up most of them: 0.9% was the most that
        either back-end was off by. Float32: sums in another order.
        """
        return 2e-2 if self.dtype == "bfloat16" else 1e-4


def scan_probe(problem: ScanProblem) -> dict[str, float]:
    """Errors of the Pallas kernels on the default device, outputs and all gradients, against the XLA scan in
    float32: of each of QUANTITIES the largest difference / the largest value, inf where one is not finite.

    Ragged documents of sum(PROBE_LENGTHS) tokens; decay rates from 1e-3 to 1000.
    """
    found = outputs_and_gradients(problem, probe_inputs(problem), ssd_pallas)
    exact = tuple(x.astype(jnp.float32) for x in probe_inputs(problem))
    with jax.default_matmul_precision("highest"):
        want = outputs_and_gradients(problem, exact, ssd)
    return {name: error(a, b) for name, a, b in zip(QUANTITIES, found, want, strict=True)}


def probe_inputs(problem: ScanProblem, seed: int = 0) -> tuple[Array, ...]:
    """x, dt, a, B, C and y's cotangent, which is 0 in padding."""
    rng, tokens = np.random.default_rng(seed), sum(PROBE_LENGTHS) + PROBE_PADDING
    x, dy = (rng.normal(size=(tokens, problem.heads, problem.head_dim)) for _ in range(2))
    b, c = (rng.normal(size=(tokens, problem.groups, problem.state)) for _ in range(2))
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.3), size=(tokens, problem.heads)))
    a = -np.exp(rng.permutation(np.linspace(np.log(1e-3), np.log(1e3), problem.heads)))
    dy[sum(PROBE_LENGTHS) :] = 0
    compute = jnp.dtype(problem.dtype)
    dtypes = (compute, jnp.float32, jnp.float32, compute, compute, jnp.float32)
    return tuple(jnp.asarray(v, dtype) for v, dtype in zip((x, dt, a, b, c, dy), dtypes, strict=True))


def outputs_and_gradients(problem: ScanProblem, inputs: tuple[Array, ...], run: Any) -> list[np.ndarray]:
    """Of documents of PROBE_LENGTHS and padding, in float64, y's padding 0. run: as ops.ssd.ssd."""

    @jax.jit
    def program(ids_RT: Array, positions_RT: Array, dy: Array, *given: Array) -> tuple[Array, ...]:
        segments = make_segments(ids_RT, positions_RT, block=64, axis=None)
        y, pull = jax.vjp(partial(run, segments=segments, chunk=problem.chunk), *given)
        return (y * segments.valid[:, None, None], *pull(dy))

    *given, dy = inputs
    return [np.asarray(x, np.float64) for x in program(*row_of(PROBE_LENGTHS, PROBE_PADDING), dy, *given)]


def row_of(lengths: Sequence[int], padding: int) -> tuple[Array, Array]:
    """Segment ids and positions [1, tokens] of documents back to back, padding at the end."""
    ids = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(padding)])
    return jnp.asarray(ids[None], jnp.int32), jnp.asarray(positions[None], jnp.int32)


def error(found: np.ndarray, want: np.ndarray) -> float:
    """Largest difference / largest value; inf where something found is not finite."""
    if found.shape != want.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - want).max() / np.abs(want).max())
