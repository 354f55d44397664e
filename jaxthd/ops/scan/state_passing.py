"""State passing: how the state of a recurrent mixer crosses context ranks.

Each rank scans its two context chunks of a row from a zero state. What a context chunk does to the state that
enters it is an affine map, state -> A state + B. The ranks exchange these maps and compose them, and each
gets the true state that enters each of its chunks. The traffic is 2 * context maps a row; it does not depend
on the number of tokens.

A mixer brings its kind of map, a NamedTuple of arrays with the methods of DecayMap. Mamba2's A is a number a
head (DecayMap), the gated delta rule's a matrix a head (MatrixMap). A is 0 where a document begins in the
chunk, and the identity where the chunk has no token of the state's.

Legend: R rows, Z context chunks on this rank (2 R). Of a DecayMap: G groups, h heads of a group, S state dim,
P head dim. Of a MatrixMap: K key dim, V value dim.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxthd.ops.numerics import exact_product
from jaxthd.packing.segments import Segments

GATHER_UP_TO = 8
"""Largest context size whose states are all-gathered; beyond it they travel in log2(context) steps."""


class DecayMap(NamedTuple):
    """Mamba2's map, which consecutive tokens apply to the state that enters them: decay state + added.

    added: the image of a zero state, with the shape and dtype of a state.
    """

    decay: Float[Array, "*chunks G h"]
    added: Float[Array, "*chunks G S h P"]

    def on(self, state: Array) -> Array:
        """The state after these tokens."""
        return faded(state, self.decay) + self.added

    def then(self, second: "DecayMap") -> "DecayMap":
        """The map of both: first this one, then the second."""
        return DecayMap(self.decay * second.decay, faded(self.added, second.decay) + second.added)

    def where(self, exists: Array) -> "DecayMap":
        """This map if `exists`, a bool, else the identity; `added` is 0 there already."""
        return self._replace(decay=jnp.where(exists, self.decay, 1))


StateMap = Any
"""A map of a mixer's kind: a NamedTuple of arrays with the same leading dims, `added` among them, and with
the methods of DecayMap."""


class MatrixMap(NamedTuple):
    """state -> factor @ state + added, of the gated delta rule. Products are of full precision."""

    factor: Float[Array, "*chunks K K"]
    added: Float[Array, "*chunks K V"]

    def on(self, state: Array) -> Array:
        """The state after these tokens."""
        return exact_product(self.factor, state) + self.added

    def then(self, second: "MatrixMap") -> "MatrixMap":
        """The map of both: first this one, then the second."""
        return MatrixMap(exact_product(second.factor, self.factor), second.on(self.added))

    def where(self, exists: Array) -> "MatrixMap":
        """This map if `exists`, a bool, else the identity; `added` is 0 there already."""
        identity = jnp.eye(self.factor.shape[-1], dtype=self.factor.dtype)
        return self._replace(factor=jnp.where(exists, self.factor, identity))


def initial_states(total: StateMap, segments: Segments) -> Array:
    """The state that enters each of this rank's context chunks, [Z, ...], shaped as total.added.

    total: the map of each of them, leaves [Z, ...]. What enters a chunk is an exclusive prefix of the maps of
    the row's 2 * context chunks, applied to 0. All-gather up to GATHER_UP_TO ranks, or where not all ranks
    run this program; else log2 steps.
    """
    by_row = jax.tree.map(lambda x: x.reshape(segments.rows, 2, *x.shape[1:]), total)
    gathers = segments.context <= GATHER_UP_TO or not segments.uniform_program
    prefix = _prefix_gathered if gathers else _prefix_in_steps
    return prefix(by_row, segments).reshape(total.added.shape)


def _prefix_gathered(maps: StateMap, segments: Segments) -> Array:
    """maps: leaves [R, 2, ...]. Returns the states before, [R, 2, ...]."""
    everywhere = jax.tree.map(lambda x: _in_order(jax.lax.all_gather(x, segments.axis, axis=0)), maps)
    before = _states_before(everywhere)
    first, second = segments.swap.chunks(jax.lax.axis_index(segments.axis))
    return jnp.stack([before[first], before[second]], axis=1)


def _in_order(x_CR2: Array) -> Array:
    """All context chunks in their order, [2 * C, R, ...], from each rank's two: first chunks of ranks 0, 1,
    ..., then second chunks of ranks ..., 1, 0.
    """
    return jnp.concatenate([x_CR2[:, :, 0], x_CR2[::-1, :, 1]])


def _states_before(maps: StateMap) -> Array:
    """The states before each of 2 * C context chunks, from their maps in that order, leaves [2 * C, ...]."""

    def step(state: Array, of_chunk: StateMap) -> tuple[Array, Array]:
        """(the state after a chunk, the one before it)."""
        return of_chunk.on(state), state

    # Written out: a loop of so few small steps would be driven by the host on GPUs.
    before: Array = jax.lax.scan(step, jnp.zeros_like(maps.added[0]), maps, unroll=True)[1]
    return before


def _prefix_in_steps(maps: StateMap, segments: Segments) -> Array:
    """Hillis-Steele prefixes: over first chunks up the ranks, over second chunks down."""
    context, axis, swap = segments.context, segments.axis, segments.swap
    rank = jax.lax.axis_index(axis)

    def shifted(maps: StateMap, half: int, distance: int) -> StateMap:
        """Those `distance` chunks before, of the same half (0: first chunks, 1: second); the identity where
        there is none.
        """
        moves, source = swap.moves(half, distance), swap.before(rank, distance)[half]
        moved = jax.tree.map(lambda x: jax.lax.ppermute(x, axis, moves), maps)
        return moved.where((source >= 0) & (source < context))

    firsts, seconds = (jax.tree.map(lambda x, half=half: x[:, half], maps) for half in (0, 1))
    distance = 1
    while distance < context:
        firsts = shifted(firsts, 0, distance).then(firsts)
        seconds = shifted(seconds, 1, distance).then(seconds)
        distance *= 2
    # The last rank's covers all first chunks; every rank's second chunk comes after them.
    is_last = rank == context - 1
    all_firsts = jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_last, x, 0), axis), firsts)
    before_second = all_firsts.then(shifted(seconds, 1, 1)).added
    return jnp.stack([shifted(firsts, 0, 1).added, before_second], axis=1)


def entering_states(maps: StateMap, segments: Segments) -> Array:
    """The state that enters each context chunk of split documents, under the layout "whole", [E, H, ...],
    shaped as maps.added.

    maps: what each of them does to a state, leaves [E, H, ...], by heads; `added` is 0 and the rest finite
    where there is no such chunk.

    Each rank gets the maps of all chunks for its part of the heads, finds the states before them, and sends
    these to the ranks of the chunks. A rank so receives less than two maps for each of its own, whatever the
    number of ranks, and holds as much as it has itself. An all-gather would give it every rank's, to compute
    the same from them everywhere.
    """
    context, axis, heads = segments.context, segments.axis, maps.added.shape[1]
    sizes = [math.prod(x.shape[2:]) for x in maps]
    # One array, so that there is one collective each way.
    given_EHF = jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in maps], axis=2)
    given_EHF = jnp.pad(given_EHF, [(0, 0), (0, -heads % context), (0, 0)])
    by_part = given_EHF.reshape(-1, 2, context, given_EHF.shape[1] // context, given_EHF.shape[2])
    of_part_ZDhF = _in_order(jax.lax.all_to_all(jnp.moveaxis(by_part, 2, 0), axis, 0, 0))
    parts = jnp.split(of_part_ZDhF, np.cumsum(sizes[:-1]).tolist(), axis=3)
    pairs = zip(parts, maps, strict=True)
    before = _states_before(type(maps)(*(part.reshape(*part.shape[:3], *x.shape[2:]) for part, x in pairs)))
    of_ranks = jnp.stack([before[:context], before[context:][::-1]], axis=2)
    entering = jnp.moveaxis(jax.lax.all_to_all(of_ranks, axis, 0, 0), 0, 2)
    return entering.reshape(len(given_EHF), -1, *maps.added.shape[2:])[:, :heads]


def gathered_chunks(x: Array, dim: int, segments: Segments) -> tuple[Array, tuple[Array, Array]]:
    """Gathers what all ranks have for their chunks of split documents, under the layout "whole".

    x: dim `dim` of it is that of a document's two chunks on a rank. Returns x without it, with a first dim of
    the document's 2 * ranks chunks, in their order; and which of these are this rank's two.
    """
    # An all-gather by all_to_all, at the same bytes. Simulated devices run what is in a loop or a conditional
    # beside what follows it, and take two collectives of one kind among the same ranks for one: FSDP gathers
    # and scatters weights over these ranks.
    everywhere = jax.lax.all_to_all(jnp.broadcast_to(x, (segments.context, *x.shape)), segments.axis, 0, 0)
    first, second = (jnp.take(everywhere, half, axis=1 + dim) for half in (0, 1))
    rank = jax.lax.axis_index(segments.axis)
    return jnp.concatenate([first, second[::-1]]), segments.swap.chunks(rank)


def faded(state: Array, decay: Array) -> Array:
    """[..., S, h, P] times [..., h]."""
    return state * decay[..., None, :, None]
