"""Direct preference optimization (Rafailov et al., 2023), with its relatives: a loss of pairs of answers.

Legend: R rows of a microbatch on this rank, T token slots of a row on this rank, D most segments of a row.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.files.options import check_number, refuse
from jaxthd.objectives.metric import VALIDATION, Curve, Metric, Panel
from jaxthd.objectives.objective import LOSS, REFERENCE, Objective, Tokens

PREFERENCE = "preference"
"""Extra: 1.0 at the tokens of a chosen or desired answer, -1.0 at those of a rejected or undesired one."""
DPOLoss = Literal["sigmoid", "hinge", "ipo", "simpo"]


class _Answer(NamedTuple):
    """One side of each document's pair. log_probs, rewards: see DPO; rewards without beta. tokens: their
    number.
    """

    log_probs: Float[Array, "R D"]
    rewards: Float[Array, "R D"]
    tokens: Float[Array, "R D"]


_SIDES = ("chosen", "desired"), ("rejected", "undesired")
REWARDS = Panel(
    "Rewards",
    "gain over the reference, nats times beta",
    tuple(Curve(f"rewards_{name}", name) for names in _SIDES for name in names),
)
LOG_PROBS = Panel(
    "Log-probability of an answer",
    "nats",
    tuple(Curve(f"log_probs_{name}", name) for names in _SIDES for name in names),
)
"""Panels of objectives that tell good answers from bad ones."""


@dataclass(frozen=True)
class DPO(Objective):
    """The mean over pairs of a function of d, by which the chosen answer's reward exceeds the rejected one's.

    An answer's reward r is the sum of log p - log p_reference over its tokens, or their mean
    (length_average). The losses of a pair:

    - "sigmoid": -log sigmoid(beta d), or with label_smoothing e (cDPO, Mitchell 2023) (1 - e) times that and
      e times -log sigmoid(-beta d). ln 2 where policy and reference agree.
    - "hinge": max(0, 1 - beta d) (SLiC, Zhao et al., 2023).
    - "ipo": (d - 1 / (2 beta))^2 (Azar et al., 2023). The paper's r is the sum; TRL's is the mean, which
      needs length_average=true.
    - "simpo": -log sigmoid(beta d - gamma), where r is the mean of log p alone (Meng et al., 2024); with
      label_smoothing as above.

    A document is a pair: its two answers are told apart by PREFERENCE. One that lacks either counts nothing.
    Metrics are means over pairs, but sft_loss, which is one over tokens. TRL's rewards are of sums even where
    its loss is of means.
    """

    is_policy: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            LOSS,
            "",
            "the loss that trains: preference_loss, plus sft_weight times sft_loss",
            text="{:.4f}",
            odd="It begins at ln 2 = 0.693, plus the likelihood's part, where loss is sigmoid.",
            shown="progress",
        ),
        Metric(
            "accuracy",
            "share",
            "pairs whose chosen answer gained more over the reference policy than the rejected one",
            text="{:.1%}",
            odd="By chance in the first step, in which nothing has been gained. Soon 100%: the pairs are "
            "learned by heart; look at validation_preference_accuracy.",
            shown="progress",
            is_noisy=True,
        ),
        Metric(
            "margin",
            "nats",
            "mean of the chosen answer's reward less the rejected one's, both times beta",
            text="{:.3f}",
            odd="It should rise. If it does not: raise train.learning_rate or train.steps.",
            shown="progress",
            is_noisy=True,
        ),
        Metric("preference_loss", "", "the loss without the likelihood's part"),
        Metric(
            "sft_loss",
            "nats a token",
            "mean negative log-likelihood of the tokens of chosen answers",
            odd="It rises: chosen answers become less likely too; set sft_weight.",
        ),
        Metric("rewards_chosen", "nats", "mean of the chosen answers' rewards, times beta"),
        Metric(
            "rewards_rejected",
            "nats",
            "mean of the rejected answers' rewards, times beta",
            odd="If both fall far, the policy forgets what it had learned: raise beta or sft_weight.",
        ),
        Metric("log_probs_chosen", "nats an answer", "mean log-probability of the chosen answers"),
        Metric("log_probs_rejected", "nats an answer", "mean log-probability of the rejected answers"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            "Preference loss",
            "mean over pairs",
            (
                Curve("preference_loss", "training"),
                Curve(f"{VALIDATION}preference_loss", "held out"),
            ),
        ),
        Panel(
            "Accuracy",
            "share of pairs that are ranked rightly",
            (Curve("accuracy", "training"), Curve(f"{VALIDATION}preference_accuracy", "held out")),
            "share",
        ),
        REWARDS._replace(
            curves=(
                *REWARDS.curves,
                Curve("margin", "margin"),
                Curve(f"{VALIDATION}preference_margin", "held-out margin"),
            )
        ),
        Panel(
            "Likelihood of answers",
            "nats a token",
            (Curve("sft_loss", "chosen answers"), Curve(f"{VALIDATION}loss", "held-out transcripts")),
        ),
        LOG_PROBS,
    )

    loss: DPOLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    """The share of pairs that are supposed to be labelled the wrong way round."""
    length_average: bool = False
    """Rewards are means over an answer's tokens in place of sums. SimPO's always are."""
    reference_free: bool = False
    """log p_reference is 0."""
    gamma: float = 0.0
    """SimPO's margin; the paper has 0.3 to 1.6, with a beta of 2 to 10."""
    sft_weight: float = 0.0
    """Weight of the mean negative log-likelihood of the chosen answers' tokens, which is added to the
    loss."""

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0.0)
        check_number("label_smoothing", self.label_smoothing, least=0.0, below=0.5)
        check_number("gamma", self.gamma, least=0.0)
        check_number("sft_weight", self.sft_weight, least=0.0)
        if self.gamma and self.loss != "simpo":
            refuse(f"gamma={self.gamma} with loss={self.loss}", "it with loss=simpo", "leave gamma out")
        if self.label_smoothing and self.loss in ("hinge", "ipo"):
            refuse(
                f"label_smoothing={self.label_smoothing} with loss={self.loss}",
                "it with loss=sigmoid or loss=simpo",
                "leave label_smoothing out",
            )

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the numbers that each answer brings."""
        return (PREFERENCE,)

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the log-probabilities that are scored beforehand."""
        return () if self.reference_free or self.loss == "simpo" else (REFERENCE,)

    def _answer(self, sign: int, log_probs_RT: Array, tokens: Tokens) -> _Answer:
        of_side_RT = (tokens.weights > 0) & (sign * tokens.extras[PREFERENCE] > 0)
        gained_RT = log_probs_RT
        if self.scored:
            gained_RT = log_probs_RT - tokens.extras[REFERENCE]
        count_RD = tokens.document_sums(of_side_RT.astype(log_probs_RT.dtype))
        rewards_RD = tokens.document_sums(jnp.where(of_side_RT, gained_RT, 0))
        if self.length_average or self.loss == "simpo":
            rewards_RD /= jnp.maximum(count_RD, 1)
        log_probs_RD = tokens.document_sums(jnp.where(of_side_RT, log_probs_RT, 0))
        return _Answer(log_probs_RD, rewards_RD, count_RD)

    def _pairs(self, tokens: Tokens) -> tuple[Bool[Array, "R D"], Float[Array, "R D"]]:
        """Whether each document is a pair, and the number of its chosen answer's tokens."""
        supervised_RT, preference_RT = tokens.weights > 0, tokens.extras[PREFERENCE]
        chosen_RD, rejected_RD = (
            tokens.document_sums((supervised_RT & (sign * preference_RT > 0)).astype(tokens.weights.dtype))
            for sign in (1, -1)
        )
        is_pair_RD = (chosen_RD > 0) & (rejected_RD > 0)
        return is_pair_RD, jnp.where(is_pair_RD, chosen_RD, 0)

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Pairs, and chosen tokens, of this rank."""
        is_pair_RD, chosen_RD = self._pairs(tokens)
        pairs = is_pair_RD.sum(dtype=tokens.weights.dtype)
        return {LOSS: tokens.share(pairs), "sft_loss": tokens.share(chosen_RD.sum())}

    def totals(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The loss has one denominator, the pairs: that of the likelihood's part is a factor in `sums`."""
        return {f"{name} count": x for name, x in self.counts(tokens).items()} if self.sft_weight else {}

    def _preference_losses(self, difference_RD: Array) -> Array:
        if self.loss == "hinge":
            return jax.nn.relu(1 - self.beta * difference_RD)
        if self.loss == "ipo":
            return (difference_RD - 1 / (2 * self.beta)) ** 2
        logits_RD, smooth = self.beta * difference_RD - self.gamma, self.label_smoothing
        return -(1 - smooth) * jax.nn.log_sigmoid(logits_RD) - smooth * jax.nn.log_sigmoid(-logits_RD)

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The loss and the metrics, summed over the pairs of this rank."""
        chosen, rejected = (self._answer(sign, log_probs_RT, tokens) for sign in (1, -1))
        is_pair_RD, _ = self._pairs(tokens)
        difference_RD = chosen.rewards - rejected.rewards

        def over_pairs(x_RD: Array) -> Array:
            """The rank's share of the sum over pairs."""
            return tokens.share(jnp.where(is_pair_RD, x_RD, 0).sum())

        preference_loss = over_pairs(self._preference_losses(difference_RD))
        sft_loss, loss = over_pairs(-chosen.log_probs), preference_loss
        if self.sft_weight:
            pairs, of_chosen = (tokens.totals[f"{name} count"] for name in (LOSS, "sft_loss"))
            loss += self.sft_weight * sft_loss * pairs / jnp.maximum(of_chosen, 1)
        return {
            LOSS: loss,
            "preference_loss": preference_loss,
            "sft_loss": sft_loss,
            "accuracy": over_pairs((difference_RD > 0).astype(log_probs_RT.dtype)),
            "margin": over_pairs(self.beta * difference_RD),
            "rewards_chosen": over_pairs(self.beta * chosen.rewards),
            "rewards_rejected": over_pairs(self.beta * rejected.rewards),
            "log_probs_chosen": over_pairs(chosen.log_probs),
            "log_probs_rejected": over_pairs(rejected.log_probs),
        }
