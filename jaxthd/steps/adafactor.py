"""Adafactor's updates (Shazeer and Stern, Adafactor, 2018), by optax, of each parameter by itself.

Parameters of layers and experts are stacked into one array. Adafactor's means run over one parameter: its
rows, its columns, all of it. So every index of a stack is updated alone, as if it were no stack, and the rows
that pad a pipeline's stages enter no mean.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import FactoredState

Tree = Any


def scale_by_adafactor(
    decay_rate: float, clipping_threshold: float, min_dim: int, stacked: Tree, *, relative: bool
) -> optax.GradientTransformation:
    """Gradients divided by factored root mean squares, clipped to a root mean square of clipping_threshold.

    min_dim: the least size of both dims of a matrix whose second moments are factored. relative: times the
    parameter's own root mean square, 0.001 at least. stacked: the number of leading dims of each parameter
    that stack parameters.
    """
    moments = optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_dim)
    after = [optax.clip_by_block_rms(clipping_threshold)]
    if relative:
        after.append(optax.scale_by_param_block_rms())
    rest = optax.chain(*after)
    axes = FactoredState(None, 0, 0, 0)

    def alone(function: Callable[..., Any], number: int, in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        for _ in range(number):
            function = jax.vmap(function, in_axes, out_axes)
        return function

    def init(params: Tree) -> FactoredState:
        found = jax.tree.map(lambda x, number: alone(moments.init, number, 0, axes)(x), params, stacked)
        return _transposed(jnp.zeros((), jnp.int32), found)

    def of_one(gradient: Any, state: FactoredState, param: Any) -> tuple[Any, FactoredState]:
        update, state = moments.update(gradient, state, param)
        return rest.update(update, rest.init(param), param)[0], state

    def update(gradients: Tree, state: FactoredState, params: Tree) -> tuple[Tree, FactoredState]:
        def of_leaf(number: int, gradient: Any, row: Any, column: Any, v: Any, param: Any) -> Any:
            run = alone(of_one, number, (0, axes, 0), (0, axes))
            return run(gradient, FactoredState(state.count, row, column, v), param)

        both = jax.tree.map(of_leaf, stacked, gradients, state.v_row, state.v_col, state.v, params)
        updates, found = (
            jax.tree.map(lambda x, i=i: x[i], both, is_leaf=lambda x: type(x) is tuple) for i in range(2)
        )
        return updates, _transposed(optax.safe_increment(state.count), found)

    return optax.GradientTransformation(init, update)


def _transposed(count: Any, by_parameter: Tree) -> FactoredState:
    """A state for all parameters, from a tree with a state for each."""

    def field(name: str) -> Tree:
        return jax.tree.map(
            lambda one: getattr(one, name), by_parameter, is_leaf=lambda x: isinstance(x, FactoredState)
        )

    return FactoredState(count, field("v_row"), field("v_col"), field("v"))
