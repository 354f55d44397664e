"""Exchange of keys and values between context ranks: passed around, or all gathered before.

Either way the ranks are one loop over what the queries see of each (Segments.keys), so a program does not
grow with them.

Legend: N queries and keys of a rank, C context ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from jaxthd.ops.attention.backends import BACKENDS, for_any_intervals
from jaxthd.ops.attention.contract import AttentionBackend, Call
from jaxthd.packing.intervals import KeyIntervals, ring_sources
from jaxthd.packing.segments import Segments

Pair = tuple[Array, Array]
"""Keys and values, or their gradients."""


class Part(NamedTuple):
    """A call, and the back-end that computes it."""

    backend: AttentionBackend
    call: Call


def local_parts(segments: Segments, backend: str) -> list[Part]:
    """The attention to compute with this rank's keys."""
    keys, prefixes = segments.keys, segments.prefixes
    documents = segments.documents and segments.rows * segments.documents
    alone = keys.remote is None and prefixes is None
    local = Part(BACKENDS[backend], Call(keys.local, True, segments.block, documents, alone))
    return [local, *_prefix_parts(prefixes and prefixes.keys.local, segments, backend)]


def send(pair: Pair, segments: Segments) -> Pair:
    """Sends the pair to the next rank of the ring."""
    ring = [(r, (r + 1) % segments.context) for r in range(segments.context)]
    first, second = (jax.lax.ppermute(x, segments.axis, ring) for x in pair)
    return first, second


def around(
    visit: Callable[[Any, Pair, list[Part]], Any],
    state: Any,
    arriving: Pair,
    segments: Segments,
    backend: str,
) -> Any:
    """Visits the keys and values of each other rank as they arrive. Returns the state after the last visit.

    visit: takes (state, keys and values, what to compute of them). arriving: those of step 1. They are sent
    on before they are visited, so that the next ones travel meanwhile. All steps but the last are one loop:
    the program does not grow with the ranks.
    """
    keys = _remote_keys(segments)

    def turn(carry: tuple[Pair, Any], keys: _Keys) -> tuple[Pair, Any]:
        """Sends the pair on, then visits it."""
        pair, state = carry
        following = send(pair, segments)
        return following, visit(state, pair, _remote_parts(keys, segments, backend))

    pair, state = _loop(turn, (arriving, state), jax.tree.map(lambda x: x[:-1], keys))
    last: _Keys = jax.tree.map(lambda x: x[-1], keys)
    return visit(state, pair, _remote_parts(last, segments, backend))


def over_ranks(
    visit: Callable[[Any, Array, list[Part]], Any], state: Any, segments: Segments, backend: str
) -> Any:
    """Visits the keys and values of each other rank, which are all here. Returns the state after the last.

    visit: takes (state, rank, what to compute of its keys).
    """
    sources = ring_sources(jax.lax.axis_index(segments.axis), segments.context)

    def turn(state: Any, given: tuple[Array, _Keys]) -> Any:
        """Visits the keys of one other rank."""
        source, keys = given
        return visit(state, source, _remote_parts(keys, segments, backend))

    return _loop(turn, state, (sources, _remote_keys(segments)))


_Keys = tuple[KeyIntervals, KeyIntervals | None]
"""The keys of a rank that the queries see: of their documents; and of the prefixes, if there are any. Of
several ring steps: arrays with a first dim of steps."""


def _remote_parts(keys: _Keys, segments: Segments, backend: str) -> list[Part]:
    """The attention to compute with another rank's keys."""
    own, prefix = keys
    documents = segments.documents and segments.rows * segments.documents
    rectangles = segments.rows if segments.layout == "buffer" else documents
    call = Call(own, False, segments.block, documents and rectangles)
    return [Part(BACKENDS[backend], call), *_prefix_parts(prefix, segments, backend)]


def _prefix_parts(prefix: KeyIntervals | None, segments: Segments, backend: str) -> list[Part]:
    if prefix is None:
        return []
    return [Part(for_any_intervals(backend), Call(prefix, False, segments.block, None))]


def _remote_keys(segments: Segments) -> _Keys:
    """Keys of all ring steps but the local one."""
    assert segments.keys.remote is not None
    return segments.keys.remote, segments.prefixes and segments.prefixes.keys.remote


def _loop(body: Callable[[Any, Any], Any], carry: Any, xs: Any) -> Any:
    """carry after body(carry, x) for each x. One loop, unless there is one x at most."""
    length = len(jax.tree.leaves(xs)[0])
    return jax.lax.scan(lambda carry, x: (body(carry, x), None), carry, xs, unroll=length < 2)[0]
