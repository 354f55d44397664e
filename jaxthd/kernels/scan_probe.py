"""The scan back-ends by name, and the measurement that tells whether a GPU's kernels are right.

Legend: as ops/scan/ssd.py; R rows, T tokens of the
probe, t of one of its ranks r.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxthd.kernels.admission import Kernel, as_in_a_step, error
from jaxthd.kernels.machine import Machine
from jaxthd.ops.scan import ssd as ssd_module
from jaxthd.ops.scan.pallas import ssd_pallas, why_unfit
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing.segments import Segments, make_segments

QUANTITIES = ("y", "dx", "ddt", "da", "dB", "dC")
PROBE_LENGTHS = (1, 1, 37, 200, 3, 64, 130)
"""Of the probe's documents, which come again until chunks are full: of one token, over chunk edges, from the
middle of a chunk; padding follows."""
PROBE_PADDING = 20
RANKS = 2
"""Of the probe, where states enter from other context ranks."""
CAPABILITY_LEAST = (8, 0)
"""Ampere, the first with bfloat16 matrix units."""


@dataclass(frozen=True)
class ScanProblem:
    """What a scan's kernels are compiled for: dtype of x, B, C; heads, groups, dims and chunk of a rank.

    states_enter: from other context ranks, and pass on to them.
    """

    dtype: str
    heads: int
    groups: int
    head_dim: int
    state: int
    chunk: int
    states_enter: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads} heads of dim {self.head_dim} in {self.groups} groups"
        ranks = ", states from other ranks" * self.states_enter
        return f"{self.dtype}, {heads}, state {self.state}, chunks of {self.chunk}{ranks}"

    @property
    def error_bound(self) -> float:
        """On each error of scan_probe. Operands, scores and states are rounded once each, 2^-9 in bfloat16;
        the gradient of A, a sum with signs over all tokens, adds up most of them: 0.9% was the most that
        either back-end was off by. Float32: sums in another order.
        """
        return 2e-2 if self.dtype == "bfloat16" else 1e-4


Run = Callable[..., Array]
"""As ops.ssd.ssd."""


class ScanBackend(NamedTuple):
    """unfit: why it cannot run such a problem on such a machine, in one line; None where it can."""

    name: str
    unfit: Callable[[ScanProblem, Machine], str | None]
    run: Run


def _unfit(problem: ScanProblem, machine: Machine) -> str | None:
    if machine.platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, and this is {machine.platform}"
    if machine.capability is None or machine.capability < CAPABILITY_LEAST:
        least = ".".join(map(str, CAPABILITY_LEAST))
        return f"it needs compute capability {least} or later, and this is {machine.compute_capability}"
    return " and ".join(why_unfit(problem.chunk, problem.head_dim, problem.state, problem.dtype)) or None


BACKENDS = {
    backend.name: backend
    for backend in (
        ScanBackend("pallas", _unfit, ssd_pallas),
        ScanBackend("xla", lambda problem, machine: None, ssd),
    )
}
"""In the order in which "auto" tries them; the last one runs everywhere."""

_ON_CPU = "CPU, jax 0.10.2, 0.11.2 and 0.12.0.1, 2026-11-22"
VERIFIED = {
    "pallas": f"not yet run; interpreted, and lowered for CUDA, on a {_ON_CPU}",
    "xla": f"{_ON_CPU}; not yet run on a GPU",
}
"""Where, with which versions and when each one ran."""


def scan(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    *,
    chunk: int,
    backend: str,
) -> Float[Array, "N H P"]:
    """ops.ssd.ssd by one of BACKENDS. Raises ValueError for another."""
    if backend not in BACKENDS:
        raise ValueError(
            f'scan back-end "{backend}"; expected one of {", ".join(BACKENDS)} '
            "(jaxthd.kernels.choose.with_admitted settles which auto is)"
        )
    return BACKENDS[backend].run(x_NHP, dt_NH, a_H, b_NGS, c_NGS, segments, chunk=chunk)


ssd_source = ssd_module.__file__


def scan_kernels(problem: ScanProblem) -> list[Kernel]:
    """For admission: of every back-end, in the order in which "auto" tries them."""
    sources = (Path(__file__), *Path(ssd_source).parent.glob("*.py"))
    return [
        Kernel(
            "scan",
            backend.name,
            problem,
            partial(backend.unfit, problem),
            partial(scan_probe, problem, backend.run),
            QUANTITIES,
            problem.error_bound,
            sources,
        )
        for backend in BACKENDS.values()
    ]


def scan_probe(problem: ScanProblem, run: Run = ssd_pallas) -> dict[str, float]:
    """Errors of a back-end on the default device, outputs and all gradients, against the XLA scan in float32
    without ranks: of each of QUANTITIES the largest difference / the largest value, inf where one is not
    finite.

    Ragged documents, two chunks or more; decay rates from 1e-3 to 1000.
    """
    found = outputs_and_gradients(problem, probe_inputs(problem), run)
    exact = tuple(x.astype(jnp.float32) for x in probe_inputs(problem))
    with jax.default_matmul_precision("highest"):
        want = outputs_and_gradients(replace(problem, states_enter=False), exact, ssd)
    return {name: error(a, b) for name, a, b in zip(QUANTITIES, found, want, strict=True)}


def probe_lengths(problem: ScanProblem) -> tuple[int, ...]:
    """Of documents that hold two of the problem's chunks, on each rank and in each of its stretches."""
    stretches = 2 * RANKS if problem.states_enter else 1
    return PROBE_LENGTHS * -(-2 * stretches * problem.chunk // sum(PROBE_LENGTHS))


def probe_inputs(problem: ScanProblem, seed: int = 0) -> tuple[Array, ...]:
    """x, dt, a, B, C and y's cotangent, which is 0 in padding."""
    rng, real = np.random.default_rng(seed), sum(probe_lengths(problem))
    tokens = real + PROBE_PADDING
    x, dy = (rng.normal(size=(tokens, problem.heads, problem.head_dim)) for _ in range(2))
    b, c = (rng.normal(size=(tokens, problem.groups, problem.state)) for _ in range(2))
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(0.3), size=(tokens, problem.heads)))
    a = -np.exp(rng.permutation(np.linspace(np.log(1e-3), np.log(1e3), problem.heads)))
    dy[real:] = 0
    compute = jnp.dtype(problem.dtype)
    dtypes = (compute, jnp.float32, jnp.float32, compute, compute, jnp.float32)
    return tuple(jnp.asarray(v, dtype) for v, dtype in zip((x, dt, a, b, c, dy), dtypes, strict=True))


def outputs_and_gradients(problem: ScanProblem, inputs: tuple[Array, ...], run: Run) -> list[np.ndarray]:
    """Of probe_inputs' documents and padding, in float64 and document order, y's padding 0."""
    row = row_of(probe_lengths(problem), PROBE_PADDING)
    return [np.asarray(x, np.float64) for x in probe_program(problem, run)(*row, *inputs)]


def probe_program(problem: ScanProblem, run: Run) -> Any:
    """Compiles when called with a row's segment ids and positions, and probe_inputs.

    With states_enter the context ranks are a mapped axis of one device: the kernels are those of a mesh, with
    one dim more of programs.
    """

    def of_rank(axis: str | None, ids_RT: Array, positions_RT: Array, *inputs: Array) -> tuple[Array, ...]:
        *given, dy = inputs
        segments = make_segments(ids_RT, positions_RT, block=64, axis=axis)
        y, pull = jax.vjp(partial(run, segments=segments, chunk=problem.chunk), *given)
        return (y * segments.valid[:, None, None], *pull(dy))

    def of_ranks(ids_RT: Array, positions_RT: Array, *inputs: Array) -> tuple[Array, ...]:
        order_rt = _dual_chunks(ids_RT.shape[1])
        rows = (x_RT[:, order_rt].swapaxes(0, 1) for x_RT in (ids_RT, positions_RT))
        x, dt, a, b, c, dy = inputs
        x, dt, b, c, dy = (v[order_rt] for v in (x, dt, b, c, dy))
        mapped = jax.vmap(partial(of_rank, "context"), (0, 0, 0, 0, None, 0, 0, 0), axis_name="context")
        y, dx, ddt, da, db, dc = mapped(*rows, x, dt, a, b, c, dy)
        back = np.argsort(order_rt.reshape(-1))
        y, dx, ddt, db, dc = (jax.lax.collapse(v, 0, 2)[back] for v in (y, dx, ddt, db, dc))
        return y, dx, ddt, da.sum(0), db, dc

    return as_in_a_step(of_ranks if problem.states_enter else partial(of_rank, None))


def _dual_chunks(tokens: int) -> np.ndarray:
    """[RANKS, t]: where each rank's tokens are in document order, chunks r and 2 RANKS - 1 - r."""
    chunks = np.arange(tokens).reshape(2 * RANKS, -1)
    return np.concatenate([chunks[:RANKS], chunks[: RANKS - 1 : -1]], axis=1)


def row_of(lengths: Sequence[int], padding: int) -> tuple[Array, Array]:
    """Segment ids and positions [1, tokens] of documents back to back, padding at the end."""
    ids = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(padding)])
    return jnp.asarray(ids[None], jnp.int32), jnp.asarray(positions[None], jnp.int32)
