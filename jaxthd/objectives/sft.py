"""Supervised fine-tuning: cross-entropy over the supervised tokens."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.objectives.objective import LOSS, Objective, Tokens


def negative_log_likelihood(logp_N: Float[Array, " N"], weights_N: Float[Array, " N"]) -> Float[Array, ""]:
    """The sum of -log p, natural log, over the supervised positions.

    logp_N: log-probability of each position's target.
    """
    return -jnp.sum(weights_N.astype(logp_N.dtype) * logp_N)


@dataclass(frozen=True)
class SFT(Objective):
    """Cross-entropy: the mean over all supervised tokens of the batch."""

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Supervised tokens of this rank."""
        return {LOSS: tokens.weights.reshape(-1).sum()}

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Negative log-likelihood, summed over the tokens of this rank."""
        return {LOSS: negative_log_likelihood(log_probs_RT.reshape(-1), tokens.weights.reshape(-1))}
