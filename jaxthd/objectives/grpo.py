"""Group relative policy optimization (Shao et al., 2024), with its relatives: a loss of drawn answers'
tokens.

Legend: R rows of a microbatch on this rank, T token slots of a row on this rank, D most segments of a row.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.files.options import check_number, refuse
from jaxthd.objectives.metric import Curve, Metric, Panel
from jaxthd.objectives.objective import LOSS, OLD, REFERENCE, Objective, Tokens

ADVANTAGE = "advantage"
"""Extra: by how much the token's answer is better than its group's."""
RECORDED = "recorded"
"""Extra: the token's log-probability as recorded while drawing, under the softmax that trains: at
rollout.temperature, over the whole vocabulary."""
DRAWN = "drawn"
"""Extra: the log-probability with which the token was drawn, under temperature, top-k and top-p."""

Surrogate = Literal["clip", "cispo"]
Ratio = Literal["token", "answer"]
Mean = Literal["tokens", "answers", "max_length"]
KL = Literal["k1", "k2", "k3"]
Old = Literal["scored", "recorded", "current"]
Correction = Literal["none", "truncate", "band"]
_OF_TOKENS = (
    "kl",
    "clipped_low",
    "clipped_high",
    "ratio",
    "entropy",
    "logprob_difference_mean",
    "correction",
)
"""Metrics that are means over all supervised tokens."""


@dataclass(frozen=True)
class GRPO(Objective):
    """The mean over drawn tokens of the policy's loss, plus beta_kl times the divergence from the reference.

    A is the token's advantage, rho = exp(log p - log p_old) the ratio of its probabilities under the policy
    that trains and the one before the step's updates. The policy's loss is

    - "clip": max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) (PPO, Schulman et al., 2017; a larger
      clip_high is DAPO's clip-higher, Yu et al., 2025). With dual_clip c it is at most -c A where A < 0 (Ye
      et al., 2020), which is TRL's `delta` where that exceeds 1 + clip_high;
    - "cispo": -A clip(rho, ...) log p, without a gradient through the ratio (MiniMax-M1, 2025). TRL's
      epsilon_high is the bound itself, here 1 + clip_high, and it has no lower bound, here clip_low=1.

    Metrics are means over all supervised tokens, and extremes of these.
    """

    is_policy: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            LOSS,
            "",
            "the loss that trains; its value tells nothing, since advantages of a group add up to 0",
            text="{:.4f}",
        ),
        Metric(
            "kl",
            "nats a token",
            "divergence of the policy from the reference, not with beta_kl 0",
            text="{:.4f}",
            odd="It grows without the reward: raise beta_kl, or lower train.learning_rate.",
            shown="progress",
        ),
        Metric("clipped_low", "share", "tokens that lose their gradient because their ratio is too small"),
        Metric(
            "clipped_high",
            "share",
            "tokens that lose their gradient because their ratio is too large",
            odd="Large: make fewer updates a step, or lower train.learning_rate.",
        ),
        Metric("ratio", "ratio", "mean of rho, the tokens' probabilities over those before the step"),
        Metric(
            "ratio_max",
            "ratio",
            "the largest of these",
            odd="1 in a step's first update; far from 1 later: lower train.learning_rate.",
        ),
        Metric("inverse_ratio_max", "ratio", "1 / the smallest of these"),
        Metric("correction", "", "mean of the weights of correction, where that is not none"),
    )
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel(
            "Policy",
            "KL to the reference, nats a token",
            (Curve("kl"),),
            "linear",
            "entropy, nats a token",
            (Curve("entropy"),),
        ),
        Panel(
            "Clipping",
            "share of tokens without a gradient",
            (Curve("clipped_low", "ratio too small"), Curve("clipped_high", "ratio too large")),
            "share",
        ),
    )

    loss: Surrogate = "clip"
    ratio: Ratio = "token"
    """"answer": one ratio for an answer, exp of the mean over its tokens of log rho (GSPO, Zheng et al.,
    2025); only with mean=answers."""
    mean: Mean = "tokens"
    """The unit of the loss's mean: all "tokens" of the batch (DAPO); "answers", each the mean over its tokens
    (GRPO); "max_length": the sum over answers and tokens / (answers * max_length) (Dr. GRPO, Liu et al.,
    2025)."""
    max_length: int = 0
    """Tokens by which mean=max_length divides, such as rollout.max_new_tokens."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """0: none; the paper has 3."""
    beta_kl: float = 0.01
    """Weight of the divergence from the reference; 0: there is no reference."""
    kl: KL = "k3"
    """The estimate of the divergence, with d = log p_reference - log p (Schulman, 2020): k1 is -d, k2 is
    d^2 / 2, k3 is exp(d) - 1 - d. As a loss only k2 has, on average over answers drawn from the policy, the
    gradient of the divergence; that of k1 is 0."""
    old: Old = "scored"
    """The source of log p_old. "scored": computed before the updates of a step. "recorded": as recorded while
    drawing. "current": log p itself, without a gradient, for a step of one update, on answers that its own
    weights drew."""
    correction: Correction = "none"
    """Weights w = exp(log p_old - log p_drawn) on the policy's loss, for answers that another policy or
    another program drew: "truncate": at most correction_max (Yao et al., 2025); "band": 0 outside
    correction_min to correction_max (IcePop, Ling team, 2025)."""
    correction_min: float = 0.5
    correction_max: float = 2.0

    def __post_init__(self) -> None:
        check_number("clip_low", self.clip_low, above=0.0, most=1.0)
        check_number("clip_high", self.clip_high, above=0.0)
        check_number("beta_kl", self.beta_kl, least=0.0)
        check_number("correction_min", self.correction_min, least=0.0, below=1.0)
        check_number("correction_max", self.correction_max, least=1.0)
        if self.mean == "max_length" and self.max_length < 1:
            refuse(
                f"mean=max_length with max_length={self.max_length}",
                "the most tokens of an answer",
                "give max_length, such as the value of rollout.max_new_tokens",
            )
        if self.mean != "max_length" and self.max_length:
            refuse(
                f"max_length={self.max_length} with mean={self.mean}",
                "it with mean=max_length",
                "leave max_length out",
            )
        if self.ratio == "answer" and self.mean != "answers":
            refuse(f"ratio=answer with mean={self.mean}", "it with mean=answers", "add mean=answers")
        if self.dual_clip:
            check_number("dual_clip", self.dual_clip, above=1 + self.clip_high)
            if self.loss != "clip":
                refuse(f"dual_clip with loss={self.loss}", "it with loss=clip", "leave dual_clip out")

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the numbers that each token brings."""
        return (ADVANTAGE, RECORDED) if self.correction == "none" else (ADVANTAGE, RECORDED, DRAWN)

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the log-probabilities that are scored beforehand."""
        return (REFERENCE,) * (self.beta_kl > 0) + (OLD,) * (self.old == "scored")

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The count that the loss is divided by, and supervised tokens, of this rank."""
        supervised = tokens.weights.sum()
        answers = tokens.share(tokens.supervised_answers().sum(dtype=tokens.weights.dtype))
        of_loss = {"tokens": supervised, "answers": answers, "max_length": answers * self.max_length}
        return {LOSS: of_loss[self.mean], **dict.fromkeys(_OF_TOKENS, supervised)}

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The policy loss and the metrics, summed over the tokens of this rank."""
        is_drawn_RT = tokens.weights > 0
        advantage_RT = jnp.where(is_drawn_RT, tokens.extras[ADVANTAGE], 0).astype(log_probs_RT.dtype)
        ratio_RT = jnp.exp(self._log_ratio(log_probs_RT, tokens))
        correction_RT = self._corrections(log_probs_RT, tokens)
        loss_RT = correction_RT * self._policy_loss(advantage_RT, ratio_RT, log_probs_RT)
        kl = {}
        if self.beta_kl:
            kl_RT = self._divergence(log_probs_RT, tokens)
            loss_RT += self.beta_kl * kl_RT
            kl = {"kl": kl_RT}
        low_RT = (ratio_RT < 1 - self.clip_low) & (advantage_RT < 0)
        high_RT = (ratio_RT > 1 + self.clip_high) & (advantage_RT > 0)
        metrics = {
            **kl,
            "clipped_low": low_RT.astype(loss_RT.dtype),
            "clipped_high": high_RT.astype(loss_RT.dtype),
            "ratio": ratio_RT,
            "entropy": -log_probs_RT,
            "logprob_difference_mean": self._difference(log_probs_RT, tokens),
        }
        if self.correction != "none":
            metrics["correction"] = correction_RT
        sums = {name: jnp.where(is_drawn_RT, x_RT, 0).sum() for name, x_RT in metrics.items()}
        return {LOSS: (self._token_weights(tokens, loss_RT.dtype) * loss_RT).sum(), **sums}

    def extremes(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Largest ratios of the new to the old policy, over the tokens of this rank."""
        log_ratio_RT = self._log_ratio(log_probs_RT, tokens)

        def largest(x_RT: Array) -> Array:
            """The largest value of a supervised token; at least 0."""
            return jnp.where(tokens.weights > 0, x_RT, 0).max()

        return {
            "ratio_max": largest(jnp.exp(log_ratio_RT)),
            "inverse_ratio_max": largest(jnp.exp(-log_ratio_RT)),
            "logprob_difference": largest(self._difference(log_probs_RT, tokens)),
        }

    def _old(self, log_probs_RT: Array, tokens: Tokens) -> Array:
        """log p_old; without a gradient."""
        if self.old == "current":
            return jax.lax.stop_gradient(log_probs_RT)
        return tokens.extras[OLD if self.old == "scored" else RECORDED].astype(log_probs_RT.dtype)

    def _log_ratio(self, log_probs_RT: Array, tokens: Tokens) -> Float[Array, "R T"]:
        """log rho, or its mean over the answer; 0 where nothing was drawn."""
        difference_RT = log_probs_RT - self._old(log_probs_RT, tokens)
        difference_RT = jnp.where(tokens.weights > 0, difference_RT, 0)
        if self.ratio == "token":
            return difference_RT
        lengths_RD = jnp.maximum(tokens.answer_sums(tokens.weights), 1)
        return tokens.at_tokens(tokens.answer_sums(difference_RT) / lengths_RD)

    def _policy_loss(self, advantage_RT: Array, ratio_RT: Array, log_probs_RT: Array) -> Float[Array, "R T"]:
        clipped_RT = jnp.clip(ratio_RT, 1 - self.clip_low, 1 + self.clip_high)
        if self.loss == "cispo":
            return -advantage_RT * jax.lax.stop_gradient(clipped_RT) * log_probs_RT
        loss_RT = jnp.maximum(-advantage_RT * ratio_RT, -advantage_RT * clipped_RT)
        if not self.dual_clip:
            return loss_RT
        return jnp.where(advantage_RT < 0, jnp.minimum(loss_RT, -self.dual_clip * advantage_RT), loss_RT)

    def _divergence(self, log_probs_RT: Array, tokens: Tokens) -> Float[Array, "R T"]:
        d_RT = jnp.where(tokens.weights > 0, tokens.extras[REFERENCE] - log_probs_RT, 0)
        if self.kl == "k1":
            return -d_RT
        return d_RT**2 / 2 if self.kl == "k2" else jnp.expm1(d_RT) - d_RT

    def _corrections(self, log_probs_RT: Array, tokens: Tokens) -> Float[Array, "R T"]:
        """The weight of each token's loss; without a gradient."""
        if self.correction == "none":
            return jnp.ones_like(log_probs_RT)
        difference_RT = self._old(log_probs_RT, tokens) - tokens.extras[DRAWN]
        weight_RT = jnp.exp(jnp.where(tokens.weights > 0, difference_RT, 0))
        if self.correction == "truncate":
            return jnp.minimum(weight_RT, self.correction_max)
        is_inside_RT = (weight_RT >= self.correction_min) & (weight_RT <= self.correction_max)
        return jnp.where(is_inside_RT, weight_RT, 0)

    def _difference(self, log_probs_RT: Array, tokens: Tokens) -> Float[Array, "R T"]:
        """Between the log-probabilities of training, before the updates, and of drawing."""
        ours_RT = log_probs_RT if self.old == "recorded" else self._old(log_probs_RT, tokens)
        difference_RT = jnp.abs(jax.lax.stop_gradient(ours_RT) - tokens.extras[RECORDED])
        return jnp.where(tokens.weights > 0, difference_RT, 0)

    def _token_weights(self, tokens: Tokens, dtype: Any) -> Float[Array, "R T"]:
        """The weight of each token's loss in the sum."""
        weights_RT = tokens.weights.astype(dtype)
        if self.mean != "answers":
            return weights_RT
        return weights_RT * tokens.at_tokens(1 / jnp.maximum(tokens.answer_sums(weights_RT), 1))
