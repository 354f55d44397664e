"""The metrics of a step of jaxthd grpo. Those of its updates are the same as in any training."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxthd.data.loader import BatchReport
from jaxthd.objectives.metric import Metric, measured
from jaxthd.rl.groups import Collected
from jaxthd.rl.rewards.advantages import reward_metrics
from jaxthd.rl.updates import Update
from jaxthd.run.metrics import StepFacts, metrics_line


class GRPOFacts(NamedTuple):
    """The known facts of a step that is done.

    collected: what it drew. updates: of one pass over that. seconds: of "rollout", "reward", "scoring" and
    "training", and of "resharding" where that happens.
    """

    collected: Collected
    updates: Sequence[Update]
    seconds: Mapping[str, float]


EXTREMES = ("ratio_max", "inverse_ratio_max", "logprob_difference")
"""The objective's metrics that are the largest of all tokens (Objective.extremes)."""


def _drawn_tokens(facts: GRPOFacts) -> int:
    return sum(len(answer.tokens) for group in facts.collected.drawn for answer in group.answers)


def _entropy(facts: GRPOFacts) -> float | None:
    found = [x for group in facts.collected.drawn for answer in group.answers for x in answer.entropies]
    return float(np.mean(found)) if found else None


def _mean_difference(facts: GRPOFacts) -> float:
    found = [update.agreement for update in facts.updates]
    return sum(each.mean * each.tokens for each in found) / max(sum(each.tokens for each in found), 1)


GRPO_METRICS: list[Metric] = [
    Metric(
        "logprob_difference",
        "nats",
        "largest difference of a token's log-probability between drawing and training, with the same weights",
        lambda x: max(update.agreement.largest for update in x.updates),
        odd="It should be rounding: 1e-5 in float32. More than the dtype explains ends the run.",
    ),
    Metric(
        "logprob_difference_mean",
        "nats",
        "the mean of these differences over the drawn tokens",
        _mean_difference,
    ),
    Metric(
        "entropy",
        "nats a token",
        "entropy of the policy at the temperature, the mean over the drawn tokens",
        _entropy,
        odd="If it falls to 0, all answers to a prompt are alike and teach nothing: lower "
        "train.learning_rate, raise clip_high.",
    ),
    Metric(
        "draws",
        "",
        "how often the step drew prompts; more than 1 with dynamic sampling",
        lambda x: x.collected.rounds,
        odd="At rollout.dynamic_sampling: most prompts are too easy or too hard.",
    ),
    Metric(
        "trained_groups",
        "prompts",
        "prompts whose answers were trained on",
        lambda x: len(x.collected.groups),
        odd="Under rollout.prompts: see no_spread and reward_failures.",
    ),
    Metric(
        "rollout_tokens_per_second",
        "tokens/s",
        "tokens drawn over rollout_seconds",
        lambda x: _drawn_tokens(x) / x.seconds["rollout"],
        "{:,.0f}",
        odd="Low: raise rollout.answers_at_once.",
    ),
    *(
        Metric(f"{name}_seconds", "s", meaning, lambda x, name=name: x.seconds.get(name))  # type: ignore[misc]
        for name, meaning in (
            ("resharding", "time of copying the weights to rollout.mesh, where that is another mesh"),
            ("rollout", "time of reading prompts and drawing answers"),
            ("reward", "time of waiting for rewards"),
            ("scoring", "time of packing, and of the log-probabilities that the updates compare with"),
            ("training", "time of the updates"),
        )
    ),
]
"""Metrics of every step of jaxthd grpo, besides those of its updates and of its rewards."""

REWARD_METRICS: list[Metric] = [
    Metric(
        "reward",
        "",
        "mean of the rewards of all answers drawn, each the weighted sum of all functions",
        text="{:.3f}",
        odd="Each step has other prompts, so it is noisy: compare means over tens of steps.",
        shown="progress",
        is_noisy=True,
    ),
    Metric("reward_std", "", "standard deviation of the rewards of all answers"),
    Metric(
        "reward_spread",
        "",
        "mean over the groups of the standard deviation inside a group",
        odd="Near 0: the answers to a prompt are all as good; nothing is learned from them.",
    ),
    Metric(
        "no_spread",
        "share",
        "groups whose rewards are all equal",
        odd="Over 0.7: prompts are too easy or too hard. Raise rollout.dynamic_sampling, the temperature or "
        "rollout.group_size.",
    ),
    Metric(
        "reward_failures",
        "prompts",
        "groups without rewards",
        odd="failures.jsonl lists them with their reasons.",
    ),
    Metric(
        "answer_tokens",
        "tokens",
        "mean length of an answer, its end included",
        text="{:.1f}",
        odd="It falls or grows without end: the reward is easier to get for such answers.",
        shown="progress",
        is_noisy=True,
    ),
    Metric("answer_tokens_max", "tokens", "the longest answer"),
    Metric(
        "cut_off",
        "share",
        "answers that did not end by themselves",
        text="{:.1%}",
        odd="Raise rollout.max_new_tokens, or punish length (the reward overlong).",
        shown="summary",
        is_noisy=True,
    ),
]
"""Metrics of a step's rewards (jaxthd.rl.rewards.advantages.reward_metrics)."""


def grpo_line(facts: GRPOFacts, results: Sequence[Any], step: StepFacts) -> dict[str, Any]:
    """A step's line of metrics.jsonl; without metrics of updates where nothing was left to train on.

    results: StepMetrics (jaxthd.steps.training) of Python numbers, of each update of all passes that has
    documents. step: without results.
    """
    rewards = reward_metrics([group.rewarded for group in facts.collected.drawn])
    own = rewards | measured(GRPO_METRICS, facts)
    if not results:
        counts = {"compilations": step.programs.made, "cached_compilations": step.programs.read}
        return {"step": step.step, "step_seconds": step.seconds, **counts, **own}
    tokens = [x.report.supervised_tokens for x in facts.updates if not x.is_empty]
    return metrics_line(step._replace(results=_mean(results, tokens * (len(results) // len(tokens))))) | own


def combined(updates: Sequence[Update]) -> BatchReport:
    """The report of what all updates of a pass hold."""
    reports = [update.report for update in updates]
    return BatchReport(tuple(chain(*(x.rows for x in reports))), tuple(chain(*(x.keys for x in reports))))


def _mean(results: Sequence[Any], weights: Sequence[int]) -> Any:
    """The weighted mean of the updates' metrics; counts are the last one's, extremes the largest."""
    first, last = results[0], results[-1]

    def mean(values: Sequence[Any]) -> Any:
        if values[0] is None:
            return None
        return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)

    means = {
        name: mean([getattr(each, name) for each in results])
        for name in first._fields
        if name not in ("objective", "skipped", "skipped_in_a_row")
    }
    objective = {
        name: (max if name in EXTREMES else mean)([each.objective[name] for each in results])
        for name in first.objective
    }
    return last._replace(**means, objective=objective)
