"""The contract of an attention back-end: a forward and a backward call, for ring, all-gather and one device.

A call takes one packed buffer of queries and one of keys, inside the manual shard_map, and is one of two:

    local     causal attention of the buffer to itself, inside each document: query i sees [lo_i, i]
    remote    a run of queries sees a run of another rank's keys, all of it: one dense rectangle a row under
              the whole-buffer layout, one a split document under "whole" (packing/segments.py)

Where segments continue others (packing/prefixes.py) there is one more for the keys of every rank:

    prefix    a query sees all keys of its segment's prefix on that rank; segments may see the same keys

All are KeyIntervals, with `causal` on or off. Several calls give parts of one softmax, which are merged by
their log-sum-exp. The backward pass of each part takes the output and the log-sum-exp of the whole. So
back-ends can be mixed: prefix calls, calls in a window and the calls of decoding, with one query a document,
go to the back-end only if it takes any intervals, else to the blockwise one: to the fused kernels a key
belongs to one run of queries. Latent attention decodes by the blockwise code always.

The encoder's attention is not such a call: it is bidirectional and has relative positions. It is dense in
short rows (dense.py), else kernels of our own (relative.py) or blockwise.

Legend: N queries, S keys, H query heads, K key/value heads, D query/key dim, V value dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import Array

from jaxthd.ops.backend import Machine
from jaxthd.packing.intervals import KeyIntervals


class Call(NamedTuple):
    """The keys that the queries see.

    causal: True for the local call, False for others. block: the blockwise back-end's block size.
    alone: the queries see no other keys than this call's. Then results may have the queries' dtype.
    documents: the most runs of queries that the intervals can hold. None where that is not known; then only
        a back-end that takes any intervals can be called.
    """

    intervals: KeyIntervals
    causal: bool
    block: int
    documents: int | None
    alone: bool = False

    @property
    def is_empty(self) -> Array:
        """True if no query sees a key: bool []."""
        return jax.numpy.all(self.intervals.blocks == 0)


@dataclass(frozen=True)
class AttentionShape:
    """Facts that decide whether a kernel can compute a rank's attention. dtype: that of queries, keys and
    values.

    tokens, documents: the most that all buffers of a call hold together; 0 where that is not known.
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
call's keys, in promote(float32, q's dtype): 0 for a query that sees nothing and a key that nothing sees.
Output and log-sum-exp are those over all keys that a query sees, in other calls too; so the gradients of all
calls add up."""


class AttentionBackend(NamedTuple):
    """unfit: the requirement (ops/backend.py). All three import the kernel's library when called, not
    before.

    verified: where, when and with which versions it ran; docs/kernels.md has it.
    takes_any_intervals: it takes prefix calls, windows and decoding too, where a key does not belong to one
    run of queries. is_interpreted_on_cpu: a CPU interprets it, slowly, which says nothing about its compiled
    form.
    """

    name: str
    unfit: Callable[[AttentionShape, Machine], str | None]
    forward: Forward
    backward: Backward
    verified: str = "not yet run"
    takes_any_intervals: bool = False
    is_interpreted_on_cpu: bool = False
