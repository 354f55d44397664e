"""The rectangles of attention over the context axis: what queries see of the keys of another rank.

Legend: R rows on this rank, T tokens of a row on it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.packing.intervals import KeyIntervals, intervals_of_rows
from jaxthd.packing.layout import DualChunkSwap


class DocumentCut(NamedTuple):
    """For each token of a document that is cut by itself: the slot at which the document begins, on every
    rank; and the length of the document's chunks.
    """

    start: Int32[Array, "R T"]
    chunk: Int32[Array, "R T"]


class Rectangle(NamedTuple):
    """The part of another rank's keys that this rank's queries see: queries q_start <= i < q_end see keys
    k_start <= j < k_end, every query every key. Empty where an end is not above its start.

    Slots of a row on the two ranks: [R, 1], or [R, T] where each token's document has a rectangle of its own.
    """

    q_start: Int32[Array, "R _"]
    q_end: Int32[Array, "R _"]
    k_start: Int32[Array, "R _"]
    k_end: Int32[Array, "R _"]


def ring_sources(rank: Array | int, ranks: int) -> Array | np.ndarray:
    """The ranks whose keys `rank` meets in the steps of a ring after the local one: those below it, from the
    nearest one on. int32 [ranks - 1]."""
    return (rank - np.arange(1, ranks, dtype=np.int32)) % ranks


def _causal_pairs(rank: Array | int, source: Array | int, chunk: Array | int) -> tuple[Array, Array]:
    """(first query slot, end of the key slots): the pairs of a remote step in which the query comes later.

    What is cut has chunks of `chunk` tokens. With n ranks, the chunks of r = rank and s = source lie in one
    of two orders:

        s < r    s, r, ..., 2n-1-r, 2n-1-s    both chunks of r lie between those of s
        s > r    r, s, ..., 2n-1-s, 2n-1-r    the second chunk of r comes after both of s

    So these queries come after all of these keys, and no other query comes after any key. Were there no
    documents, a remote step would be one dense rectangle; documents only shrink it.
    """
    is_earlier = source < rank
    return jnp.where(is_earlier, 0, chunk), jnp.where(is_earlier, chunk, 2 * chunk)


def buffer_rectangle(
    swap: DualChunkSwap, rank: Array | int, source: Array | int, begin_RT: Array, stop_RT: Array
) -> Rectangle:
    """The rectangle of a remote step under the whole-buffer layout: one a row.

    A document with a key on the source and a later query here holds all tokens between the two, and so the
    first query of the causal pairs. Hence only one document has any: that query's. Its queries end where it
    ends here; its keys begin where it begins on the source.

    begin_RT: the index in the row at which each token's document begins. stop_RT: from _local_runs.
    """
    chunk = begin_RT.shape[1] // 2
    q_start, k_end = _causal_pairs(rank, source, chunk)
    begin_R1, stop_R1 = (jax.lax.dynamic_slice_in_dim(x, q_start, 1, axis=1) for x in (begin_RT, stop_RT))
    # How many of the source's tokens have an index below begin.
    first, second = (number * chunk for number in swap.chunks(source))
    before_R1 = jnp.clip(begin_R1 - first, 0, chunk) + jnp.clip(begin_R1 - second, 0, chunk)
    return Rectangle(
        jnp.broadcast_to(q_start, stop_R1.shape), stop_R1, before_R1, jnp.broadcast_to(k_end, stop_R1.shape)
    )


def document_rectangle(cut: DocumentCut, rank: Array | int, source: Array | int, stop_RT: Array) -> Rectangle:
    """The rectangles of documents that are cut by themselves: one for each token's, which meets only itself.

    All ranks hold a document from the same slot on. stop_RT: from _local_runs.
    """
    q_start, k_end = _causal_pairs(rank, source, cut.chunk)
    return Rectangle(cut.start + q_start, stop_RT, cut.start, cut.start + k_end)


def intervals_of_steps(
    rectangle_of: Callable[[Array], Rectangle],
    sources: Int32[Array | np.ndarray, " steps"],
    is_real_RT: Bool[Array, "R T"],
    block: int,
) -> KeyIntervals:
    """The keys of each source that each query sees; a first dim of sources. rectangle_of: takes the source.
    is_real, block: as intervals_of_rows takes them.
    """
    return jax.vmap(lambda source: intervals_of_rectangle(rectangle_of(source), is_real_RT, block))(sources)


def intervals_of_rectangle(rectangle: Rectangle, is_real_RT: Bool[Array, "R T"], block: int) -> KeyIntervals:
    """The keys of the other rank that each query sees."""
    slot_T = jnp.arange(is_real_RT.shape[1], dtype=jnp.int32)
    inside_RT = (slot_T >= rectangle.q_start) & (slot_T < rectangle.q_end)
    lo_RT, hi_RT = (jnp.where(inside_RT, x, 0) for x in (rectangle.k_start, rectangle.k_end))
    return intervals_of_rows(lo_RT, hi_RT, is_real_RT, block)
