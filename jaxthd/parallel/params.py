"""One description of a parameter: its variable in the module tree carries shape, dtype and mesh axes.

Modules are Flax NNX, built through `Init`; initialization, sharding, the parameter table and weight import
all read the variables it makes. Repeated blocks are stacked (`stack`) and scanned (`scan_stack`), so that
compile time and program size do not grow with the number of repeats.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]
"""For every dim of a parameter the mesh axis it may be cut over, or None."""

M = TypeVar("M", bound=nnx.Module)
V = TypeVar("V", bound=nnx.Variable)
Carry = TypeVar("Carry")


class Buffer(nnx.Variable):
    """State that no gradient trains: BatchNorm's running statistics, the router's correction bias."""


class Init:
    """Makes a module's parameters: one key stream and one dtype for all of them.

    dtype: of every parameter; float32 unless the run computes in float64.
    """

    def __init__(self, key: jax.Array, dtype: Any = jnp.float32) -> None:
        self._key = key
        self.dtype = dtype

    def next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key

    def normal(self, shape: tuple[int, ...], axes: Axes = (), std: float | None = None) -> nnx.Param:
        """A weight matrix whose second to last dim is its fan-in: normal, std 1 / sqrt(fan-in) by default."""
        std = 1 / math.sqrt(shape[-2]) if std is None else std
        return self._make(nnx.Param, std * jax.random.normal(self.next_key(), shape, self.dtype), axes, True)

    def zeros(self, shape: tuple[int, ...], axes: Axes = ()) -> nnx.Param:
        return self.param(jnp.zeros(shape), axes)

    def ones(self, shape: tuple[int, ...], axes: Axes = ()) -> nnx.Param:
        return self.param(jnp.ones(shape), axes)

    def param(self, value: jax.Array, axes: Axes = ()) -> nnx.Param:
        """A bias, a norm's weight or another parameter that weight decay leaves alone."""
        return self._make(nnx.Param, value, axes, False)

    def buffer(self, value: jax.Array, axes: Axes = ()) -> Buffer:
        return self._make(Buffer, value, axes, False)

    def _make(self, kind: type[V], value: jax.Array, axes: Axes, decayed: bool) -> V:
        return kind(value.astype(self.dtype), axes=axes or (None,) * value.ndim, decayed=decayed)


def stack(make: Callable[[Init], M], init: Init, repeats: int) -> M:
    """`repeats` modules as one: every variable gets a leading dim, initialized from keys of its own."""

    def state(key: jax.Array) -> Any:
        return nnx.state(make(Init(key, init.dtype)))

    abstract = nnx.eval_shape(lambda: make(Init(jax.random.key(0), init.dtype)))
    stacked = jax.vmap(state)(jax.random.split(init.next_key(), repeats))
    for _, variable in nnx.to_flat_state(stacked):
        variable.set_metadata(axes=(None, *variable.get_metadata("axes")))
    return nnx.merge(nnx.graphdef(abstract), stacked)


def scan_stack(
    module: M,
    body: Callable[..., tuple[Carry, Any]],
    carry: Carry,
    *,
    remat: bool,
    each: tuple[Any, ...] = (),
) -> tuple[Carry, Any]:
    """Applies `body(layer, carry, *each_of_the_layer)` for every layer of a stack, first to last.

    remat: recompute a layer's activations in the backward pass; only the carry between layers is kept.
    each: trees of arrays with a leading dim of layers.
    Returns the last carry and the layers' second results, stacked.
    """
    graphdef, state = nnx.split(module)

    def step(carry: Carry, of_layer: tuple[Any, ...]) -> tuple[Carry, Any]:
        layer, *others = of_layer
        return body(nnx.merge(graphdef, layer), carry, *others)

    return jax.lax.scan(jax.checkpoint(step) if remat else step, carry, (state, *each))


def weight_decay_mask(state: Any) -> Any:
    """A nested dict of bools: weight decay applies to what Init.normal made, the weight matrices."""
    mask = jax.tree.map(
        lambda v: v.get_metadata("decayed"), state, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    return nnx.to_pure_dict(mask)
