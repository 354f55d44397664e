"""Kahneman-Tversky optimization (Ethayarajh et al., 2024): a loss of single answers, desired or undesired.

Legend: R rows of a microbatch on this rank, T token slots of a row on this rank, D most segments of a row.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.files.options import check_number
from jaxthd.objectives.dpo import LOG_PROBS, PREFERENCE, REWARDS
from jaxthd.objectives.metric import LIKELIHOOD, VALIDATION, Curve, Metric, Panel
from jaxthd.objectives.objective import LOSS, OLD, REFERENCE, Objective, Tokens

KLOf = Literal["answers", "mismatched", "none"]
_KL, _KL_ANSWERS = "kl", "answers of kl"


@dataclass(frozen=True)
class KTO(Objective):
    """The mean over labelled answers of w (1 - sigmoid(beta (r - z))) for a desired answer and of
    w (1 - sigmoid(beta (z - r))) for an undesired one.

    r is the sum over the answer's tokens of log p - log p_reference. PREFERENCE labels an answer: 1.0
    desired, -1.0 undesired.

    z is max(0, mean of r over the answers that estimate the divergence of the policy from the reference), and
    no gradient goes through it. It is a mean over the whole batch, so no microbatch can compute it: it is
    computed before the gradient, from the log-probabilities of the policy before the update (OLD), which are
    the same numbers. The step scores the batch with the policy once more for that.

    Each metric is a mean over the answers that it names.
    """

    is_policy: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(LOSS, "", "the loss that trains", text="{:.4f}", shown="progress"),
        *(
            Metric(
                f"rewards_{side}",
                "nats",
                f"mean of the {side} answers' rewards, times beta",
                text="{:.3f}",
                odd="If both fall far, the policy forgets what it had learned: raise beta.",
                shown="progress",
                is_noisy=True,
            )
            for side in ("desired", "undesired")
        ),
        Metric(
            "kl",
            "nats",
            "z, the estimate of the divergence from the reference that rewards are compared with",
            odd="0 for long: the policy has not moved, or it makes the answers less likely on average.",
        ),
        Metric("log_probs_desired", "nats an answer", "mean log-probability of the desired answers"),
        Metric("log_probs_undesired", "nats an answer", "mean log-probability of the undesired answers"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            "Loss",
            "mean over answers",
            (Curve(LOSS, "training"), Curve(f"{VALIDATION}preference_loss", "held out")),
        ),
        REWARDS,
        Panel(
            "Held-out pairs",
            "share of pairs that are ranked rightly",
            (Curve(f"{VALIDATION}preference_accuracy", "accuracy"),),
            "share",
            "margin, nats times beta",
            (Curve(f"{VALIDATION}preference_margin", "margin"),),
            "linear",
        ),
        Panel("Divergence", "nats, estimated", (Curve("kl"),), "from zero"),
        LOG_PROBS,
        LIKELIHOOD,
    )

    beta: float = 0.1
    desired_weight: float = 1.0
    """w of desired answers. Where there are fewer of these than of the others, their shares of the loss are
    alike with the ratio of the numbers (the paper advises 1 to 4/3 times that)."""
    undesired_weight: float = 1.0
    """w of undesired answers."""
    kl: KLOf = "answers"
    """The estimate of z. "answers": the labelled answers themselves. "mismatched": answers that belong to
    other prompts, which the data adds to a document and labels 0.0 (the paper, and TRL, which pairs each
    prompt of a batch with the answer before); where a batch has none, z is 0. "none": z is 0, and nothing is
    scored with the policy."""

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0.0)
        check_number("desired_weight", self.desired_weight, least=0.0)
        check_number("undesired_weight", self.undesired_weight, least=0.0)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the numbers that each answer brings."""
        return (PREFERENCE,)

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the log-probabilities that are scored beforehand."""
        return (REFERENCE,) if self.kl == "none" else (REFERENCE, OLD)

    def _rewards(self, log_probs_RT: Array, tokens: Tokens) -> Float[Array, "R D"]:
        gained_RT = log_probs_RT - tokens.extras[REFERENCE]
        return tokens.answer_sums(jnp.where(tokens.weights > 0, gained_RT, 0))

    def totals(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Sums over all ranks of which the estimate of the divergence consists."""
        if self.kl == "none":
            return {}
        label_RD = tokens.answer_values(tokens.extras[PREFERENCE])
        estimates_RD = tokens.supervised_answers() & ((label_RD == 0) == (self.kl == "mismatched"))
        rewards_RD = self._rewards(tokens.extras[OLD].astype(float), tokens)
        return {
            _KL: tokens.share(jnp.where(estimates_RD, rewards_RD, 0).sum()),
            _KL_ANSWERS: tokens.share(estimates_RD.sum(dtype=tokens.weights.dtype)),
        }

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Answers, desired and undesired ones, of this rank."""
        label_RD = tokens.answer_values(tokens.extras[PREFERENCE])
        desired, undesired = (
            tokens.share((sign * label_RD > 0).sum(dtype=tokens.weights.dtype)) for sign in (1, -1)
        )
        of_side = {
            f"{metric}_{side}": count
            for side, count in (("desired", desired), ("undesired", undesired))
            for metric in ("rewards", "log_probs")
        }
        return {LOSS: desired + undesired, **of_side}

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The loss and the metrics, summed over the answers of this rank."""
        label_RD = tokens.answer_values(tokens.extras[PREFERENCE])
        rewards_RD = self._rewards(log_probs_RT, tokens)
        log_probs_RD = tokens.answer_sums(jnp.where(tokens.weights > 0, log_probs_RT, 0))
        z = jnp.zeros((), rewards_RD.dtype)
        if self.kl != "none":
            mean = tokens.totals[_KL] / jnp.maximum(tokens.totals[_KL_ANSWERS], 1)
            z = jax.lax.stop_gradient(jnp.maximum(mean, 0)).astype(rewards_RD.dtype)
        weight_RD = jnp.where(label_RD > 0, self.desired_weight, self.undesired_weight)
        losses_RD = weight_RD * jax.nn.sigmoid(self.beta * (jnp.sign(label_RD) * (z - rewards_RD)))

        def over(sign: int, x_RD: Array) -> Array:
            """The rank's share of the sum over desired (1) or undesired (-1) answers."""
            return tokens.share(jnp.where(sign * label_RD > 0, x_RD, 0).sum())

        ones_RD = jnp.ones_like(rewards_RD)
        return {
            LOSS: over(1, losses_RD) + over(-1, losses_RD),
            "kl": z * (over(1, ones_RD) + over(-1, ones_RD)),
            "rewards_desired": over(1, self.beta * rewards_RD),
            "rewards_undesired": over(-1, self.beta * rewards_RD),
            "log_probs_desired": over(1, log_probs_RD),
            "log_probs_undesired": over(-1, log_probs_RD),
        }
