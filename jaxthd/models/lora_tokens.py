"""The tokens that low-rank matrices (LoRA) are given: what dropout draws for them, whether they are adapted.

Both are held while a stage is traced (`drawing`, `adapting`), because mixers hand features to projections,
not tokens. Without a `drawing`, as in validation and decoding, nothing is dropped; without an `adapting` the
matrices are on everywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, UInt32

from jaxthd.ops import dropout
from jaxthd.parallel.mesh import TENSOR


class Draws(NamedTuple):
    """keys: for each token (ops/dropout.py), [N]. layer: the number of the layer among those of its kind."""

    keys: UInt32[Array, " N"]
    layer: Array | int = 0


class _Held(NamedTuple):
    """draws: None where nothing is dropped. adapted: the tokens that the matrices are on for; None: all."""

    draws: Draws | None = None
    adapted: Bool[Array, " N"] | None = None


_HELD: ContextVar[_Held] = ContextVar("held", default=_Held())  # noqa: B039 (nobody changes it)


@contextmanager
def _holding(held: _Held) -> Iterator[None]:
    token = _HELD.set(held)
    try:
        yield
    finally:
        _HELD.reset(token)


def current() -> Draws | None:
    """The key of the draws; None where nothing is dropped."""
    return _HELD.get().draws


@contextmanager
def drawing(draws: Draws | None) -> Iterator[None]:
    """The projections that are called inside drop features by these draws; None: they drop none."""
    with _holding(_HELD.get()._replace(draws=draws)):
        yield


@contextmanager
def adapting(adapted_N: Bool[Array, " N"] | None) -> Iterator[None]:
    """The low-rank matrices of the projections that are called inside are on for these tokens alone; None:
    for all."""
    with _holding(_HELD.get()._replace(adapted=adapted_N)):
        yield


@contextmanager
def of_layer(number: Array | None) -> Iterator[None]:
    """Draws for the layer with this number. None: nothing changes."""
    draws = current()
    with drawing(draws if draws is None or number is None else draws._replace(layer=number)):
        yield


@contextmanager
def of_all_ranks(axis: str | None) -> Iterator[None]:
    """Draws, and what is adapted, for the tokens of all ranks of an axis, one rank after the other."""

    def gathered(x_N: Array) -> Array:
        """The values of all ranks' tokens."""
        return jax.lax.all_gather(x_N, axis).reshape(-1)

    draws, adapted_N = _HELD.get()
    draws = draws and draws._replace(keys=gathered(draws.keys))
    with _holding(_Held(draws, None if adapted_N is None else gathered(adapted_N))):
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


def is_on_everywhere() -> bool:
    """Whether low-rank matrices are on for all tokens."""
    return _HELD.get().adapted is None


def where_adapted(adapted_NF: Float[Array, "N F"], plain_NF: Float[Array, "N F"]) -> Float[Array, "N F"]:
    """The first where low-rank matrices are on, the second elsewhere."""
    adapted_N = _HELD.get().adapted
    return adapted_NF if adapted_N is None else jnp.where(adapted_N[:, None], adapted_NF, plain_NF)
