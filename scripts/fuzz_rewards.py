"""Whether every group is rewarded or reported, whatever its texts and fields and whatever functions do.

    python scripts/fuzz_rewards.py [--count 2000] [--seed 0]

Three parts, each with a table of what was given and what was said:

- bad settings of rollout.rewards and rollout.reward_options: each must be refused with one message;
- functions that misbehave in every way (scripts/misbehaving_rewards.py), in worker processes: each must be
  reported with the prompt's key, and the next group must be rewarded;
- --count random groups (empty texts, control characters, lone surrogates, long repetitions, fields of every
  JSON type) through every built-in function: each must have finite rewards within the function's bounds, or
  be reported.

Exits 1 and lists the violations where that is not so, or a process is left behind. Takes half a minute.
"""

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jaxthd.config import Config, RolloutConfig
from jaxthd.errors import UserError
from jaxthd.rl.rewards import Group
from jaxthd.rl.rewards.registry import BUILT_IN
from jaxthd.rl.rewards.rewarder import Rewarder

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.misbehaving_rewards import GOOD, WAYS

FUNCTION = "scripts.misbehaving_rewards.misbehave"
BAD_SETTINGS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((), ()),
    (("were",), ()),
    (("my rewards.f",), ()),
    (("wer", "wer=0.5"), ()),
    (("wer=much",), ()),
    (("wer=nan",), ()),
    (("wer",), ("wer.lowest",)),
    (("wer",), ("wer.lowest=0",)),
    (("wer",), ("wer.lowset=-2",)),
    (("wer",), ("wer.normaliser=french",)),
    (("wer",), ("cer.lowest=-2",)),
    (("overlong",), ("overlong.max_tokens=6.5",)),
    (("overlong",), ("overlong.buffer_tokens=1000",)),
    (("format",), ()),
    (("format",), ("format.pattern=(",)),
    (("length",), ("length.unit=bytes",)),
    (("equals",), ()),
    (("scripts.misbehaving_reward.f",), ()),
    (("scripts.misbehaving_rewards.misbehav",), ()),
    (("scripts.misbehaving_rewards.GOOD",), ()),
    ((FUNCTION,), (f"{FUNCTION}.scale=2",)),
    (("os.getpid",), ()),
    (("this.is.nowhere",), ()),
]
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


def check_settings() -> list[str]:
    """Prints what is said about each of BAD_SETTINGS. Returns the violations."""
    violations = []
    for rewards, options in BAD_SETTINGS:
        given = " ".join([f"rewards={list(rewards)}", *([f"options={list(options)}"] if options else [])])
        try:
            config = Config(rollout=RolloutConfig(rewards=rewards, reward_options=options))
            Rewarder.of(config).close()
            violations.append(f"{given} is accepted")
        except UserError as error:
            print(f"{given}\n    {error}")
        except Exception as error:
            violations.append(f"{given} raises {type(error).__name__}: {error}")
    return violations


def check_functions() -> list[str]:
    """Prints what is said about each of WAYS. Returns the violations."""
    violations = []
    config = Config(rollout=RolloutConfig(rewards=(FUNCTION,), reward_seconds=2.0, max_failed_rewards=1.0))
    with Rewarder.of(config) as rewarder:
        for way in WAYS:
            drawn = [
                Group(key=key, fields={"way": key}, answers=("a", "b"), tokens=(2, 2), ended=(True, True))
                for key in (way, "well")
            ]
            for number, each in enumerate(drawn):
                rewarder.submit(number, each)
            found, after = rewarder.collect()
            said = found.failure.reason if found.failure else f"rewards {list(found.rewards or ())}"
            print(f"{way:18}{said}")
            if (found.failure is None) != (way in GOOD) or (found.failure and found.failure.key != way):
                violations.append(f"{way}: {found}")
            if after.rewards != (1.0, 1.0):
                violations.append(f"the group after {way!r}: {after}")
    return violations


def check_groups(count: int, seed: int) -> list[str]:
    """Prints how many groups each built-in function rewarded, and why it did not. Returns the violations."""
    violations = []
    groups = [random_group(seed, number) for number in range(count)]
    print(f"{'function':14}{'rewarded':>10}{'reported':>10}{'seconds':>10}  reasons")
    for name in BUILT_IN:
        options = tuple(option for option in OPTIONS if option.startswith(f"{name}."))
        config = Config(
            rollout=RolloutConfig(rewards=(name,), reward_options=options, max_failed_rewards=1.0)
        )
        start, reasons, rewarded = time.perf_counter(), Counter[str](), 0
        with Rewarder.of(config) as rewarder:
            for number, group in enumerate(groups):
                rewarder.submit(number, group)
            for each in rewarder.collect():
                if each.failure:
                    reasons[each.failure.reason.partition(";")[0][:60]] += 1
                    expected = each.group.reference is None or name == "equals"
                    if not expected or "process" in each.failure.reason:
                        violations.append(f"{name}, {each.group}: {each.failure.reason}")
                    continue
                rewarded += 1
                least = -math.inf if name == "wer" else -1.0
                if not all(least <= reward <= 1.0 and math.isfinite(reward) for reward in each.rewards or ()):
                    violations.append(f"{name}, {each.group}: {each.rewards}")
        seconds = time.perf_counter() - start
        shown = ", ".join(f"{n} x {reason}" for reason, n in reasons.most_common(2))
        print(f"{name:14}{rewarded:>10}{sum(reasons.values()):>10}{seconds:>10.1f}  {shown}")
    return violations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="random groups")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    violations = check_settings()
    print()
    violations += check_functions()
    print()
    violations += check_groups(options.count, options.seed)
    print("\n".join(violations) or "every group is rewarded or reported")
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
