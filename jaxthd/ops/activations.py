"""Activations and gates whose backward passes keep nothing but their inputs.

Autodiff also keeps sigmoids and masks, where nothing but gathered weights is computed again.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.numerics import accumulation_dtype

Elementwise = Callable[..., Float[Array, "*shape"]]


def from_inputs(compute: Elementwise) -> Elementwise:
    """compute, whose gradients are computed from its inputs, in promote(float32, their dtype).

    Without the barrier XLA writes the gradients of a gate's inputs in two kernels, each of which reads both:
    it joins kernels that read the same array, but not where a matrix product made that. A barrier before the
    inputs too would part the gradients from the result, where that is computed again.
    """

    def backward(inputs: tuple[Array, ...], dout: Array) -> tuple[Array, ...]:
        """Computes the gradients of the inputs again, from the inputs alone."""
        dout = jax.lax.optimization_barrier(dout)
        acc = accumulation_dtype(dout)
        _, gradients_of = jax.vjp(compute, *(x.astype(acc) for x in inputs))
        return tuple(d.astype(x.dtype) for d, x in zip(gradients_of(dout.astype(acc)), inputs, strict=True))

    found = jax.custom_vjp(compute)
    found.defvjp(lambda *inputs: (found(*inputs), inputs), backward)
    return found


@jax.custom_vjp
def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(x, 0)^2 (So et al., Primer, 2021)."""
    return jnp.square(jax.nn.relu(x))


relu_squared.defvjp(
    lambda x: (relu_squared(x), x), lambda x, dout: ((2 * dout * jax.nn.relu(x)).astype(x.dtype),)
)


@jax.custom_vjp
def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x sigmoid(x).

    It ends with a division. XLA on CPUs repeats a product in each loop that reads it, with all that it was
    made of, such as a convolution; a division it writes to memory.
    """
    return x / (1 + jnp.exp(-x))


def silu_slope(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The derivative of silu, by sigmoids, which are finite where exp(-x) is not."""
    gate = jax.nn.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _silu_backward(x: Array, dout: Array) -> tuple[Array]:
    acc = accumulation_dtype(dout)
    return ((dout.astype(acc) * silu_slope(x.astype(acc))).astype(x.dtype),)


silu.defvjp(lambda x: (silu(x), x), _silu_backward)


@from_inputs
def silu_gated(x: Float[Array, "*shape"], gate: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x silu(gate)."""
    return silu(gate) * x


@from_inputs
def glu(x: Float[Array, "*shape twice_F"]) -> Float[Array, "*shape F"]:
    """The first half of the features times the sigmoid of the second (Dauphin et al., 2017)."""
    value, gate = jnp.split(x, 2, axis=-1)
    return value * jax.nn.sigmoid(gate)
