"""Exchange with neighbours for encoder chunks that are split over the ranks that share a buffer.

The encoder frames of a row lie on these ranks one after the other, so a chunk that is split goes on at the
start of the next rank's frames. A convolution needs a few frames beyond both ends of a rank's share,
attention the keys and values of up to a chunk.

Legend: R rows on this rank, E encoder frames of a row on it, S = E + 2 reach frames of its window.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32, Shaped

from jaxthd.packing.intervals import KeyIntervals, key_intervals
from jaxthd.packing.segments import Segments

MOST_SENDS = 4
"""If a rank would receive more sends than these, all frames of the row are gathered instead."""


class Neighbours(NamedTuple):
    """The window around this rank's frames in the row, and the chunks in it.

    axes: of the mesh; their ranks share a row. is_split: whether any chunk of any row is split, the same on
    all ranks of the mesh. reach: frames of the window before this rank's, and after them.
    ids, positions: of the window's frames, as in Segments; 0 beyond the row. remaining: frames of the chunk
    after each of this rank's frames. keys: the window's frames that each of this rank's frames sees.
    """

    axes: tuple[str, ...]
    is_split: Bool[Array, ""]
    reach: int
    ids: Int32[Array, "R S"]
    positions: Int32[Array, "R S"]
    remaining: Int32[Array, " N"]
    keys: KeyIntervals

    @property
    def rows(self) -> int:
        """The rows of this rank."""
        return len(self.ids)

    def own(self, x: Shaped[Array, "R_S ..."]) -> Shaped[Array, "N ..."]:
        """The window's frames that are this rank's."""
        x_RS = x.reshape(self.rows, -1, *x.shape[1:])
        x_RE = x_RS[:, self.reach : x_RS.shape[1] - self.reach]
        return x_RE.reshape(-1, *x.shape[1:])

    def placed(self, x: Shaped[Array, "N ..."]) -> Shaped[Array, "R_S ..."]:
        """x, of this rank's frames, at their slots of the window; 0 in all others. The inverse of own."""
        x_RE = x.reshape(self.rows, -1, *x.shape[1:])
        padding = [(0, 0), (self.reach, self.reach), *[(0, 0)] * (x_RE.ndim - 2)]
        return jnp.pad(x_RE, padding).reshape(-1, *x.shape[1:])

    def window(self, x: Shaped[Array, "N ..."]) -> Shaped[Array, "R_S ..."]:
        """x of the window's frames. All ranks of the mesh take part."""
        x_RS = around(x.reshape(self.rows, -1, *x.shape[1:]), self.reach, self.reach, self.axes)
        return x_RS.reshape(-1, *x.shape[1:])


def make_neighbours(
    segments: Segments, reach: int, axes: tuple[str, ...], mesh_axes: tuple[str, ...]
) -> Neighbours | None:
    """None if one rank has all frames of its rows.

    segments: of this rank's encoder frames. reach: the most frames that a frame needs before or after it.
    axes: of the ranks that share a row, in the order of its frames. mesh_axes: of all ranks that call this.
    """
    ranks = jax.lax.axis_size(axes)
    if ranks == 1:
        return None
    frames = segments.row_length
    reach = min(reach, frames * (ranks - 1))
    ids_RE, positions_RE = (x.reshape(segments.rows, -1) for x in (segments.ids, segments.positions))
    is_split = jax.lax.pmax((positions_RE[:, 0] > 0).any().astype(jnp.int32), mesh_axes) > 0
    window_RS2 = around(jnp.stack([ids_RE, positions_RE], axis=-1), reach, reach, axes)
    ids_RS, positions_RS = window_RS2[..., 0], window_RS2[..., 1]
    slot_S = jnp.arange(ids_RS.shape[1], dtype=jnp.int32)
    ends_RS = jnp.pad(ids_RS[:, 1:] != ids_RS[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    stop_RS = jax.lax.cummin(jnp.where(ends_RS, slot_S + 1, len(slot_S)), axis=1, reverse=True)
    slot_E, stop_RE = slot_S[reach : reach + frames], stop_RS[:, reach : reach + frames]
    remaining_RE, is_real_RE = stop_RE - 1 - slot_E, ids_RE > 0
    first_RE = jnp.maximum(slot_E - positions_RE, 0)
    row_R1 = len(slot_S) * jnp.arange(segments.rows, dtype=jnp.int32)[:, None]
    lo_N, hi_N = (jnp.where(is_real_RE, row_R1 + x, 0).reshape(-1) for x in (first_RE, stop_RE))
    keys = key_intervals(lo_N, hi_N, segments.block)
    return Neighbours(axes, is_split, reach, ids_RS, positions_RS, remaining_RE.reshape(-1), keys)


def extended(
    x_RE: Shaped[Array, "R n ..."], before: int, after: int, is_split: Bool[Array, ""], axes: tuple[str, ...]
) -> Shaped[Array, "R m ..."]:
    """x with so many frames of the ranks before and after; 0 beyond the row, and if no chunk is split."""
    padding = [(0, 0), (before, after), *[(0, 0)] * (x_RE.ndim - 2)]
    from_ranks = partial(around, before=before, after=after, axes=axes)
    return jax.lax.cond(is_split, from_ranks, lambda x: jnp.pad(x, padding), x_RE)


def around(
    x_RE: Shaped[Array, "R n ..."], before: int, after: int, axes: tuple[str, ...]
) -> Shaped[Array, "R m ..."]:
    """x with so many frames of the ranks before and after; 0 beyond the row. All ranks must call it."""
    ranks, frames = jax.lax.axis_size(axes), x_RE.shape[1]
    hops = -(-max(before, after) // frames)  # to the farthest frames, in ranks
    if 2 * hops > MOST_SENDS:
        row_RA = jax.lax.all_gather(x_RE, axes, axis=1, tiled=True)
        row_RA = jnp.pad(row_RA, [(0, 0), (before, after), *[(0, 0)] * (x_RE.ndim - 2)])
        start = jax.lax.axis_index(axes) * frames
        return jax.lax.dynamic_slice_in_dim(row_RA, start, before + frames + after, axis=1)

    def sent(x: Array, by: int) -> Array:
        """x of the rank that comes `by` ranks before; 0 if there is none."""
        pairs = [(rank, rank + by) for rank in range(ranks) if 0 <= rank + by < ranks]
        return jax.lax.ppermute(x, axes, pairs) if pairs else jnp.zeros_like(x)

    parts = [x_RE]
    for hop in range(1, hops + 1):
        ahead, behind = (min(n - (hop - 1) * frames, frames) for n in (before, after))
        if ahead > 0:
            parts.insert(0, sent(x_RE[:, frames - ahead :], hop))
        if behind > 0:
            parts.append(sent(x_RE[:, :behind], -hop))
    return jnp.concatenate(parts, axis=1)
