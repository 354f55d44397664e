"""Sliding windows: the keys that a token sees if it sees only `window` tokens, itself and those before it.

On every rank these keys are the end of the key interval without a window: its lower end rises to the first
key that is near enough. The tokens of a row on a rank lie in document order under every layout, so that key
is found by bisection.

Legend: R rows on this rank, T tokens of a row on it, N = R * T.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32

from jaxthd.packing.intervals import KeyIntervals, key_intervals
from jaxthd.packing.prefixes import Prefixes


class Windowed(NamedTuple):
    """What Segments.local, Segments.remote and the two fields of Prefixes become in a window.

    prefix_local, prefix_remote: None and () where no segment continues another.
    """

    local: KeyIntervals
    remote: tuple[KeyIntervals, ...]
    prefix_local: KeyIntervals | None
    prefix_remote: tuple[KeyIntervals, ...]


def make_windowed(
    window: int,
    local: KeyIntervals,
    remote: tuple[KeyIntervals, ...],
    prefixes: Prefixes | None,
    positions_RT: Int32[Array, "R T"],
    index_of: Callable[[Array | int], Int32[Array, "R T"]],
    ranks: list[Array | int],
    block: int,
) -> Windowed:
    """local, remote, prefixes, positions: of Segments. index_of: (context rank) -> the index in its row of
    each token of a row there, rising but in padding. ranks: this one, then those of `remote`.
    """
    index = [index_of(rank) for rank in ranks]
    nearest_RT, rising = index[0] - (window - 1), [_rising(x) for x in index]

    def raised(intervals: KeyIntervals, index_RT: Array, wanted_RT: Array) -> KeyIntervals:
        slot_RT = jax.vmap(jnp.searchsorted)(index_RT, wanted_RT).astype(jnp.int32)
        row_R1 = index_RT.shape[1] * jnp.arange(len(index_RT), dtype=jnp.int32)[:, None]
        return key_intervals(jnp.maximum(intervals.lo, (row_R1 + slot_RT).reshape(-1)), intervals.hi, block)

    own = [raised(x, i, nearest_RT) for x, i in zip((local, *remote), rising, strict=True)]
    if prefixes is None:
        return Windowed(own[0], tuple(own[1:]), None, ())
    # As if the segment's tokens followed the prefix's last one.
    last_RT = prefixes.last.reshape(-1)[jnp.maximum(prefixes.of_token, 0)].reshape(positions_RT.shape)
    nearest_RT = last_RT + 1 + positions_RT - (window - 1)
    keys = (prefixes.local, *prefixes.remote)
    before = [raised(x, i, nearest_RT) for x, i in zip(keys, rising, strict=True)]
    return Windowed(own[0], tuple(own[1:]), before[0], tuple(before[1:]))


def _rising(index_RT: Array) -> Array:
    """Padding, whose index is not less than any token's, takes the index of the token after it."""
    return jax.lax.cummin(index_RT, axis=1, reverse=True)
