"""Prefixes: how a segment continues another one, as the answers to one prompt continue the prompt.

The segments of a row lie one after the other, and every mixer keeps them apart. A segment with a prefix is
treated as if the prefix's tokens preceded its own: attention sees them all, the convolution their last ones,
the scan the state at their end. A prefix has no prefix itself. The segments that continue it follow it in the
row, in one run.

Legend: R rows on this rank, T tokens of a row on it, N = R * T, D most segments of a row, P = D / 2 most
prefixes of a row (each has a segment that continues it), C context ranks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from jaxthd.packing.intervals import KeyIntervals, intervals_of_rows


class Prefixes(NamedTuple):
    """The prefixes of this rank's rows. All numbers are equal on all context ranks but those by token.

    local: the keys of the token's prefix on this rank: all of them, none is later than the token.
    remote: the same for the keys of other context ranks, as Segments.remote has them.
    of_token: the prefix that the token's segment continues, row * P + its number in the row; or -1.
    of_segment: the same for each segment; -1 also where there is no segment.
    begin, length: of each segment: the index in its row of the first token, and the number of its tokens.
    first, last: of each prefix: the indices in its row of the first and the last token; -1 where there is no
        prefix.
    """

    local: KeyIntervals
    remote: KeyIntervals | None
    of_token: Int32[Array, " N"]
    of_segment: Int32[Array, "R D"]
    begin: Int32[Array, "R D"]
    length: Int32[Array, "R D"]
    first: Int32[Array, "R P"]
    last: Int32[Array, "R P"]

    @property
    def tokens_before(self) -> Int32[Array, " N"]:
        """The tokens of the prefix that each token's segment continues; 0 where it continues none."""
        length_P = (self.last + 1 - self.first).reshape(-1)
        return jnp.where(self.of_token >= 0, length_P[self.of_token], 0)

    def first_tokens(self, number: int) -> Int32[Array, "R _"]:
        """The indices in their rows of the first `number` tokens of each segment that continues a prefix,
        [R, D * number]; -1 where there is none.
        """
        step = jnp.arange(number, dtype=jnp.int32)
        exists_RDn = (step < self.length[..., None]) & (self.of_segment[..., None] >= 0)
        return jnp.where(exists_RDn, self.begin[..., None] + step, -1).reshape(len(self.begin), -1)


class _Table(NamedTuple):
    """One rank's facts of each segment, [..., R, D]; a neutral value where it holds none of its tokens.

    first, stop: its slots in the row on that rank. begin, length: as in Prefixes. prefix: that segment's id,
    or 0.
    """

    first: Array
    stop: Array
    begin: Array
    length: Array
    prefix: Array


def make_prefixes(
    ids_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    prefixes_RT: Int32[Array, "R T"],
    index_RT: Int32[Array, "R T"],
    sources: Int32[Array | np.ndarray, " steps"],
    *,
    block: int,
    axis: str | None,
    documents: int,
) -> Prefixes:
    """Derives the prefixes; the first three arguments are as make_segments takes them.

    index: in the row, of each token. sources: the context ranks whose keys `remote` is about. axis: of the
    context ranks, with which tables of the segments are exchanged; None where the rows are whole.
    """
    rows, most = len(ids_RT), max(1, documents // 2)
    own = _table(ids_RT, positions_RT, prefixes_RT, index_RT, documents)
    own_5RD = jnp.stack(own)
    all_C = _Table(*(jax.lax.all_gather(own_5RD, axis, axis=1) if axis else own_5RD[:, None]))
    begin_RD, length_RD, prefix_RD = all_C.begin.min(0), all_C.length.max(0), all_C.prefix.max(0)
    row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    # Column 0 is for the segments without a prefix.
    is_prefix_RD = jnp.zeros((rows, documents + 1), bool).at[row_R1, prefix_RD].set(True)[:, 1:]
    number_RD = jnp.cumsum(is_prefix_RD, axis=1, dtype=jnp.int32) - 1
    at_RD = jnp.where(is_prefix_RD, number_RD, most)
    none_RP = jnp.full((rows, most), -1, jnp.int32)
    first_RP, last_RP = (
        none_RP.at[row_R1, at_RD].set(x, mode="drop") for x in (begin_RD, begin_RD + length_RD - 1)
    )
    own_number_RD = row_R1 * most + _at(number_RD, prefix_RD)
    of_segment_RD = jnp.where(prefix_RD > 0, own_number_RD, -1)

    def keys_of(table: _Table) -> KeyIntervals:
        lo_RT, hi_RT = (_at(x, prefixes_RT) for x in (table.first, table.stop))
        return intervals_of_rows(lo_RT, hi_RT, prefixes_RT > 0, block)

    return Prefixes(
        local=keys_of(own),
        remote=jax.vmap(lambda source: keys_of(_Table(*(x[source] for x in all_C))))(sources)
        if axis
        else None,
        of_token=jnp.where(ids_RT > 0, _at(of_segment_RD, ids_RT), -1).reshape(-1),
        of_segment=of_segment_RD,
        begin=begin_RD,
        length=length_RD,
        first=first_RP,
        last=last_RP,
    )


def _at(x_RD: Array, ids: Array) -> Array:
    """The values of the segments with these ids [R, any]; any value for id 0."""
    return jnp.take_along_axis(x_RD, jnp.maximum(ids - 1, 0), axis=1)


def _table(ids_RT: Array, positions_RT: Array, prefixes_RT: Array, index_RT: Array, documents: int) -> _Table:
    rows, tokens = ids_RT.shape
    row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
    slot_RT = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), ids_RT.shape)

    def least(x_RT: Array, beyond: int) -> Array:
        return jnp.full((rows, documents + 1), beyond, jnp.int32).at[row_R1, ids_RT].min(x_RT)[:, 1:]

    def most(x_RT: Array) -> Array:
        return jnp.zeros((rows, documents + 1), jnp.int32).at[row_R1, ids_RT].max(x_RT)[:, 1:]

    return _Table(
        first=least(slot_RT, tokens),
        stop=most(slot_RT + 1),
        begin=least(index_RT - positions_RT, jnp.iinfo(jnp.int32).max),
        length=most(positions_RT + 1),
        prefix=most(prefixes_RT),
    )
