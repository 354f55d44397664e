"""The inverse of unit lower triangular matrices, by products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.delta.unit_triangular import inverse_of_unit_lower
from tests.helpers import assert_same


@pytest.mark.parametrize("size", [1, 6, 16])
def test_it_equals_the_general_inverse_gradients_included(size):
    """What is on and above the diagonal has no effect."""
    rng = np.random.default_rng(size)
    lower, dinverse = rng.normal(size=(2, 3, size, size))

    want = np.linalg.inv(np.tril(lower, -1) + np.eye(size))
    dlower = np.tril(-want.swapaxes(1, 2) @ dinverse @ want.swapaxes(1, 2), -1)
    with jax.enable_x64(True):
        found, pull = jax.vjp(inverse_of_unit_lower, jnp.asarray(lower))
        assert_same((found, *pull(jnp.asarray(dinverse))), (want, dlower), 1e-10)


def test_in_float32_equal_keys_lose_no_digits():
    """Keys that are all alike and rates of 1: the inverse is 1 on the diagonal, -1 below it, 0 elsewhere; the
    powers of the matrix reach 1e18.
    """
    inverse = inverse_of_unit_lower(jnp.ones((64, 64), jnp.float32))
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))


def test_its_program_calls_no_solver():
    """A solver of jaxlib's can wait for ever on two cores."""
    text = jax.jit(jax.grad(lambda x: inverse_of_unit_lower(x).sum())).lower(jnp.eye(8)).as_text()
    assert "dot_general" in text
    assert "custom_call" not in text
