"""State passing: how the state of the Mamba2 scan crosses context ranks.

Each rank scans its two context chunks of a row from a zero state. What a context chunk does to the state that
enters it is an affine map, told by its total decay and its final state. The ranks exchange these maps and
compose them, and each gets the true state that enters each of its chunks. The traffic is 2 * context maps a
row; it does not depend on the number of tokens.

Legend: R rows, Z context chunks on this rank (2 R), G groups, h heads of a group, S state dim, P head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.packing.segments import Segments

GATHER_UP_TO = 8
"""Largest context size whose states are all-gathered; beyond it they travel in log2(context) steps."""


class StateMap(NamedTuple):
    """What consecutive tokens do to the state that enters them: state -> decay state + added."""

    decay: Float[Array, "*chunks G h"]
    added: Float[Array, "*chunks G S h P"]


def initial_states(
    decay_ZGh: Float[Array, "Z G h"], state_ZGShP: Float[Array, "Z G S h P"], segments: Segments
) -> Float[Array, "Z G S h P"]:
    """The state that enters each of this rank's context chunks, from the (total decay, final state) of every
    one.

    These are maps of the state. They compose as (d1, s1) then (d2, s2) = (d1 d2, s1 d2 + s2), and what enters
    a chunk is an exclusive prefix over the 2 * context chunks of its row. All-gather up to GATHER_UP_TO
    ranks, or where not all ranks run this program; else log2 steps.
    """
    decay, state = (x.reshape(segments.rows, 2, *x.shape[1:]) for x in (decay_ZGh, state_ZGShP))
    gathers = segments.context <= GATHER_UP_TO or not segments.uniform_program
    prefix = _prefix_gathered if gathers else _prefix_in_steps
    return prefix(decay, state, segments).reshape(state_ZGShP.shape)


def then(first: StateMap, second: StateMap) -> StateMap:
    """The map of both: first the first, then the second."""
    return StateMap(first.decay * second.decay, faded(first.added, second.decay) + second.added)


def _prefix_gathered(decay_R2Gh: Array, state_R2GShP: Array, segments: Segments) -> Array:
    everything = (jax.lax.all_gather(x, segments.axis, axis=0) for x in (decay_R2Gh, state_R2GShP))
    # In the chunks' order: first chunks of ranks 0, 1, ..., then second chunks of ranks ..., 1, 0.
    maps = StateMap(*(jnp.concatenate([x[:, :, 0], x[::-1, :, 1]]) for x in everything))

    def step(state: Array, of_chunk: StateMap) -> tuple[Array, Array]:
        return faded(state, of_chunk.decay) + of_chunk.added, state

    _, before = jax.lax.scan(step, jnp.zeros_like(state_R2GShP[:, 0]), maps)
    first, second = segments.swap.chunks(jax.lax.axis_index(segments.axis))
    return jnp.stack([before[first], before[second]], axis=1)


def _prefix_in_steps(decay_R2Gh: Array, state_R2GShP: Array, segments: Segments) -> Array:
    """Hillis-Steele prefixes: over first chunks up the ranks, over second chunks down."""
    context, axis, swap = segments.context, segments.axis, segments.swap
    rank = jax.lax.axis_index(axis)

    def shifted(maps: StateMap, half: int, distance: int) -> StateMap:
        """Those `distance` chunks before, of the same half (0: first chunks, 1: second); the identity where
        there is none.
        """
        moves, source = swap.moves(half, distance), swap.before(rank, distance)[half]
        decay, added = (jax.lax.ppermute(x, axis, moves) for x in maps)
        return StateMap(jnp.where((source >= 0) & (source < context), decay, 1), added)

    firsts, seconds = (StateMap(decay_R2Gh[:, half], state_R2GShP[:, half]) for half in (0, 1))
    distance = 1
    while distance < context:
        firsts = then(shifted(firsts, 0, distance), firsts)
        seconds = then(shifted(seconds, 1, distance), seconds)
        distance *= 2
    # The last rank's covers all first chunks; every rank's second chunk comes after them.
    is_last = rank == context - 1
    all_firsts = StateMap(*(jax.lax.psum(jnp.where(is_last, x, 0), axis) for x in firsts))
    before_second = then(all_firsts, shifted(seconds, 1, 1)).added
    return jnp.stack([shifted(firsts, 0, 1).added, before_second], axis=1)


def faded(state: Array, decay: Array) -> Array:
    """[..., S, h, P] times [..., h]."""
    return state * decay[..., None, :, None]
