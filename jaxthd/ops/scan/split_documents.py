"""The scan of documents that are split over context ranks, while others are whole
(packing/split_documents.py).

Each context chunk of a split document is scanned from a zero state, as if it were a document, by any
back-end, together with the whole documents. What it does to the state that enters it is an affine map. The
ranks exchange these maps (state_passing.py), and each gets the state H that enters each of its context
chunks. The scan is linear in H, so what H adds is added where it is small:

    to the states before scan chunks    those that a context chunk reaches into from the scan chunk before
    to outputs                          of a context chunk's first tokens, up to the end of their scan chunk

So nothing is scanned twice, and no loop runs over documents. Of a context chunk's map, what it adds is taken
from the state before its last scan chunk and from its tokens in that one. If no document is split, nothing of
this is computed or exchanged.

Legend: as ops/scan/ssd.py; E context chunks of split documents on this rank, W tokens of a context chunk in
one scan chunk, at most Q.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.decays import exact_einsum
from jaxthd.ops.scan.state_passing import DecayMap, entering_states
from jaxthd.packing.segments import Segments


class Edges(NamedTuple):
    """Where context chunks begin and end among the scan chunks of this rank.

    head, tail: the tokens of each context chunk in the scan chunk where it begins, and where it ends, in
        their order. Behind them stand numbers from N on, no two alike.
    first, last: these scan chunks; 0 for a context chunk that is not there.
    reaching: the context chunk that reaches into each scan chunk from the one before; -1 for none.
    """

    head: Int32[Array, "E W"]
    tail: Int32[Array, "E W"]
    first: Int32[Array, " E"]
    last: Int32[Array, " E"]
    reaching: Int32[Array, " C"]

    @property
    def following(self) -> Int32[Array, " C"]:
        """The context chunk that reaches from each scan chunk into the next; -1 for none."""
        return jnp.concatenate([self.reaching[1:], jnp.full(1, -1, self.reaching.dtype)])

    @property
    def goes_on(self) -> Bool[Array, "E 1"]:
        """True where a context chunk reaches beyond its first scan chunk."""
        return (self.last > self.first)[:, None]


def find_edges(segments: Segments, chunk: int, length: int) -> Edges:
    """Counts where the context chunks of split documents lie.

    chunk: tokens of a scan chunk. length: of a row in the arrays whose tokens are numbered, its own or
    filled up to whole scan chunks.
    """
    split, rows = segments.splits, segments.rows
    assert split is not None
    begin_RE, end_RE = split.begin, split.end
    of_row = -(-segments.row_length // chunk)
    first_RE, last_RE = jnp.maximum(begin_RE, 0) // chunk, jnp.maximum(end_RE, 0) // chunk
    row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    i = jnp.arange(chunk, dtype=jnp.int32)

    def tokens(start_RE: Array, stop_RE: Array) -> Array:
        """The tokens from `start` to before `stop`, [E, W]."""
        slot_REW = start_RE[..., None] + i
        beyond_EW = rows * length + jnp.arange(start_RE.size * chunk, dtype=jnp.int32).reshape(-1, chunk)
        there_REW = (slot_REW < stop_RE[..., None]) & (begin_RE >= 0)[..., None]
        index_EW = (row_R1[..., None] * length + slot_REW).reshape(-1, chunk)
        return jnp.where(there_REW.reshape(-1, chunk), index_EW, beyond_EW)

    start_c = chunk * jnp.arange(of_row, dtype=jnp.int32)
    reaches_REc = (begin_RE[..., None] < start_c) & (start_c <= end_RE[..., None])
    number_RE1 = (row_R1 * begin_RE.shape[1] + jnp.arange(begin_RE.shape[1], dtype=jnp.int32))[..., None]
    return Edges(
        head=tokens(begin_RE, jnp.minimum(end_RE + 1, (first_RE + 1) * chunk)),
        tail=tokens(jnp.maximum(begin_RE, last_RE * chunk), end_RE + 1),
        first=(row_R1 * of_row + first_RE).reshape(-1),
        last=(row_R1 * of_row + last_RE).reshape(-1),
        reaching=jnp.where(reaches_REc, number_RE1, -1).max(axis=1).reshape(-1),
    )


def taken(x_N: Array, at_EW: Int32[Array, "E W"]) -> Array:
    """The tokens `at` of x [N, ...]: [E, W, ...], 0 for those that are not there."""
    rows: Array = x_N.at[at_EW].get(mode="fill", fill_value=0, unique_indices=True)
    return rows


def put(x_N: Array, at_EW: Int32[Array, "E W"], more_EW: Array) -> Array:
    """x [N, ...] with `more` added at the tokens `at` that are there."""
    more = more_EW.astype(x_N.dtype)
    summed: Array = x_N.at[at_EW].add(more, mode="drop", unique_indices=True)
    return summed


class Ends(NamedTuple):
    """The scan's inputs at both ends of context chunks: at the tokens Edges.tail (x, dt, B and `to_end`) and
    Edges.head (C and `from_start`); 0 where there are none.

    to_end, from_start: the logarithm of the decay, dt a, of these tokens. before: the state before the last
    scan chunk, as scanned from zero. of_scan_chunks: the logarithm of the decay over each scan chunk.
    """

    x: Float[Array, "E W H P"]
    dt: Float[Array, "E W H"]
    b: Float[Array, "E W G S"]
    to_end: Float[Array, "E W H"]
    c: Float[Array, "E W G S"]
    from_start: Float[Array, "E W H"]
    before: Float[Array, "E H S P"]
    of_scan_chunks: Float[Array, "C H"]


def entered(
    ends: Ends, edges: Edges, segments: Segments
) -> tuple[Float[Array, "E H S P"], Float[Array, "E W H P"]]:
    """The states that enter context chunks, and what they add to the outputs of the tokens Edges.head. Both
    are in the accumulation dtype; 0 if no document is split.
    """
    split = segments.splits
    assert split is not None

    def exchanged(ends: Ends) -> tuple[Array, Array]:
        """Exchanges the maps of all context chunks. All else is small, and computed again for gradients."""
        maps = jax.checkpoint(_maps)(ends, edges)
        entering_EHSP = entering_states(maps, segments).reshape(ends.before.shape)
        return entering_EHSP, jax.checkpoint(_head_outputs)(entering_EHSP, ends)

    def none(ends: Ends) -> tuple[Array, Array]:
        """Zeros in their place."""
        acc = accumulation_dtype(ends.x)
        return jnp.zeros(ends.before.shape, acc), jnp.zeros(ends.x.shape, acc)

    found: tuple[Array, Array] = jax.lax.cond(split.width > 0, exchanged, none, ends)
    return found


def _maps(ends: Ends, edges: Edges) -> DecayMap:
    """The map of each context chunk, a head's state as one dim: decay [E, H, 1], added [E, H, 1, 1, S P]."""
    (chunks, tokens, heads, p), (_, _, groups, state) = ends.x.shape, ends.b.shape
    i = jnp.arange(tokens)
    to_end_EWH = jnp.exp(exact_einsum("evh,wv->ewh", ends.to_end, i > i[:, None]))
    weighted_EWHP = (ends.x * (to_end_EWH * ends.dt)[..., None]).astype(ends.x.dtype)
    weighted_EWGhP = weighted_EWHP.reshape(chunks, tokens, groups, -1, p)
    acc = accumulation_dtype(ends.x)
    added = jnp.einsum("ewgs,ewghp->eghsp", ends.b, weighted_EWGhP, preferred_element_type=acc)

    c, over_last_EH = jnp.arange(len(ends.of_scan_chunks)), ends.to_end.sum(1)
    is_between_EC = (edges.first[:, None] < c) & (c < edges.last[:, None])
    between_EH = exact_einsum("ch,ec->eh", ends.of_scan_chunks, is_between_EC)
    whole_EH = over_last_EH + jnp.where(edges.goes_on, ends.from_start.sum(1) + between_EH, 0)
    left_EH = jnp.where(edges.goes_on, jnp.exp(over_last_EH), 0)
    added_EHSP = added.reshape(chunks, heads, state, p) + left_EH[..., None, None] * ends.before
    return DecayMap(jnp.exp(whole_EH)[..., None], added_EHSP.reshape(chunks, heads, 1, 1, -1))


def _head_outputs(entering_EHSP: Array, ends: Ends) -> Array:
    """Additions of entering states to the outputs of the tokens Edges.head, [E, W, H, P]."""
    (chunks, tokens, groups, _), (_, heads, state, p) = ends.c.shape, entering_EHSP.shape
    entering_EGhSP = entering_EHSP.reshape(chunks, groups, -1, state, p).astype(ends.c.dtype)
    acc = accumulation_dtype(ends.c)
    more = jnp.einsum("ewgs,eghsp->ewghp", ends.c, entering_EGhSP, preferred_element_type=acc)
    return more.reshape(chunks, tokens, heads, p) * since_start(ends)[..., None]


def since_start(ends: Ends) -> Float[Array, "E W H"]:
    """The decay from before a context chunk's first token to each token of Edges.head, included."""
    i = jnp.arange(ends.from_start.shape[1])
    return jnp.exp(exact_einsum("evh,wv->ewh", ends.from_start, i <= i[:, None]))


def through_head(ends: Ends, edges: Edges) -> Float[Array, "E H"]:
    """The decay of an entering state over a context chunk's first scan chunk; 0 where it ends there."""
    return jnp.where(edges.goes_on, jnp.exp(ends.from_start.sum(1)), 0)


def through_scan_chunks(
    of_scan_chunks: Float[Array, "C H"], edges: Edges, *, after: bool = False
) -> Float[Array, "C H"]:
    """The decay from the end of a context chunk's first scan chunk to before each scan chunk that it reaches
    into; 0 in other scan chunks. after: the decay from the end of each scan chunk that it reaches beyond to
    before its last one.

    of_scan_chunks: see Ends.
    """
    c, of_C = jnp.arange(len(edges.reaching)), edges.following if after else edges.reaching
    fills_C = edges.reaching == edges.following
    same_CC = fills_C & (edges.reaching == of_C[:, None])
    counted_CC = same_CC & ((c > c[:, None]) if after else (c < c[:, None]))
    sums_CH = exact_einsum("kh,ck->ch", of_scan_chunks, counted_CC)
    return jnp.where(of_C[:, None] >= 0, jnp.exp(sums_CH), 0)
