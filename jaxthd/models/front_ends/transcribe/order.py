"""The outputs of all ranks that share rows, in the order of their recordings.

Legend: R rows, E outputs of a row on this rank, N = R E, M outputs of these rows over all ranks that share
them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32

from jaxthd.models.front_ends.contract import Recordings


class Order(NamedTuple):
    """The audio tokens of these rows in the order of their recordings, of all ranks that share the rows.

    source: the output of each, among R x (ranks E). place: the inverse. positions: in its recording; less
    than 0 behind the last one. stop: the place behind the recording's last one. is_whole: whether the
    recording's last output has all its frames, so that one of zeros follows. first: the place of a
    recording's first one, by its row's outputs before it and its number.
    """

    source: Int32[Array, " M"]
    place: Int32[Array, " M"]
    positions: Int32[Array, " M"]
    stop: Int32[Array, " M"]
    is_whole: Bool[Array, " M"]
    first: Int32[Array, " recordings"]

    @classmethod
    def of(cls, recordings: Recordings, is_whole_RE: Bool[Array, "R E"], axes: tuple[str, ...]) -> "Order":
        """is_whole: whether the output has all its frames. axes: of the ranks that share rows."""
        ids_RM, positions_RM, whole_RM = (
            over_ranks(x, axes) for x in (recordings.ids, recordings.positions, is_whole_RE)
        )
        count = ids_RM.size
        is_token_M = (positions_RM >= 0).reshape(-1)
        group_M = jnp.where(is_token_M, _numbers(ids_RM, ids_RM.shape[1]), 2 * count)
        index_M = jnp.arange(count, dtype=jnp.int32)
        given = group_M, positions_RM.reshape(-1), index_M
        group_M, positions_M, source_M = jax.lax.sort(given, num_keys=2)
        ends_M = jnp.pad(group_M[1:] != group_M[:-1], (0, 1), constant_values=True)
        stop_M = jax.lax.cummin(jnp.where(ends_M, index_M + 1, count), reverse=True)
        place_M = jnp.zeros_like(index_M).at[source_M].set(index_M)
        last_is_whole_M = whole_RM.reshape(-1)[source_M[stop_M - 1]]
        first = jnp.zeros(2 * count + 1, jnp.int32)
        first = first.at[jnp.where(positions_M == 0, group_M, len(first))].set(index_M, mode="drop")
        return cls(source_M, place_M, positions_M, stop_M, last_is_whole_M, first)

    def givers(self, recordings: Recordings, axes: tuple[str, ...]) -> Int32[Array, " N"]:
        """The output, among R x (ranks E), that gives the token of each of this rank's outputs: another one
        where the output is of another piece's token. Itself where there is no such token."""
        rows = len(recordings.ids)
        whole = len(self.place) // rows
        own_N = of_rank(jnp.arange(len(self.place), dtype=jnp.int32), rows, axes)
        number_N = jnp.minimum(_numbers(recordings.ids, whole), len(self.first) - 1)
        position_N = recordings.positions.reshape(-1)
        place_N = self.first[number_N] + jnp.maximum(-2 - position_N, 0)
        is_there_N = (position_N < -1) & (place_N < jnp.take(self.stop, self.first[number_N], mode="clip"))
        return jnp.where(is_there_N, jnp.take(self.source, place_N, mode="clip"), own_N)


def _numbers(ids_RE: Array, outputs: int) -> Int32[Array, " N"]:
    """A number of each recording, unlike others' in all rows. outputs: of a row on all ranks."""
    row_R1 = jnp.arange(len(ids_RE), dtype=jnp.int32)[:, None]
    return (row_R1 * outputs + ids_RE).reshape(-1)


def of_rank(x_M: Array, rows: int, axes: tuple[str, ...]) -> Array:
    """x of this rank's outputs, from x of all ranks'; or of several frames for each."""
    x_RM = x_M.reshape(rows, -1)
    own = x_RM.shape[1] // jax.lax.axis_size(axes)
    start = jax.lax.axis_index(axes) * own if axes else 0
    return jax.lax.dynamic_slice_in_dim(x_RM, start, own, axis=1).reshape(-1)


def over_ranks(x_RE: Array, axes: tuple[str, ...]) -> Array:
    """The rows' outputs on all ranks that share them, [R, ranks E, ...]."""
    return jax.lax.all_gather(x_RE, axes, axis=1, tiled=True) if axes else x_RE
