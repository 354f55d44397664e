"""A call as fused kernels want it: pieces, each a run of queries that sees a run of keys.

Local: a piece is a document, causal. Remote: a piece is a rectangle. Their number is fixed; those that are
not used have length 0, and none has queries without keys, for which kernels have returned NaN.

Legend: N queries, S keys, H query heads, K key/value heads, M pieces.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.kernels.machine import Machine, cudnn_text
from jaxthd.ops.attention.contract import Call, Problem
from jaxthd.packing.segments import KeyIntervals

CUDNN_LEAST = 90600
"""Packed grouped-query attention, and a log-sum-exp without padding."""
CUDNN_BAD = (
    (91000, 91002, "Transformer Engine leaves out 9.10.0 and 9.10.1"),
    (91300, 91500, "9.13 and 9.14 read beyond their memory in CUDA graphs (NVIDIA/TransformerEngine #2344)"),
)
"""(the first such version, the first that is not, what is wrong)."""


class Pieces(NamedTuple):
    """Where the queries and the keys of each piece begin, and how many they are; in the queries' order."""

    q_start: Int32[Array, " M"]
    q_length: Int32[Array, " M"]
    k_start: Int32[Array, " M"]
    k_length: Int32[Array, " M"]

    @property
    def is_used(self) -> Bool[Array, " M"]:
        return self.q_length > 0


def find_pieces(intervals: KeyIntervals, most: int) -> Pieces:
    """Runs of queries whose intervals begin with the same key, the first `most` of them."""
    n, (lo_N, hi_N) = len(intervals.lo), (intervals.lo, intervals.hi)
    first_N, last_N = _ends(intervals)
    (q_start_M,) = jnp.nonzero(first_N, size=most, fill_value=n)
    (last_M,) = jnp.nonzero(last_N, size=most, fill_value=n)
    used_M, last_M, first_M = q_start_M < n, jnp.minimum(last_M, n - 1), jnp.minimum(q_start_M, n - 1)
    found = q_start_M, last_M + 1 - first_M, lo_N[first_M], hi_N[last_M] - lo_N[first_M]
    return Pieces(*(jnp.where(used_M, x, 0).astype(jnp.int32) for x in found))


def _ends(intervals: KeyIntervals) -> tuple[Array, Array]:
    """Queries that are the first, and those that are the last of a piece."""
    # What sees nothing has the interval [0, 0).
    begin_N = jnp.where(intervals.hi > intervals.lo, intervals.lo, -1)
    change_N = jnp.pad(begin_N[1:] != begin_N[:-1], (1, 1), constant_values=True)
    return change_N[:-1] & (begin_N >= 0), change_N[1:] & (begin_N >= 0)


def all_seen(out: Array, call: Call) -> Array:
    """The output; NaN if there are more pieces than places, which packing sees to (data.max_documents)."""
    assert call.documents is not None
    first_N, _ = _ends(call.intervals)
    return jnp.where(first_N.sum() > call.documents, jnp.nan, out)


def lengths_and_offsets(pieces: Pieces) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """((queries', keys' lengths [1, M]), (their offsets [1, M + 1])), int32, -1 in what is not used: as both
    Transformer Engine and jax's cuDNN call take them.
    """

    def marked(x: Array, more: int) -> Array:
        return jnp.pad(jnp.where(pieces.is_used, x, -1), (0, more), constant_values=-1)[None]

    return (
        (marked(pieces.q_length, 0), marked(pieces.k_length, 0)),
        (marked(pieces.q_start, 1), marked(pieces.k_start, 1)),
    )


def seeing(call: Call) -> Bool[Array, " N"]:
    """Queries that see a key."""
    return call.intervals.hi > call.intervals.lo


def seen(pieces: Pieces, keys: int) -> Bool[Array, " S"]:
    """Keys that a query sees. The pieces' runs of keys do not overlap."""
    edges = jnp.zeros(keys + 1, jnp.int32).at[pieces.k_start].add(jnp.where(pieces.is_used, 1, 0))
    edges = edges.at[pieces.k_start + pieces.k_length].add(jnp.where(pieces.is_used, -1, 0))
    return jnp.cumsum(edges)[:keys] > 0


def keep(where: Array, x: Array, fill: float = 0.0) -> Array:
    """x in float32 where its token is in a piece: kernels leave anything elsewhere."""
    return jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), x.astype(jnp.float32), fill)


def unfit_for_fused(problem: Problem, platform: str) -> str | None:
    """What every fused kernel asks of the problem, whatever the versions."""
    if platform not in ("gpu", "cuda"):
        return f"it runs on NVIDIA GPUs, and this is {platform}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, and compute.dtype is {problem.dtype}"
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"it takes heads of a multiple of 8 up to 256 dims, and they have {problem.head_dim}"
    return None


def unfit_cudnn(machine: Machine) -> str | None:
    """Versions of cuDNN whose packed attention is missing or wrong."""
    if machine.cudnn is None:
        return "cuDNN is missing; pip install 'jax[cuda12]' or 'jax[cuda13]'"
    here = cudnn_text(machine.cudnn)
    if machine.cudnn < CUDNN_LEAST:
        return f"it needs cuDNN {cudnn_text(CUDNN_LEAST)} or later, and this is {here}"
    faults = (fault for first, end, fault in CUDNN_BAD if first <= machine.cudnn < end)
    return next((f"it cannot use cuDNN {here}: {fault}" for fault in faults), None)
