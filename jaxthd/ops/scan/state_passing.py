"""State passing: how the state of a recurrent mixer crosses context ranks.

Each rank scans its two context chunks of a row from a zero state. What a context chunk does to the state that
enters it is an affine map, state -> A state + B. The ranks exchange these maps and compose them, and each
gets the true state that enters each of its chunks. The traffic is 2 * context maps a row; it does not depend
on the number of tokens.

A mixer brings its kind of map, a NamedTuple of arrays with the methods of StateMap. Mamba2's A is a number a
head (DecayMap), the gated delta rule's a matrix a head (MatrixMap). A is 0 where a document begins in the
chunk, and the identity where the chunk has no token of the state's.

Legend: R rows, Z context chunks on this rank (2 R). Of a DecayMap: G groups, h heads of a group, S state dim,
P head dim. Of a MatrixMap: K key dim, V value dim.
"""

from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.segments import Segments

GATHER_UP_TO = 8
"""Largest context size whose states are all-gathered; beyond it they travel in log2(context) steps."""


M = TypeVar("M", bound="StateMap")


@runtime_checkable
class StateMap(Protocol):
    """Map that consecutive tokens apply to the state that enters them: state -> A state + added.

    A NamedTuple of arrays, all with the same leading dims.
    """

    @property
    def added(self) -> Array:
        """Image of a zero state; the shape and dtype of a state."""
        ...

    def on(self, state: Array) -> Array:
        """The state after these tokens."""
        ...

    def then(self: M, second: M) -> M:
        """The map of both: first this one, then the second."""
        ...

    def where(self: M, exists: Array) -> M:
        """This map if `exists`, a bool, else the identity; `added` is 0 there already."""
        ...


class DecayMap(NamedTuple):
    """state -> decay state + added, of Mamba2."""

    decay: Float[Array, "*chunks G h"]
    added: Float[Array, "*chunks G S h P"]

    def on(self, state: Array) -> Array:
        return faded(state, self.decay) + self.added

    def then(self, second: "DecayMap") -> "DecayMap":
        return DecayMap(self.decay * second.decay, faded(self.added, second.decay) + second.added)

    def where(self, exists: Array) -> "DecayMap":
        return self._replace(decay=jnp.where(exists, self.decay, 1))


class MatrixMap(NamedTuple):
    """state -> factor @ state + added, of the gated delta rule. Products are of full precision."""

    factor: Float[Array, "*chunks K K"]
    added: Float[Array, "*chunks K V"]

    def on(self, state: Array) -> Array:
        return _exact(self.factor, state) + self.added

    def then(self, second: "MatrixMap") -> "MatrixMap":
        return MatrixMap(_exact(second.factor, self.factor), second.on(self.added))

    def where(self, exists: Array) -> "MatrixMap":
        identity = jnp.eye(self.factor.shape[-1], dtype=self.factor.dtype)
        return self._replace(factor=jnp.where(exists, self.factor, identity))


def initial_states(total: M, segments: Segments) -> Array:
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

    def everywhere(x_R2: Array) -> Array:
        """In the chunks' order: first chunks of ranks 0, 1, ..., then second chunks of ranks ..., 1, 0."""
        x = jax.lax.all_gather(x_R2, segments.axis, axis=0)
        return jnp.concatenate([x[:, :, 0], x[::-1, :, 1]])

    def step(state: Array, of_chunk: StateMap) -> tuple[Array, Array]:
        return of_chunk.on(state), state

    in_order = jax.tree.map(everywhere, maps)
    # Written out: a loop of so few small steps would be driven by the host on GPUs.
    _, before = jax.lax.scan(step, jnp.zeros_like(maps.added[:, 0]), in_order, unroll=True)
    first, second = segments.swap.chunks(jax.lax.axis_index(segments.axis))
    return jnp.stack([before[first], before[second]], axis=1)


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


def faded(state: Array, decay: Array) -> Array:
    """[..., S, h, P] times [..., h]."""
    return state * decay[..., None, :, None]


def _exact(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulation_dtype(a))
