"""Activations equal their definitions, and their gradients those that autodiff finds of the definitions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.activations import glu, relu_squared, silu, silu_gated
from tests.errors import relative_errors


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


ACTIVATIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array], int]] = {
    "relu_squared": (relu_squared, lambda x: jnp.where(x > 0, x * x, 0), 1),
    "silu": (silu, lambda x: x * sigmoid(x), 1),
    "silu_gated": (silu_gated, lambda x, gate: x * gate * sigmoid(gate), 2),
    "glu": (glu, lambda x: x[:, :4] * sigmoid(x[:, 4:]), 1),
}
"""(activation, definition, arguments)."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_outputs_and_gradients_in_float64(name: str) -> None:
    activation, definition, arguments = ACTIVATIONS[name]
    with jax.enable_x64(True):
        dout, *given = jnp.asarray(2 * np.random.default_rng(0).normal(size=(1 + arguments, 5, 8)))
        got, back = jax.vjp(jax.jit(activation), *given)
        dout = dout[:, : got.shape[1]]
        want, want_back = jax.vjp(jax.jit(definition), *given)
        errors = relative_errors((got, back(dout)), (want, want_back(dout)))
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_backward_pass_keeps_the_inputs_alone(name: str) -> None:
    """Also where a policy of recomputation keeps all that the forward pass computes."""
    activation, _, arguments = ACTIVATIONS[name]
    x = jnp.ones((5, 8), jnp.bfloat16)
    kept = jax.checkpoint(activation, policy=jax.checkpoint_policies.everything_saveable)
    out, back = jax.vjp(kept, *[x] * arguments)
    assert len(jax.tree.leaves(back)) <= arguments + 1  # and the output, which takes no more memory
    assert all(leaf.dtype == x.dtype for leaf in back(out))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_silu_is_finite_where_an_exponential_is_not(dtype: str) -> None:
    x = jnp.asarray([-1000.0, -100.0, 0.0, 100.0, 1000.0], dtype)
    out, back = jax.vjp(jax.jit(silu), x)
    np.testing.assert_allclose(np.asarray(out, np.float32), [0, 0, 0, 100, 1000], atol=1e-30)
    np.testing.assert_allclose(
        np.asarray(back(jnp.ones_like(x))[0], np.float32), [0, 0, 0.5, 1, 1], atol=1e-30
    )
