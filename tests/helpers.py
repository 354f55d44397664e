"""Ragged documents, their rows, and the comparison that DESIGN 16 defines."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxthd.packing.layout import context_permutation, inverse_permutation
from jaxthd.packing.segments import Segments, make_segments

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


def row_arrays(lengths: Sequence[int], capacity: int = CAPACITY) -> tuple[np.ndarray, np.ndarray]:
    """(segment ids, positions) [capacity] of documents back to back, padding at the end."""
    ids, positions = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        ids[start : start + length] = number
        positions[start : start + length] = np.arange(length)
        start += length
    return ids, positions


def spans(lengths: Sequence[int]) -> list[slice]:
    """Where each document lies in its row."""
    ends = np.cumsum(lengths)
    return [slice(int(e - n), int(e)) for e, n in zip(ends, lengths, strict=True)]


def context_mesh(context: int) -> Mesh:
    return jax.make_mesh(
        (context,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:context]
    )


def on_context(
    mixer: Callable[..., Any], context: int, *, block: int
) -> Callable[[Any, np.ndarray, np.ndarray, np.ndarray], tuple[Any, Any, Any]]:
    """A jitted (params, x [T, ...], ids [T], positions [T], cotangent) -> (y, dparams, dx) in document order.

    mixer: (params, x_N.., segments) -> y_N... The row is laid out over `context` simulated devices.
    """
    spec = PartitionSpec("context")

    def rank(params: Any, x: Any, ids: Any, positions: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        segments: Segments = make_segments(ids[None], positions[None], block=block, axis="context")
        y, pull = jax.vjp(lambda params, x: mixer(params, x, segments), params, x)
        dparams, dx = pull(cotangent)
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
        order = context_permutation(len(ids), context)
        back = inverse_permutation(order)
        tokens = jax.tree.map(lambda a: a[order], (x, ids, positions, cotangent))
        y, dparams, dx = mapped(params, *tokens)
        return np.asarray(y)[back], dparams, jax.tree.map(lambda a: np.asarray(a)[back], dx)

    return run


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """DESIGN 16: per tensor, |g - g'| <= tolerance * max(|g'|, 1e-3 * |all g'| / sqrt(number of tensors))."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    norms = [np.linalg.norm(np.asarray(w, np.float64)) for w in want_leaves]
    floor = 1e-3 * np.sqrt(np.sum(np.square(norms))) / np.sqrt(max(len(norms), 1))
    for path_got, w, norm in zip(jax.tree_util.tree_leaves_with_path(got), want_leaves, norms, strict=True):
        path, g = path_got
        g = np.asarray(g, np.float64)
        assert np.isfinite(g).all(), f"{jax.tree_util.keystr(path)} is not finite"
        error = np.linalg.norm(g - np.asarray(w, np.float64)) / max(norm, floor, 1e-300)
        assert error <= tolerance, (
            f"{jax.tree_util.keystr(path)}: relative error {error:.2e} > {tolerance:.0e}"
        )
