"""Sliding windows: the keys that a token sees if it sees only `window` tokens, itself and those before it.

On every rank these keys are the end of the key interval without a window: its lower end rises to the first
key that is near enough. The tokens of a row on a rank lie in document order under every layout, so that key
is found by bisection.

Legend: R rows on this rank, T tokens of a row on it, N = R * T.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int32

from jaxthd.packing.intervals import KeyIntervals, key_intervals
from jaxthd.packing.prefixes import Prefixes


class Windowed(NamedTuple):
    """Counterparts in a window of Segments.local, Segments.remote and the two fields of Prefixes.

    prefix_local, prefix_remote: None where no segment continues another.
    """

    local: KeyIntervals
    remote: KeyIntervals | None
    prefix_local: KeyIntervals | None
    prefix_remote: KeyIntervals | None


def make_windowed(
    window: int,
    local: KeyIntervals,
    remote: KeyIntervals | None,
    prefixes: Prefixes | None,
    positions_RT: Int32[Array, "R T"],
    index_of: Callable[[Array | int], Int32[Array, "R T"]],
    ranks: tuple[Array | int, Int32[Array | np.ndarray, " steps"]],
    block: int,
) -> Windowed:
    """local, remote, prefixes, positions: of Segments. index_of: (context rank) -> the index in its row of
    each token of a row there, rising but in padding. ranks: this one, and those of `remote`.
    """
    rank, sources = ranks

    def raised(
        local: KeyIntervals, remote: KeyIntervals | None, wanted_RT: Array
    ) -> tuple[KeyIntervals, KeyIntervals | None]:
        def of_rank(intervals: KeyIntervals, rank: Any) -> KeyIntervals:
            index_RT = _rising(index_of(rank))
            slot_RT = jax.vmap(jnp.searchsorted)(index_RT, wanted_RT).astype(jnp.int32)
            row_R1 = index_RT.shape[1] * jnp.arange(len(index_RT), dtype=jnp.int32)[:, None]
            lo_N = jnp.maximum(intervals.lo, (row_R1 + slot_RT).reshape(-1))
            return key_intervals(lo_N, intervals.hi, block)

        return of_rank(local, rank), None if remote is None else jax.vmap(of_rank)(remote, sources)

    own = raised(local, remote, index_of(rank) - (window - 1))
    if prefixes is None:
        return Windowed(*own, None, None)
    # As if the segment's tokens followed the prefix's last one.
    last_RT = prefixes.last.reshape(-1)[jnp.maximum(prefixes.of_token, 0)].reshape(positions_RT.shape)
    nearest_RT = last_RT + 1 + positions_RT - (window - 1)
    return Windowed(*own, *raised(prefixes.local, prefixes.remote, nearest_RT))


def _rising(index_RT: Array) -> Array:
    """Padding, whose index is not less than any token's, takes the index of the token after it."""
    return jax.lax.cummin(index_RT, axis=1, reverse=True)
