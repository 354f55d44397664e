"""What an attention back-end is: two calls, forward and backward, for the ring, all-gather and one device.

A call is about one packed buffer of queries and one of keys, inside the manual shard_map, and is one of two:

    local     causal attention of the buffer to itself, inside each document: query i sees [lo_i, i]
    remote    a run of queries sees a run of another rank's keys, all of it: one dense rectangle a row under
              the whole-buffer layout, one a document under the per-document one (packing/segments.py)

Both are KeyIntervals with `causal` on or off. The parts of a softmax that several calls give are merged by
their log-sum-exp, and the backward pass of each part takes the output and the log-sum-exp of the whole.

The encoder's bidirectional attention (query heads of d + D dims against value heads of d, in float32 more
often than not) and decoding's (one query a document) are no such calls: they are always blockwise.

Legend: N queries, S keys, H query heads, K key/value heads, D query/key dim, V value dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array

from jaxthd.kernels.machine import Machine
from jaxthd.packing.segments import KeyIntervals, Segments


class Call(NamedTuple):
    """Which keys the queries see.

    causal: the local call, else a remote one. block: of the blockwise back-end.
    documents: most runs of queries that the intervals hold; None where it is not known, and only the
    blockwise back-end can be called.
    """

    intervals: KeyIntervals
    causal: bool
    block: int
    documents: int | None

    @property
    def is_empty(self) -> Array:
        """No query sees a key: bool []."""
        return jax.numpy.all(self.intervals.blocks[:, 0] >= self.intervals.blocks[:, 1])


def calls(segments: Segments) -> list[Call]:
    """The local call, then one for the keys of each other context rank, as Segments.remote has them."""
    documents = None if segments.documents is None else segments.rows * segments.documents
    rectangles = segments.rows if segments.in_order is None else documents
    remote = (Call(x, False, segments.block, documents and rectangles) for x in segments.remote)
    return [Call(segments.local, True, segments.block, documents), *remote]


@dataclass(frozen=True)
class Problem:
    """The shape of a rank's attention that decides whether a kernel exists. dtype: what it computes in.

    tokens, documents: of all buffers of a call, most; 0 where it is not known.
    """

    dtype: str
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int = 0
    documents: int = 0

    def __str__(self) -> str:
        heads = f"{self.q_heads} query and {self.kv_heads} key/value heads"
        size = f", {self.tokens:,} tokens in up to {self.documents:,} documents" * bool(self.tokens)
        return f"{self.dtype}, {heads} of dim {self.head_dim}{size}"


Forward = Callable[[Array, Array, Array, Call, float], tuple[Array, Array]]
"""(q [N, H, D], k [S, K, D], v [S, K, V], call, scale) -> (output [N, H, V], log-sum-exp of the scaled scores
[N, H]), both in promote(float32, q's dtype). Query head h uses key/value head h // (H / K). A query that sees
no key gives 0 and -inf."""
Backward = Callable[[Array, Array, Array, Array, Array, Array, Call, float], tuple[Array, Array, Array]]
"""(q, k, v, output, log-sum-exp, gradient of the output, call, scale) -> gradients of q, k, v over this
call's keys, in promote(float32, q's dtype); 0 where nothing is seen, or nothing sees. Output and log-sum-exp
are those over all keys that a query sees, other calls' too: then the gradients of all calls add up."""


class Backend(NamedTuple):
    """unfit: why it cannot run such a problem on such a machine, in one line; None where it can.

    It imports what it needs when it is called, not before.
    """

    name: str
    unfit: Callable[[Problem, Machine], str | None]
    forward: Forward
    backward: Backward
