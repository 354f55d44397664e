"""Supervised fine-tuning: cross-entropy over the supervised tokens."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.objectives.metric import VALIDATION, Curve, Metric, Panel
from jaxthd.objectives.objective import LOSS, Objective, Tokens


def negative_log_likelihood(logp_N: Float[Array, " N"], weights_N: Float[Array, " N"]) -> Float[Array, ""]:
    """The sum of -log p, natural log, over the supervised positions.

    logp_N: log-probability of each position's target.
    """
    return -jnp.sum(weights_N.astype(logp_N.dtype) * logp_N)


@dataclass(frozen=True)
class SFT(Objective):
    """Cross-entropy: the mean over all supervised tokens of the batch."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            LOSS,
            "nats a supervised token",
            "mean negative log-likelihood of the step's supervised tokens",
            text="{:.4f}",
            odd="If it does not fall in the first hundred steps, compare with configs/first_run.py; if it "
            "jumps, look at grad_norm and lower train.learning_rate.",
            shown="progress",
        ),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            "Loss",
            "nats a supervised token",
            (Curve(LOSS, "training"), Curve(f"{VALIDATION}loss", "validation")),
            "log",
        ),
    )

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Supervised tokens of this rank."""
        return {LOSS: tokens.weights.reshape(-1).sum()}

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Negative log-likelihood, summed over the tokens of this rank."""
        return {LOSS: negative_log_likelihood(log_probs_RT.reshape(-1), tokens.weights.reshape(-1))}
