"""The one rule about precision that ops and models share."""

import jax.numpy as jnp
from jax import Array


def accumulation_dtype(x: Array) -> jnp.dtype:
    """Dtype of sums over values of x: promote(float32, x's dtype)."""
    return jnp.promote_types(jnp.float32, x.dtype)
