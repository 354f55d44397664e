"""A call in THD, the packed format of the fused kernels: lengths and offsets of packed segments.

A packed segment is a run of queries together with the run of keys that it sees: a document, with the causal
mask, in a local call; a rectangle in a remote one. Their number M is fixed. Those that are not used have
length 0, and none has queries without keys, for which kernels have returned NaN.

Also here: what every kernel that takes this format requires.

Legend: N queries, S keys, H query heads, K key/value heads, M packed segments.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.ops.attention.contract import AttentionShape, Call
from jaxthd.ops.backend import Machine, not_nvidia
from jaxthd.packing.intervals import KeyIntervals

CUDNN_LEAST = 90600
"""The first with packed grouped-query attention and a log-sum-exp without padding."""
CUDNN_BAD = (
    (91000, 91002, "Transformer Engine leaves out 9.10.0 and 9.10.1"),
    (91300, 91500, "9.13 and 9.14 read beyond their memory in CUDA graphs (NVIDIA/TransformerEngine #2344)"),
)
"""(the first bad version, the next good one, what is wrong)."""


class PackedSegments(NamedTuple):
    """Where the queries and the keys of each packed segment begin, and how many they are; in order of
    queries."""

    q_start: Int32[Array, " M"]
    q_length: Int32[Array, " M"]
    k_start: Int32[Array, " M"]
    k_length: Int32[Array, " M"]

    @property
    def is_used(self) -> Bool[Array, " M"]:
        """Whether each packed segment holds queries."""
        return self.q_length > 0


def packed_segments(intervals: KeyIntervals, most: int) -> PackedSegments:
    """The first `most` runs of queries whose intervals begin with the same key."""
    n, (lo_N, hi_N) = len(intervals.lo), (intervals.lo, intervals.hi)
    first_N, last_N = _run_ends(intervals)
    (q_start_M,) = jnp.nonzero(first_N, size=most, fill_value=n)
    (last_M,) = jnp.nonzero(last_N, size=most, fill_value=n)
    used_M, last_M, first_M = q_start_M < n, jnp.minimum(last_M, n - 1), jnp.minimum(q_start_M, n - 1)
    found = q_start_M, last_M + 1 - first_M, lo_N[first_M], hi_N[last_M] - lo_N[first_M]
    return PackedSegments(*(jnp.where(used_M, x, 0).astype(jnp.int32) for x in found))


def _run_ends(intervals: KeyIntervals) -> tuple[Array, Array]:
    """(is the first query of a packed segment, is the last one), bool [N] each."""
    # A query that sees nothing has the interval [0, 0).
    begin_N = jnp.where(intervals.hi > intervals.lo, intervals.lo, -1)
    change_N = jnp.pad(begin_N[1:] != begin_N[:-1], (1, 1), constant_values=True)
    return change_N[:-1] & (begin_N >= 0), change_N[1:] & (begin_N >= 0)


def nan_if_too_many(out: Array, call: Call) -> Array:
    """The output; NaN if the call holds more packed segments than call.documents says.

    Packing sees to it that there are no more (data.max_documents).
    """
    assert call.documents is not None
    first_N, _ = _run_ends(call.intervals)
    return jnp.where(first_N.sum() > call.documents, jnp.nan, out)


def lengths_and_offsets(packed: PackedSegments) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """((lengths of queries, of keys [1, M]), (offsets of queries, of keys [1, M + 1])), int32, -1 where
    unused.

    Both Transformer Engine and jax's cuDNN call take them in this form.
    """

    def marked(x: Array, more: int) -> Array:
        """x [M] as [1, M + more], -1 where unused."""
        return jnp.pad(jnp.where(packed.is_used, x, -1), (0, more), constant_values=-1)[None]

    return (
        (marked(packed.q_length, 0), marked(packed.k_length, 0)),
        (marked(packed.q_start, 1), marked(packed.k_start, 1)),
    )


def sees_a_key(call: Call) -> Bool[Array, " N"]:
    """Whether each query sees a key."""
    return call.intervals.hi > call.intervals.lo


def is_seen(packed: PackedSegments, keys: int) -> Bool[Array, " S"]:
    """Whether a query sees the key. The runs of keys do not overlap."""
    edges = jnp.zeros(keys + 1, jnp.int32).at[packed.k_start].add(jnp.where(packed.is_used, 1, 0))
    edges = edges.at[packed.k_start + packed.k_length].add(jnp.where(packed.is_used, -1, 0))
    return jnp.cumsum(edges)[:keys] > 0


def keep(where: Array, x: Array, fill: float = 0.0) -> Array:
    """x in float32 at the tokens where `where` is True, `fill` at others: there kernels write anything."""
    return jnp.where(where.reshape(-1, *[1] * (x.ndim - 1)), x.astype(jnp.float32), fill)


def unfit_shape(shape: AttentionShape, platform: str) -> str | None:
    """Requirements of every fused kernel, whatever the versions. platform: jax's name."""
    reason = not_nvidia(platform)
    if reason:
        return reason
    if shape.dtype not in ("bfloat16", "float16"):
        return f"it computes in bfloat16 or float16, and compute.dtype is {shape.dtype}"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"it takes heads of a multiple of 8 up to 256 dims, and they have {shape.head_dim}"
    return None


def unfit_cudnn(machine: Machine) -> str | None:
    """Refuses versions of cuDNN whose packed attention is missing or wrong."""
    if machine.cudnn is None:
        return "cuDNN is missing; pip install 'jax[cuda12]' or 'jax[cuda13]'"
    here = cudnn_text(machine.cudnn)
    if machine.cudnn < CUDNN_LEAST:
        return f"it needs cuDNN {cudnn_text(CUDNN_LEAST)} or later, and this is {here}"
    faults = (fault for first, end, fault in CUDNN_BAD if first <= machine.cudnn < end)
    return next((f"it cannot use cuDNN {here}: {fault}" for fault in faults), None)


def cudnn_text(number: int) -> str:
    """91002 -> 9.10.2."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
