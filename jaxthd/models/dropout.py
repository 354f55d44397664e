"""Dropout inside a layer: the draws of the tokens and the layer's number reach its projections.

They are held while a stage is traced (`drawing`), because mixers hand features to projections, not tokens.
Without a `drawing`, as in validation and decoding, nothing is dropped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float, UInt32

from jaxthd.ops import dropout
from jaxthd.parallel.mesh import TENSOR


class Draws(NamedTuple):
    """keys: for each token (ops/dropout.py), [N]. layer: the number of the layer among those of its kind."""

    keys: UInt32[Array, " N"]
    layer: Array | int = 0


_DRAWS: ContextVar[Draws | None] = ContextVar("draws", default=None)


def current() -> Draws | None:
    """The key of the draws; None where nothing is dropped."""
    return _DRAWS.get()


@contextmanager
def drawing(draws: Draws | None) -> Iterator[None]:
    """The projections that are called inside drop features by these draws; None: they drop none."""
    token = _DRAWS.set(draws)
    try:
        yield
    finally:
        _DRAWS.reset(token)


@contextmanager
def of_layer(number: Array | None) -> Iterator[None]:
    """Draws for the layer with this number. None: nothing changes."""
    draws = current()
    with drawing(draws if draws is None or number is None else draws._replace(layer=number)):
        yield


@contextmanager
def of_all_ranks(axis: str | None) -> Iterator[None]:
    """Draws for the tokens of all ranks of an axis, one rank after the other."""
    draws = current()
    if draws is not None:
        draws = draws._replace(keys=jax.lax.all_gather(draws.keys, axis).reshape(-1))
    with drawing(draws):
        yield


def dropped(x_ND: Float[Array, "N D"], rate: float, projection: int, *, sharded: bool) -> Float[Array, "N D"]:
    """x as it is, or with dropout where something is drawn.

    projection: its number, unlike others'. sharded: x has this tensor rank's features.
    """
    draws = current()
    if draws is None:
        return x_ND
    keys_N = dropout.spread(draws.keys, dropout.spread(projection, draws.layer))
    first = jax.lax.axis_index(TENSOR) * x_ND.shape[1] if sharded else 0
    return dropout.dropped(x_ND, keys_N, rate, first)
