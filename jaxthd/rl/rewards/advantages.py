"""From the rewards of groups to the advantages of their answers, in float64, and to the metrics of a step."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from jaxthd.rl.rewards.group import Rewarded

SMALLEST_STD = 1e-6
"""Added to the standard deviation that advantages are divided by."""
SPREAD = 1e-9
"""Rewards that differ by less, relative to the largest or to 1, are equal: sums of the same numbers in
another order differ by rounding."""


def advantages(
    rewards: Sequence[Sequence[float] | None], *, leave_one_out: bool = False, normalise: bool = True
) -> list[Float64[np.ndarray, " _"] | None]:
    """The advantages of each group's answers; None for a group without rewards.

    rewards: of the G answers of each group. An advantage is a reward less the mean of its group (GRPO: Shao
    et al., 2024), or less the mean of the group's other answers (RLOO: Ahmadian et al., 2024). normalise: it
    is divided by the standard deviation of the group's rewards, with G - 1 in its denominator as in TRL and
    NeMo-RL, plus 1e-6. Also with leave_one_out that is the whole group's: the others' is 0 where one answer
    alone differs. A group without spread has advantages of exactly 0; so has a group of one answer.
    """
    return [None if each is None else _of_group(each, leave_one_out, normalise) for each in rewards]


def _of_group(rewards: Sequence[float], leave_one_out: bool, normalise: bool) -> Float64[np.ndarray, " _"]:
    r = np.asarray(rewards, np.float64)
    if not has_spread(rewards):
        return np.zeros_like(r)
    centred = r - r.mean()
    if leave_one_out:  # r_i - (sum - r_i) / (G - 1) = (r_i - mean) * G / (G - 1)
        centred = centred * len(r) / (len(r) - 1)
    return centred / (r.std(ddof=1) + SMALLEST_STD) if normalise else centred


def has_spread(rewards: Sequence[float] | None) -> bool:
    """Whether a group's rewards differ. Groups whose rewards are all equal, or failed, teach nothing: dynamic
    sampling draws others in their place (DAPO: Yu et al., 2025)."""
    if rewards is None or len(rewards) < 2:
        return False
    return max(rewards) - min(rewards) > SPREAD * max(1.0, *map(abs, rewards))


def reward_metrics(groups: Sequence[Rewarded]) -> dict[str, float]:
    """The metrics of a step's groups.

    reward, reward_std: over all answers that have rewards. reward_spread: the mean over groups of their
    standard deviations (with G - 1). reward_NAME: the mean of each function, not weighted. no_spread: the
    share of groups, among those with rewards, whose rewards are all equal. These are absent where every group
    failed. answer_tokens, answer_tokens_max: tokens of an answer, its end included. cut_off: the share of
    answers that did not end. reward_failures: the number of groups without rewards.
    """
    tokens = [count for each in groups for count in each.group.tokens]
    ended = [each for one in groups for each in one.group.ended]
    done = [each for each in groups if each.rewards is not None]
    found = {"reward_failures": float(len(groups) - len(done))}
    if tokens:
        found |= {"answer_tokens": float(np.mean(tokens)), "answer_tokens_max": float(max(tokens))}
        found["cut_off"] = 1.0 - float(np.mean(ended))
    if not done:
        return found
    rewards = [np.asarray(each.rewards, np.float64) for each in done]
    everything = np.concatenate(rewards)
    found |= {"reward": float(everything.mean()), "reward_std": float(everything.std())}
    found["reward_spread"] = float(np.mean([r.std(ddof=1) if len(r) > 1 else 0.0 for r in rewards]))
    found["no_spread"] = float(np.mean([not has_spread(each.rewards) for each in done]))
    for name in done[0].by_function:
        found[f"reward_{name}"] = float(np.mean([v for each in done for v in each.by_function[name]]))
    return found
