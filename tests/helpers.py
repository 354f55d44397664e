"""Ragged documents, their rows, and the comparison that DESIGN 16 defines."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxthd.models.mixers import MoE
from jaxthd.packing.layout import inverse_permutation, row_permutation
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Buffer

CAPACITY = 64
CASES: dict[str, list[int]] = {
    "one token documents": [1, 1, 5, 1, 30, 1, 1, 2, 1],
    "ends on chunk edges at context 2 and 4": [16, 8, 8, 24, 8],
    "one document fills the buffer": [64],
    "mostly padding": [3, 4],
    "spans more than half the ranks": [7, 50, 3],
    "ragged": [13, 2, 21, 9, 11],
    "ragged with padding": [5, 17, 1, 29],
}


def row_arrays(
    lengths: Sequence[int], capacity: int = CAPACITY, round_to: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(segment ids, positions) [capacity] of documents back to back, padding at the end."""
    ids, positions = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    for number, span in enumerate(spans(lengths, round_to), 1):
        ids[span] = number
        positions[span] = np.arange(span.stop - span.start)
    return ids, positions


def spans(lengths: Sequence[int], round_to: int = 1) -> list[slice]:
    """Where each document lies in its row, its slots rounded up to a multiple of round_to."""
    slots = [-(-n // round_to) * round_to for n in lengths]
    starts = np.cumsum(slots, dtype=int) - slots
    return [slice(int(s), int(s + n)) for s, n in zip(starts, lengths, strict=True)]


def context_mesh(context: int) -> Mesh:
    return jax.make_mesh(
        (context,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:context]
    )


def on_context(
    mixer: Callable[..., Any],
    context: int,
    *,
    block: int,
    layout: Literal["buffer", "document"] = "buffer",
    round_to: int = 1,
    documents: int | None = None,
) -> Callable[[Any, Any, np.ndarray, np.ndarray, Any], tuple[Any, Any, Any]]:
    """A jitted (params, x [T, ...], ids [T], positions [T], cotangent) -> (y, dparams, dx) in document order.

    mixer: (params, x_N.., segments) -> y_N... The row is laid out over `context` simulated devices. x, y and
    the cotangent may be trees of such arrays; all may have a leading dim of rows, as ids [R, T] then has,
    whose rows then have documents of the same lengths where the layout is "document". documents: as Segments.
    """
    spec = PartitionSpec(None, "context")

    def rank(params: Any, x: Any, ids: Any, positions: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        segments: Segments = make_segments(
            ids, positions, block=block, axis="context", layout=layout, documents=documents
        )
        flat_x, flat_cotangent = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, cotangent))
        y, pull = jax.vjp(lambda params, x: mixer(params, x, segments), params, flat_x)
        dparams, dx = pull(flat_cotangent)
        y, dx = jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), (y, dx))
        return y, jax.lax.psum(dparams, "context"), dx

    mapped = jax.jit(
        jax.shard_map(
            rank,
            mesh=context_mesh(context),
            in_specs=(PartitionSpec(), spec, spec, spec, spec),
            out_specs=(spec, PartitionSpec(), spec),
            check_vma=False,
        )
    )

    def run(params: Any, x: Any, ids: Any, positions: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        order = row_permutation(ids.reshape(-1, ids.shape[-1])[0], context, layout, round_to)
        back = inverse_permutation(order)

        def in_layout(a: np.ndarray) -> np.ndarray:
            return a.reshape(-1, len(order), *a.shape[ids.ndim :])[:, order]

        def in_document_order(a: jax.Array) -> np.ndarray:
            return np.asarray(a)[:, back].reshape(*ids.shape, *a.shape[2:])

        y, dparams, dx = mapped(params, *jax.tree.map(in_layout, (x, ids, positions, cotangent)))
        return jax.tree.map(in_document_order, y), dparams, jax.tree.map(in_document_order, dx)

    return run


def random_state(module: nnx.Module, seed: int = 0) -> tuple[nnx.GraphDef, Any, Any]:
    """(structure, parameters, buffers) of a module made with Init: float64 NumPy arrays in nested dicts.

    module: may be abstract (nnx.eval_shape); then nothing is computed or compiled.
    No value is one that would hide an error, as a bias of 0 or a norm's weight of 1 would. Mamba's decay
    rates |A| reach from 0.05 to 1000, its time steps from 0.007 to 0.3.
    """
    rng = np.random.default_rng(seed)

    def value(path: tuple[Any, ...], variable: nnx.Variable) -> np.ndarray:
        name, shape = path[-1], variable.shape
        if name == "a_log":
            rates = np.exp(np.linspace(np.log(0.05), np.log(1000.0), math.prod(shape)))
            return np.log(rng.permutation(rates).reshape(shape))
        if name == "dt_bias":
            return rng.uniform(-5.0, -1.0, shape)
        if name == "embedding":
            return rng.normal(size=shape)
        if variable.get_metadata("decayed"):
            return rng.normal(size=shape) / math.sqrt(shape[-2])
        around = 1.0 if name in ("weight", "variance", "d") else 0.0
        return around + rng.uniform(-0.3, 0.3, shape)

    graph, *states = nnx.split(module, nnx.Param, Buffer)
    filled: list[Any] = []
    for state in states:
        flat = {path: value(path, variable) for path, variable in nnx.to_flat_state(state)}
        filled.append(nnx.traversals.unflatten_mapping(flat))
    params, buffers = filled
    return graph, params, buffers


@contextmanager
def top_k_margins() -> Iterator[list[float]]:
    """Lists, for every run of an MoE layer in programs traced inside, its real tokens' least gap between the
    biased score of the last chosen expert and that of the first not chosen."""
    original, margins = MoE._experts, []

    def experts(self: MoE, x: Any, routed: Any) -> Any:
        scores = jax.nn.sigmoid(self.router(x)) + self.correction_bias[...]
        ranked = -jnp.sort(-scores, axis=-1)
        gap = ranked[:, self.per_token - 1] - ranked[:, self.per_token]
        jax.debug.callback(lambda g: margins.append(float(g)), jnp.where(routed, gap, jnp.inf).min())
        return original(self, x, routed)

    MoE._experts = experts  # type: ignore[method-assign, assignment]
    try:
        yield margins
    finally:
        MoE._experts = original  # type: ignore[method-assign]


def relative_errors(got: Any, want: Any) -> dict[str, float]:
    """DESIGN 16, by tensor: |g - g'| / max(|g'|, 1e-3 * |all g'| / sqrt(number of tensors))."""
    got_leaves, want_leaves = ([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (got, want))
    floor = 1e-3 * root_mean_square_norm(want)
    errors = {}
    names = (jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got))
    for name, g, w in zip(names, got_leaves, want_leaves, strict=True):
        assert np.isfinite(g).all(), f"{name} is not finite"
        errors[name] = float(np.linalg.norm(g - w)) / max(float(np.linalg.norm(w)), floor, 1e-300)
    return errors


def root_mean_square_norm(tree: Any) -> float:
    norms = [np.linalg.norm(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return math.sqrt(np.mean(np.square(norms))) if norms else 0.0


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Every tensor's relative error is at most `tolerance`."""
    for name, error in relative_errors(got, want).items():
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
