"""Computes the rewards of groups, in worker processes with a time limit.

Policy for failures: where a function raises, gives no usable numbers, takes too long or ends its process,
the group has no rewards at all. A number made up for one answer would shift the mean of the group, and so the
advantages of all its answers. Such groups are reported and counted; where their share is too large, the run
stops.
"""

import json
import math
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from jaxthd.config import Config
from jaxthd.data.child_process import Child, LostError
from jaxthd.errors import UserError
from jaxthd.rewards.group import Group, Rewarded, RewardFailure
from jaxthd.rewards.registry import RewardSetting, reward_settings

START_SECONDS = 60.0
"""Time limit for the start of a worker, and for the import of a function."""
FIRST_CALL_SECONDS = 60.0
"""Time limit for the trial call of a function, which may load something."""
WINDOW = 100
"""The newest groups, among which the share of failures is taken."""
EXAMPLE = Group(
    key="a made-up example",
    reference="one two three",
    answers=("one two three", "one three", ""),
    tokens=(4, 3, 1),
    ended=(True, False, True),
)


class Rewarder:
    """The reward functions of a run, in `workers` processes. Several threads may submit groups.

    seconds: the limit of one function for one group. folders: where users' modules are looked for, after
    sys.path. max_failed_share: see `collect`. on_failure: called with each failure as it is collected.
    example: a group of the run's own data, if there is one, for the trial call of each function.

    It starts one process and tries each function, since a function with a mistake would otherwise be found
    only after the first rollout. Raises UserError for a function that is not found, does not accept its
    settings, uses an unknown name or attribute of the group, returns something else than one number for
    each answer, or does not come back. What else a function raises on the made-up example may be due to that
    example: it is no error, but is in `warnings`.
    """

    def __init__(
        self,
        settings: Sequence[RewardSetting],
        *,
        seconds: float = 10.0,
        workers: int = 1,
        folders: Sequence[str] = (),
        max_failed_share: float = 0.1,
        on_failure: Callable[[RewardFailure], object] | None = None,
        example: Group | None = None,
    ) -> None:
        self.settings, self.seconds = tuple(settings), seconds
        self._folders, self._on_failure = tuple(folders), on_failure
        self._max_failed_share = max_failed_share
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._threads = ThreadPoolExecutor(workers, "rewards")
        self._running: set[_Worker] = set()
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()  # one for each thread; None: to be started
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, _end, self._threads, self._running)
        self.warnings: list[RewardFailure] = []
        try:
            first = self._start()
            for setting in self.settings:
                self._try_out(first, setting, example or EXAMPLE)
        except BaseException:
            self.close()
            raise
        for worker in (first, *[None] * (workers - 1)):
            self._idle.put(worker)

    @classmethod
    def of(cls, config: Config, **more: Any) -> "Rewarder":
        """The functions of rollout.rewards. more: on_failure, example. Raises UserError as the class does."""
        rollout = config.rollout
        return cls(
            reward_settings(config),
            seconds=rollout.reward_seconds,
            workers=rollout.reward_workers,
            folders=(os.getcwd(), *rollout.reward_folders),
            max_failed_share=rollout.max_failed_rewards,
            **more,
        )

    def close(self) -> None:
        """Kills the processes. Unfinished futures raise, and so does submit from then on."""
        self._end()
        self._threads.shutdown()

    def __enter__(self) -> "Rewarder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, group: Group) -> Future[Rewarded]:
        """Computes the group's rewards in a worker, while the caller goes on."""
        return self._threads.submit(self._compute, group)

    def collect(self, submitted: Iterable[Future[Rewarded]]) -> list[Rewarded]:
        """Waits for groups that were submitted, counts them, and returns them in the order given.

        Raises UserError as `count` does, or where no worker starts.
        """
        found = []
        for each in submitted:
            found.append(each.result())
            self.count(found[-1:])
        return found

    def count(self, rewarded: Iterable[Rewarded]) -> None:
        """Takes groups among the newest ones, of which not too many may have failed.

        Raises UserError where more than max_failed_share * WINDOW of the newest WINDOW groups have failed.
        """
        for each in rewarded:
            self._recent.append(each.failure is not None)
            if each.failure:
                if self._on_failure:
                    self._on_failure(each.failure)
                self._check_share(each.failure)

    def _check_share(self, last: RewardFailure) -> None:
        failed = sum(self._recent)
        if failed > self._max_failed_share * WINDOW:
            raise UserError(
                f"{failed} of the last {len(self._recent)} groups have no rewards; expected at most "
                f"{self._max_failed_share:.0%} of {WINDOW} (rollout.max_failed_rewards). The last one: the "
                f"function {last.function}, prompt {last.key!r}: {last.reason}. Correct the function or "
                "rollout.rewards, or raise rollout.reward_seconds if it is slow"
            )

    def _compute(self, group: Group) -> Rewarded:
        worker = self._idle.get()
        by_function: dict[str, tuple[float, ...]] = {}
        try:
            for setting in self.settings:
                try:
                    worker = worker or self._start()
                    answer = worker.ask(setting, self._folders, group, self.seconds)
                except LostError as lost:
                    self._discard(worker)
                    worker = None
                    answer = {"error": f"its process is lost: {lost}"}
                if "error" in answer:
                    failure = RewardFailure(setting.name, group.key, answer["error"])
                    return Rewarded(group, None, {}, failure)
                by_function[setting.name] = tuple(answer["values"])
        finally:
            self._idle.put(worker)
        return self._weighted(group, by_function)

    def _weighted(self, group: Group, by_function: dict[str, tuple[float, ...]]) -> Rewarded:
        sums = tuple(
            sum((setting.weight * by_function[setting.name][i] for setting in self.settings), 0.0)
            for i in range(len(group.answers))
        )
        if all(map(math.isfinite, sums)):
            return Rewarded(group, sums, by_function)
        reason = f"the weighted sums are {list(sums)}; expected finite numbers"
        return Rewarded(group, None, {}, RewardFailure(self.settings[-1].name, group.key, reason))

    def _try_out(self, worker: "_Worker", setting: RewardSetting, example: Group) -> None:
        try:
            answer = worker.ask(setting, self._folders, example, max(FIRST_CALL_SECONDS, self.seconds))
        except LostError as lost:
            raise UserError(
                f"the reward function {setting.name} was called with {example.key!r}, and its process is "
                f"lost: {lost}; expected one that comes back: correct it"
            ) from lost
        kind = answer.get("kind")
        if kind == "settings":
            raise UserError(answer["error"])
        if kind in ("call", "result"):
            raise UserError(
                f"the reward function {setting.name} was called with {example.key!r}: {answer['error']}: "
                "correct it"
            )
        if kind == "raised" and not (setting.is_built_in and example is EXAMPLE):
            self.warnings.append(RewardFailure(setting.name, example.key, answer["error"]))

    def _start(self) -> "_Worker":
        worker = _Worker()
        self._running.add(worker)
        try:
            if not self._end.alive:  # closed meanwhile, which did not see this process
                raise LostError(worker.kill())
            worker.wait_for_start()
        except LostError as lost:
            self._discard(worker)
            raise UserError(
                f"a worker process for rewards did not start ({lost}; it may say more above); correct the "
                "Python environment"
            ) from lost
        return worker

    def _discard(self, worker: "_Worker | None") -> None:
        self._running.discard(worker)
        if not self._end.alive:
            raise RuntimeError("the workers for rewards are closed")


def _end(threads: ThreadPoolExecutor, running: "set[_Worker]") -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in list(running):
        worker.kill()


class _Worker:
    """One process; its program is jaxthd.rewards.worker."""

    def __init__(self) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",  # the number of processes is the number of cores to use
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # the order of a set is the same in every process and every run
            "JAX_PLATFORMS": "cpu",  # the accelerators are the training's
        }
        self._child = Child("-m", "jaxthd.rewards.worker", **environment)
        self._known: list[str] = []

    def wait_for_start(self) -> None:
        """Raises LostError where the process does not start."""
        self._child.receive(START_SECONDS)

    def ask(
        self, setting: RewardSetting, folders: Sequence[str], group: Group, seconds: float
    ) -> dict[str, Any]:
        """What jaxthd.rewards.worker answers for the group. Raises LostError."""
        if setting.name not in self._known:
            found = self._request((len(self._known), setting, folders, START_SECONDS))
            if "error" in found:
                return found
            self._known.append(setting.name)
        return self._request((self._known.index(setting.name), group, seconds))

    def kill(self) -> str:
        return self._child.kill()

    def _request(self, request: tuple[Any, ...]) -> dict[str, Any]:
        self._child.send(pickle.dumps(request))
        answer: dict[str, Any] = json.loads(self._child.receive(request[-1]))
        return answer
