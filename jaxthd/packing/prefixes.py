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
from jax import Array
from jaxtyping import Int32

from jaxthd.packing.intervals import Divided, SeenKeys


class Prefixes(NamedTuple):
    """The prefixes of this rank's rows. All numbers are equal on all context ranks but those by token.

    keys: the keys of the token's prefix: all of them, none is later than the token.
    of_token: the prefix that the token's segment continues, row * P + its number in the row; or -1.
    of_segment: the same for each segment; -1 also where there is no segment.
    begin, length: of each segment: the index in its row of the first token, and the number of its tokens.
    first, last: of each prefix: the indices in its row of the first and the last token; -1 where there is no
        prefix.
    """

    keys: SeenKeys
    of_token: Int32[Array, " N"]
    of_segment: Int32[Array, "R D"]
    begin: Int32[Array, "R D"]
    length: Int32[Array, "R D"]
    first: Int32[Array, "R P"]
    last: Int32[Array, "R P"]

    def of_tokens(self, x_RP: Int32[Array, "R P"]) -> Int32[Array, " N"]:
        """The numbers of each token's prefix; any number for a token without one."""
        return x_RP.reshape(-1)[jnp.maximum(self.of_token, 0)]

    def in_window(
        self, window: int, positions_RT: Int32[Array, "R T"], divided: Divided, rank: Array | int, block: int
    ) -> SeenKeys:
        """The keys within `window` tokens, as if the segment's tokens followed the prefix's last one.

        positions, divided, rank, block: as for `keys`.
        """
        shape = positions_RT.shape
        first_RT, last_RT = (self.of_tokens(x).reshape(shape) for x in (self.first, self.last))
        nearest_RT = jnp.maximum(first_RT, last_RT + 1 + positions_RT - (window - 1))
        return divided.seen(rank, nearest_RT, last_RT + 1, self.of_token.reshape(shape) >= 0, block)

    @property
    def tokens_before(self) -> Int32[Array, " N"]:
        """The tokens of the prefix that each token's segment continues; 0 where it continues none."""
        return jnp.where(self.of_token >= 0, self.of_tokens(self.last + 1 - self.first), 0)

    def first_tokens(self, number: int) -> Int32[Array, "R _"]:
        """The indices in their rows of the first `number` tokens of each segment that continues a prefix,
        [R, D * number]; -1 where there is none.
        """
        step = jnp.arange(number, dtype=jnp.int32)
        exists_RDn = (step < self.length[..., None]) & (self.of_segment[..., None] >= 0)
        return jnp.where(exists_RDn, self.begin[..., None] + step, -1).reshape(len(self.begin), -1)


def make_prefixes(
    ids_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    prefixes_RT: Int32[Array, "R T"],
    index_RT: Int32[Array, "R T"],
    divided: Divided,
    *,
    block: int,
    axis: str | None,
    documents: int,
) -> Prefixes:
    """Derives the prefixes; the first three arguments are as make_segments takes them.

    index: in the row, of each token. divided: the buffer. axis: of the context ranks, which exchange what
    they know of each segment; None where the rows are whole.
    """
    rows, most = len(ids_RT), max(1, documents // 2)
    row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def largest(x_RT: Array, least: int = 0) -> Array:
        """The largest number of each segment's tokens on this rank, [R, D]; `least` where it has none."""
        return jnp.full((rows, documents + 1), least, jnp.int32).at[row_R1, ids_RT].max(x_RT)[:, 1:]

    of_segments = (
        largest(positions_RT - index_RT, -jnp.iinfo(jnp.int32).max),
        largest(positions_RT + 1),
        largest(prefixes_RT),
    )
    if axis is not None:
        of_segments = jax.lax.all_gather(jnp.stack(of_segments), axis).max(0)
    before_RD, length_RD, prefix_RD = of_segments
    begin_RD = -before_RD
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
    begin_RT, length_RT = (_at(x, prefixes_RT) for x in (begin_RD, length_RD))
    rank = 0 if axis is None else jax.lax.axis_index(axis)
    return Prefixes(
        keys=divided.seen(rank, begin_RT, begin_RT + length_RT, prefixes_RT > 0, block),
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
