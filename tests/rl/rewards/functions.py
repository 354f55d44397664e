"""Reward functions for tests. Worker processes import this."""

import os
import random
import sys
import time

from jaxthd.rewards import Group  # the first address, which users' modules have


def words(group: Group, *, scale: float = 1.0, separator: str = " ") -> list[float]:
    return [scale * len([w for w in answer.split(separator) if w]) for answer in group.answers]


def where(group: Group) -> list[float]:
    """Whether jax is imported; the process; its session; what it draws; the order of a set."""
    order = list({"some", "more", "words"}).index("more")
    imported = float("jax" in sys.modules)
    found = [imported, float(os.getpid()), float(os.getsid(0)), random.random(), float(order)]
    return found[: len(group.answers)]


def slow_first(group: Group) -> list[float]:
    """Groups finish in another order than they were submitted."""
    time.sleep(0.1 if group.key == "0" else 0.0)
    return [random.random() for _ in group.answers]
