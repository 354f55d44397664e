"""Random groups through every built-in reward: each is rewarded within bounds, or reported."""

import math
from typing import Any

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, RolloutConfig
from jaxthd.rl.rewards import Group
from jaxthd.rl.rewards.registry import BUILT_IN
from jaxthd.rl.rewards.rewarder import Rewarder

OPTIONS = (
    "format.pattern=[a-z ]*",
    "equals.field=total",
    "length.unit=characters",
    "overlong.max_tokens=20",
    "wer.lowest=-inf",
)
"""Options of the random groups' functions: the others keep their defaults."""
PIECES = (
    "",
    " ",
    "one",
    "Two",
    "don't",
    "12",
    "-7.5",
    "\n",
    "\0",
    "\ud800",
    "\u0301",
    "日本",
    "🙂",
    "[x]",
    "½",
    "ﷺ",
)
FIELDS: tuple[Any, ...] = (
    None,
    True,
    7,
    -1.5,
    "12",
    "twelve",
    "",
    [1, 2],
    [],
    ["a"],
    {"a": 1},
    10**30,
    math.nan,
)


def random_text(rng: np.random.Generator) -> str:
    pieces = rng.choice(len(PIECES), rng.integers(0, 8))
    return " ".join(PIECES[piece] for piece in pieces) * int(rng.choice([1, 1, 1, 40]))


def random_group(seed: int, number: int) -> Group:
    """A group of 1 to 8 answers, a function of its arguments."""
    rng = np.random.default_rng([seed, number])
    count = int(rng.integers(1, 9))
    reference = None if rng.random() < 0.1 else random_text(rng)
    copies = rng.random(count) < 0.2
    answers = tuple(reference if copied and reference else random_text(rng) for copied in copies)
    return Group(
        key=f"group {number}",
        reference=reference,
        fields={"total": FIELDS[rng.integers(len(FIELDS))]} if rng.random() < 0.9 else {},
        answers=answers,
        tokens=tuple(int(n) for n in rng.integers(1, 30, count)),
        ended=tuple(bool(e) for e in rng.random(count) < 0.9),
    )


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.nightly)])
def test_every_group_is_rewarded_within_bounds_or_reported(name: str, count: int):
    """Empty texts, control characters, lone surrogates, long repetitions, fields of every JSON type."""
    options = tuple(option for option in OPTIONS if option.startswith(f"{name}."))
    rollout = RolloutConfig(rewards=(name,), reward_options=options)
    config = Config(data=DataConfig(max_skipped_share=1.0), rollout=rollout)
    least = -math.inf if name == "wer" else -1.0
    with Rewarder.of(config) as rewarder:
        for number in range(count):
            rewarder.submit(number, random_group(3, number))
        found = rewarder.collect()
    rewarded = [each for each in found if not each.failure]
    for each in found:
        if each.failure:
            assert each.group.reference is None or name == "equals", each
            assert "process" not in each.failure.reason
        else:
            assert all(least <= x <= 1.0 and math.isfinite(x) for x in each.rewards or ()), each
    assert len(found) == count
    assert len(rewarded) > count / 6
