"""Supervised fine-tuning: cross-entropy over the supervised tokens.

An objective is a function of (per-token log-probabilities, weights, segment ids), so that all objectives
share everything else. It returns this rank's sum; the step divides by the count over the whole batch.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


def count(weights_N: Float[Array, " N"], segment_ids_N: Int32[Array, " N"]) -> Float[Array, ""]:
    """What this rank adds to the objective's denominator: its supervised tokens."""
    return weights_N.sum()


def loss_sum(
    logp_N: Float[Array, " N"], weights_N: Float[Array, " N"], segment_ids_N: Int32[Array, " N"]
) -> Float[Array, ""]:
    """What this rank adds to the objective's numerator: negative log-likelihood, natural log.

    logp_N: log-probability of each position's target.
    """
    return -jnp.sum(weights_N.astype(logp_N.dtype) * logp_N)
