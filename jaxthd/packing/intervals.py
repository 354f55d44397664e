"""Key intervals: which keys each query of attention sees, one contiguous range for every query.

A query sees the tokens of its document whose index in the row is not above its own. What is divided over the
context ranks (the whole buffer, or a document by itself) is split into 2 * n chunks, and each rank holds two
of them in document order (packing/layout.py). So the keys of a rank that lie between two indices are an
interval of its slots, whose ends are found by counting. With r = rank and s = source, the chunks of two ranks
lie in one of two orders:

    s < r    s, r, ..., 2n-1-r, 2n-1-s    both chunks of r lie between those of s
    s > r    r, s, ..., 2n-1-s, 2n-1-r    the second chunk of r comes after both of s

So some queries come after all keys of some chunks, and no other query comes after any key. Were there no
documents, a remote step would be one dense rectangle; documents only shrink it. Of the whole buffer at most
one document has keys on s and a later query on r: it holds all tokens between the two, and so the first of
these queries. So one rectangle a row remains, or nothing.

Legend: N queries, R rows on this rank, T queries or tokens of a row on it, QB query blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.packing.layout import DualChunkSwap


class KeyIntervals(NamedTuple):
    """Query i sees keys lo[i] <= j < hi[i]; query block b touches blocks[b] blocks of keys, from first[b] on.

    Those of several ring steps have a first dim more.
    """

    lo: Int32[Array, "*steps N"]
    hi: Int32[Array, "*steps N"]
    first: Int32[Array, "*steps QB"]
    blocks: Int32[Array, "*steps QB"]


def usual_queries(block: int) -> int:
    """Queries of a block, where nothing else is said: half as many as keys. Documents are often shorter than
    a block, and fewer queries see fewer keys of others."""
    return max(block // 2, 1)


def key_intervals(
    lo: Int32[Array, " N"], hi: Int32[Array, " N"], block: int, query_block: int | None = None
) -> KeyIntervals:
    """Adds what each block of queries touches. A query with hi <= lo sees nothing: output 0, lse -inf.

    block: keys in a block. query_block: queries in one; None: usual_queries.

    The blocks of keys that a query block touches begin at the first key that one of its queries sees, and
    end with the last. They do not begin at multiples of their size, because they would often be one more.
    Documents lie in order, so queries see keys in each of them: no block is executed that could be skipped.
    """
    some = hi > lo
    lo, hi = jnp.where(some, lo, 0), jnp.where(some, hi, 0)
    far, queries = jnp.iinfo(jnp.int32).max, query_block or usual_queries(block)
    end = blocked(hi, queries, 0).max(axis=1)
    first = jnp.minimum(blocked(jnp.where(some, lo, far), queries, far).min(axis=1), end)
    return KeyIntervals(lo, hi, first, -(-(end - first) // block))


def intervals_of_rows(lo_RT: Array, hi_RT: Array, is_real_RT: Bool[Array, "R T"], block: int) -> KeyIntervals:
    """The intervals of rows, one after the other. Queries that are not real see nothing.

    lo, hi: slots of the row, integers that broadcast to [R, T]; they become keys of all rows.
    """
    rows, tokens = is_real_RT.shape
    real_N, row_R1 = is_real_RT.reshape(-1), tokens * jnp.arange(rows, dtype=jnp.int32)[:, None]
    lo_N, hi_N = (jnp.where(real_N, (row_R1 + x).reshape(-1), 0) for x in (lo_RT, hi_RT))
    return key_intervals(lo_N, hi_N, block)


def blocked(x: Array, block: int, fill: float | int) -> Array:
    """[N, ...] -> [ceil(N / block), block, ...]; the last block is filled up with `fill`."""
    padded = jnp.pad(x, [(0, -len(x) % block)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return padded.reshape(-1, block, *x.shape[1:])


class SeenKeys(NamedTuple):
    """The keys that each of this rank's queries sees.

    local: on this rank. remote: on the other context ranks, in the order of ring_sources; arrays with a first
    dim of ranks - 1 ring steps. None on one rank.
    """

    local: KeyIntervals
    remote: KeyIntervals | None

    @property
    def by_step(self) -> list[KeyIntervals]:
        """local, then each step of `remote`."""
        remote = [] if self.remote is None else zip(*self.remote, strict=True)
        return [self.local, *(KeyIntervals(*x) for x in remote)]


class Divided(NamedTuple):
    """What each query's keys are a part of, and its place in the slots of every rank.

    Its 2 * ranks chunks have `chunk` tokens each and lie in the row one after the other. A rank has two of
    them, in its slots from `start` on. start, chunk: numbers, or [R, T] where each query's document is
    divided by itself.
    """

    swap: DualChunkSwap
    start: Int32[Array, "R T"] | int
    chunk: Int32[Array, "R T"] | int

    @classmethod
    def of_buffer(cls, ranks: int, tokens: int) -> "Divided":
        """The whole buffer. tokens: of a row on a rank."""
        return cls(DualChunkSwap(ranks), 0, -(-tokens // 2))

    def below(self, rank: Array | int, index: Array) -> Array:
        """The slot of a rank before which its tokens have a lower index in the row."""
        within = index - self.swap.ranks * self.start
        first, second = (number * self.chunk for number in self.swap.chunks(rank))
        return self.start + jnp.clip(within - first, 0, self.chunk) + jnp.clip(within - second, 0, self.chunk)

    def seen(
        self, rank: Array | int, begin_RT: Array, end_RT: Array, is_real_RT: Bool[Array, "R T"], block: int
    ) -> SeenKeys:
        """The keys whose index in the row is at least `begin` and below `end`. rank: this one. is_real,
        block: as intervals_of_rows takes them."""

        def of_rank(source: Array) -> KeyIntervals:
            """The keys on one rank."""
            lo_RT, hi_RT = (self.below(source, x) for x in (begin_RT, end_RT))
            return intervals_of_rows(lo_RT, hi_RT, is_real_RT, block)

        remote = None
        if self.swap.ranks > 1:
            remote = jax.vmap(of_rank)(jnp.asarray(ring_sources(rank, self.swap.ranks)))
        return SeenKeys(of_rank(jnp.asarray(rank)), remote)


def ring_sources(rank: Array | int, ranks: int) -> Array | np.ndarray:
    """The ranks whose keys `rank` meets in the steps of a ring after the local one: those below it, from the
    nearest one on. int32 [ranks - 1]."""
    return (rank - np.arange(1, ranks, dtype=np.int32)) % ranks
