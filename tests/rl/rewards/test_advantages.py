"""Advantages and metrics, by numbers computed by hand and against other formulas."""

import numpy as np
import pytest

from jaxthd.rl.rewards import Rewarded, RewardFailure
from jaxthd.rl.rewards.advantages import advantages, has_spread, reward_metrics
from tests.rl.rewards.groups import group


def test_advantages_computed_by_hand():
    """Rewards 1, 0, 0, 0: mean 1/4, standard deviation sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2."""
    one = [1.0, 0.0, 0.0, 0.0]
    (plain,) = advantages([one], normalise=False)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]
    (others,) = advantages([one], leave_one_out=True, normalise=False)
    np.testing.assert_allclose(others, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-15)
    (normalised,) = advantages([one])
    np.testing.assert_allclose(normalised, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-15)
    # The standard deviation of the others is 0 for the sole winner: the trap.
    (both,) = advantages([one], leave_one_out=True)
    np.testing.assert_allclose(both, np.array([1, -1 / 3, -1 / 3, -1 / 3]) / (0.5 + 1e-6), rtol=1e-15)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_groups_of_any_size_and_failed_ones(leave_one_out: bool):
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=n).tolist() for n in (2, 3, 8)]
    found = advantages([rewards[0], None, rewards[1], [0.5], rewards[2]], leave_one_out=leave_one_out)
    assert found[1] is None
    assert found[3].tolist() == [0]
    for r, a in zip(rewards, (found[0], found[2], found[4]), strict=True):
        others = [np.mean(r[:i] + r[i + 1 :]) for i in range(len(r))]
        expected = np.subtract(r, others if leave_one_out else np.mean(r)) / (np.std(r, ddof=1) + 1e-6)
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, expected, rtol=1e-12)
        assert abs(a.sum()) < 1e-12


def test_groups_without_spread_have_advantages_of_zero():
    rounded = [0.1 + 0.2, 0.3, 0.3]
    assert rounded[0] != rounded[1]
    for rewards in ([0.25, 0.25], rounded, [-7e9, -7e9 - 1e-6], [1.0], []):
        assert not has_spread(rewards)
        for (a,) in (advantages([rewards]), advantages([rewards], leave_one_out=True, normalise=False)):
            assert a.tolist() == [0.0] * len(rewards)
    assert not has_spread(None)
    assert has_spread([0.3, 0.3 + 1e-6])


def rewarded(answers: tuple[str, ...], ended: tuple[bool, ...], rewards, **by_function) -> Rewarded:
    drawn = group(*answers)
    object.__setattr__(drawn, "ended", ended)
    failure = None if rewards else RewardFailure("f", "a", "it raised")
    return Rewarded(drawn, rewards, by_function, failure)


def test_metrics_computed_by_hand():
    step = [
        rewarded(("ab", "abcd"), (True, False), (1.0, 0.0), wer=(1.0, 0.5), f=(0.0, 1.0)),
        rewarded(("a", ""), (True, True), (0.5, 0.5), wer=(0.5, 0.5), f=(0.0, 0.0)),
        rewarded(("abcdefghi", ""), (False, True), None),
    ]
    assert reward_metrics(step) == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": np.sqrt(0.5 / 4),
            "reward_spread": np.sqrt(0.5) / 2,
            "reward_wer": 2.5 / 4,
            "reward_f": 1 / 4,
            "no_spread": 1 / 2,
            "answer_tokens": (3 + 5 + 2 + 1 + 10 + 1) / 6,
            "answer_tokens_max": 10,
            "cut_off": 2 / 6,
            "reward_failures": 1,
        }
    )
    assert reward_metrics(step[2:]) == {
        "reward_failures": 1,
        "answer_tokens": 5.5,
        "answer_tokens_max": 10,
        "cut_off": 0.5,
    }
    assert reward_metrics([]) == {"reward_failures": 0}
