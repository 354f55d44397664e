"""Key intervals: which keys each query of attention sees, one contiguous range for every query.

Legend: N queries, R rows, T queries of a row, QB query blocks.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


class KeyIntervals(NamedTuple):
    """Query i sees keys lo[i] <= j < hi[i]; query block b touches the key blocks blocks[b]: first, end.

    Those of several ring steps have a first dim more.
    """

    lo: Int32[Array, "*steps N"]
    hi: Int32[Array, "*steps N"]
    blocks: Int32[Array, "*steps QB 2"]


def key_intervals(
    lo: Int32[Array, " N"], hi: Int32[Array, " N"], block: int, query_block: int | None = None
) -> KeyIntervals:
    """Adds the block ranges to the intervals. A query with hi <= lo sees nothing: output 0, lse -inf.

    block: keys in a block; queries too, unless query_block says otherwise.

    A query block's range runs from the first to the last key block that one of its queries touches. Those
    between are touched too, because documents lie in order: no block is executed that could be skipped.
    """
    some = hi > lo
    lo, hi = jnp.where(some, lo, 0), jnp.where(some, hi, 0)
    far, queries = jnp.iinfo(jnp.int32).max, query_block or block
    first = blocked(jnp.where(some, lo, far), queries, far).min(axis=1) // block
    last = -(-blocked(hi, queries, 0).max(axis=1) // block)
    return KeyIntervals(lo, hi, jnp.stack([jnp.minimum(first, last), last], axis=1))


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
