"""Norms equal their definitions, and their gradients those that autodiff finds of the definitions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.norms import gated_rms_norm, layer_norm, rms_norm, scaled_deviations, squared_deviations
from tests.errors import relative_errors

EPS = 0.01


def rms(x: jax.Array) -> jax.Array:
    return jnp.concatenate([g / jnp.sqrt((g * g).sum() / len(g) + EPS) for g in jnp.split(x, 3)])


def by_hand_rms(x_NI: jax.Array, w_I: jax.Array) -> jax.Array:
    return jnp.stack([rms(x) * w_I for x in x_NI])


def by_hand_gated(y_NI: jax.Array, z_NI: jax.Array, w_I: jax.Array) -> jax.Array:
    return jnp.stack([rms(y * z / (1 + jnp.exp(-z))) * w_I for y, z in zip(y_NI, z_NI, strict=True)])


def by_hand_layer(x_NI: jax.Array, w_I: jax.Array, bias_I: jax.Array) -> jax.Array:
    return jnp.stack([(x - x.mean()) / jnp.sqrt(x.var() + EPS) * w_I + bias_I for x in x_NI])


NORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, int]] = {
    "rms": (partial(rms_norm, 3, EPS), by_hand_rms, 1, 1),
    "gated": (partial(gated_rms_norm, 3, EPS), by_hand_gated, 2, 1),
    "layer": (partial(layer_norm, EPS), by_hand_layer, 1, 2),
}
"""(norm, definition, arguments of activations, of weights)."""


@pytest.mark.parametrize("name", NORMS)
def test_outputs_and_gradients_in_float64(name: str) -> None:
    norm, definition, activations, weights = NORMS[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        given = [jnp.asarray(2 + rng.normal(size=(7, 12))) for _ in range(activations)]
        given += [jnp.asarray(rng.normal(size=12)) for _ in range(weights)]
        dout = jnp.asarray(rng.normal(size=(7, 12)))
        got, back = jax.vjp(jax.jit(norm), *given)
        want, want_back = jax.vjp(jax.jit(definition), *given)
        errors = relative_errors((got, back(dout)), (want, want_back(dout)))
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("name", NORMS)
def test_sums_are_in_float32(name: str) -> None:
    """Results in bfloat16 are those of float32, rounded once; weights have gradients in float32."""
    norm, _, activations, weights = NORMS[name]
    rng = np.random.default_rng(1)
    dout, *given = [jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(1 + activations, 64, 96))]
    given += [jnp.asarray(rng.normal(size=96), jnp.float32) for _ in range(weights)]
    wide = [x.astype(jnp.float32) for x in given]
    got, back = jax.vjp(norm, *given)
    want, want_back = jax.vjp(norm, *wide)
    found, wanted = (got, *back(dout)), (want, *want_back(dout.astype(jnp.float32)))
    assert [x.dtype for x in found[1:]] == [x.dtype for x in given]
    for a, b in zip(found, wanted, strict=True):
        bound = 2**-8 if a.dtype == jnp.bfloat16 else 1e-6
        assert jnp.abs(a.astype(jnp.float32) - b).max() <= bound * jnp.abs(b).max()


def test_deviations_from_the_batch_mean() -> None:
    """Both together, as BatchNorm takes them; padding enters no sum, but has a result."""
    rng = np.random.default_rng(2)
    valid_N1 = jnp.arange(9)[:, None] < 6

    def norm(x_NI: jax.Array, w_I: jax.Array, bias_I: jax.Array) -> jax.Array:
        mean_I = jnp.where(valid_N1, x_NI, 0).sum(0) / 6
        variance_I = squared_deviations(x_NI, valid_N1, mean_I) / 6
        return scaled_deviations(x_NI, mean_I, w_I / jnp.sqrt(variance_I + EPS), bias_I)

    def by_hand(x_NI: jax.Array, w_I: jax.Array, bias_I: jax.Array) -> jax.Array:
        return (x_NI - x_NI[:6].mean(0)) / jnp.sqrt(x_NI[:6].var(0) + EPS) * w_I + bias_I

    with jax.enable_x64(True):
        given = [jnp.asarray(3 * rng.normal(size=shape)) for shape in ((9, 4), 4, 4)]
        dout = jnp.asarray(rng.normal(size=(9, 4)))
        got, back = jax.vjp(jax.jit(norm), *given)
        want, want_back = jax.vjp(jax.jit(by_hand), *given)
        errors = relative_errors((got, back(dout)), (want, want_back(dout)))
        assert max(errors.values()) < 1e-12, errors
