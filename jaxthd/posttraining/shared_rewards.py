"""The rewards of groups that all processes hold: each process computes a share of them, and all get all."""

from concurrent.futures import Future, wait
from typing import Any

import jax

from jaxthd.parallel.processes import exchange
from jaxthd.rewards.group import Group, Rewarded, RewardFailure
from jaxthd.rewards.rewarder import Rewarder

SLICE_SECONDS = 30.0
"""Processes tell one another so often that they still wait for rewards. So slow rewards look like no process
that is stuck (jaxthd.parallel.processes.PATIENCE_SECONDS)."""


class SharedRewards:
    """Group number i is computed by process i mod their number. A function's result does not depend on the
    process (jaxthd.rewards.worker), so neither do the rewards.

    All processes submit the same groups with the same numbers, and then collect.
    """

    def __init__(self, rewarder: Rewarder) -> None:
        self._rewarder = rewarder
        self._groups: dict[int, Group] = {}
        self._own: dict[int, Future[Rewarded]] = {}

    def submit(self, number: int, group: Group) -> None:
        """Computes the group's rewards, here or in another process, while the caller goes on."""
        self._groups[number] = group
        if number % jax.process_count() == jax.process_index():
            self._own[number] = self._rewarder.submit(group)

    def collect(self, *, are_counted: bool = True) -> list[Rewarded]:
        """Waits for all groups that were submitted since the last call; returns them by their numbers.

        are_counted: whether failures count in rollout.max_failed_rewards.
        Raises UserError as Rewarder.count does, in all processes; and where no worker starts, in that
        process, which ends the others too (jaxthd.parallel.processes).
        """
        groups, own = self._groups, self._own
        self._groups, self._own = {}, {}
        while not all(exchange(not wait(own.values(), SLICE_SECONDS).not_done)):
            pass
        shares = exchange([[number, *_sent(future.result())] for number, future in own.items()])
        of_all = {number: rest for share in shares for number, *rest in share}
        found = [_received(groups[number], *of_all[number]) for number in sorted(groups)]
        if are_counted:
            self._rewarder.count(found)
        return found


def _sent(rewarded: Rewarded) -> tuple[Any, ...]:
    """What other processes lack, as JSON has it without loss."""
    return rewarded.rewards, rewarded.by_function, rewarded.failure


def _received(group: Group, rewards: Any, by_function: dict[str, Any], failure: Any) -> Rewarded:
    return Rewarded(
        group,
        None if rewards is None else tuple(rewards),
        {name: tuple(values) for name, values in by_function.items()},
        None if failure is None else RewardFailure(*failure),
    )
