"""Computes the rewards of groups, in worker processes with a time limit.

Policy for failures: where a function raises, gives no usable numbers, takes too long or ends its process,
the group has no rewards at all. A number made up for one answer would shift the mean of the group, and so the
advantages of all its answers. Such groups are reported and counted; where their share is too large, the run
stops.

Of several processes of a run each computes a share of the groups, and all get all.
"""

import json
import math
import os
import pickle
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import jax

from jaxthd.config import Config
from jaxthd.data.child_process import Child, LostError
from jaxthd.errors import UserError
from jaxthd.parallel.processes import exchange
from jaxthd.rl.rewards.group import Group, Rewarded, RewardFailure
from jaxthd.rl.rewards.registry import RewardSetting, reward_settings

START_SECONDS = 60.0
"""Time limit for the start of a worker, and for the import of a function."""
FIRST_CALL_SECONDS = 60.0
"""Time limit for the trial call of a function, which may load something."""
WINDOW = 100
"""The newest groups, among which the share of failures is taken."""
SLICE_SECONDS = 30.0
"""Processes tell one another so often that they still wait for rewards. So slow rewards look like no process
that is stuck (jaxthd.parallel.processes.PATIENCE_SECONDS)."""
EXAMPLE = Group(
    key="a made-up example",
    reference="one two three",
    answers=("one two three", "one three", ""),
    tokens=(4, 3, 1),
    ended=(True, False, True),
)


class Rewarder(AbstractContextManager["Rewarder"]):
    """The reward functions of a run, in `workers` processes.

    seconds: the limit of one function for one group. folders: where users' modules are looked for, after
    sys.path. max_failed_share: see `collect`.

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
    ) -> None:
        self.settings, self.seconds = tuple(settings), seconds
        self._folders, self._max_failed_share = tuple(folders), max_failed_share
        self._groups: dict[int, Group] = {}
        self._own: dict[int, Future[Rewarded]] = {}
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
                self._try_out(first, setting)
        except BaseException:
            self.close()
            raise
        for worker in (first, *[None] * (workers - 1)):
            self._idle.put(worker)

    @classmethod
    def of(cls, config: Config) -> "Rewarder":
        """The functions of rollout.rewards, in a process for every second core of the machine. A process is
        started when a group waits for it. Raises UserError as the class does.
        """
        rollout = config.rollout
        return cls(
            reward_settings(config),
            seconds=rollout.reward_seconds,
            workers=min(rollout.prompts, max(1, (os.cpu_count() or 1) // 2)),
            folders=(os.getcwd(), *rollout.reward_folders),
            max_failed_share=config.data.max_skipped_share,
        )

    def close(self) -> None:
        """Kills the processes. Unfinished futures raise, and so does submit from then on."""
        self._end()
        self._threads.shutdown()

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, number: int, group: Group) -> Future[Rewarded] | None:
        """Computes the rewards of group `number` in a worker, while the caller goes on.

        Process number mod their count does so, the others return None: a function's result does not depend on
        the process (worker.py), so neither do the rewards.
        """
        self._groups[number] = group
        if number % jax.process_count() != jax.process_index():
            return None
        self._own[number] = self._threads.submit(self._compute, group)
        return self._own[number]

    def collect(self, *, are_counted: bool = True) -> list[Rewarded]:
        """Waits for all groups that were submitted since the last call; returns them by their numbers.

        All processes have submitted the same groups with the same numbers, and call it together.
        Raises UserError, in all processes, where more than max_failed_share * WINDOW of the newest WINDOW
        groups that are counted have failed; and where no worker starts, in that process, which ends the
        others too (jaxthd.parallel.processes).
        """
        groups, own = self._groups, self._own
        self._groups, self._own = {}, {}
        while not all(exchange(not wait(own.values(), SLICE_SECONDS).not_done)):
            pass
        shares = exchange([[number, *future.result()[1:]] for number, future in own.items()])
        of_all = {number: rest for share in shares for number, *rest in share}
        found = [_received(groups[number], *of_all[number]) for number in sorted(groups)]
        for each in found if are_counted else ():
            self._recent.append(each.failure is not None)
            if each.failure:
                self._check_share(each.failure)
        return found

    def _check_share(self, last: RewardFailure) -> None:
        failed = sum(self._recent)
        if failed > self._max_failed_share * WINDOW:
            raise UserError(
                f"{failed} of the last {len(self._recent)} groups have no rewards; expected at most "
                f"{self._max_failed_share:.0%} of {WINDOW} (data.max_skipped_share). The last one: the "
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

    def _try_out(self, worker: "_Worker", setting: RewardSetting) -> None:
        try:
            answer = worker.ask(setting, self._folders, EXAMPLE, max(FIRST_CALL_SECONDS, self.seconds))
        except LostError as lost:
            raise UserError(
                f"the reward function {setting.name} was called with {EXAMPLE.key!r}, and its process is "
                f"lost: {lost}; expected one that comes back: correct it"
            ) from lost
        kind = answer.get("kind")
        if kind == "settings":
            raise UserError(answer["error"])
        if kind in ("call", "result"):
            raise UserError(
                f"the reward function {setting.name} was called with {EXAMPLE.key!r}: {answer['error']}: "
                "correct it"
            )
        if kind == "raised" and not setting.is_built_in:
            self.warnings.append(RewardFailure(setting.name, EXAMPLE.key, answer["error"]))

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


def _received(group: Group, rewards: Any, by_function: dict[str, Any], failure: Any) -> Rewarded:
    """The Rewarded of a group, from its fields as JSON brings them."""
    return Rewarded(
        group,
        None if rewards is None else tuple(rewards),
        {name: tuple(values) for name, values in by_function.items()},
        None if failure is None else RewardFailure(*failure),
    )


def _end(threads: ThreadPoolExecutor, running: "set[_Worker]") -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in list(running):
        worker.kill()


class _Worker:
    """One process; its program is jaxthd.rl.rewards.worker."""

    def __init__(self) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",  # the number of processes is the number of cores to use
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",  # the order of a set is the same in every process and every run
            "JAX_PLATFORMS": "cpu",  # the accelerators are the training's
        }
        self._child = Child("-m", "jaxthd.rl.rewards.worker", **environment)
        self._known: list[str] = []

    def wait_for_start(self) -> None:
        """Raises LostError where the process does not start."""
        self._child.receive(START_SECONDS)

    def ask(
        self, setting: RewardSetting, folders: Sequence[str], group: Group, seconds: float
    ) -> dict[str, Any]:
        """The answer of jaxthd.rl.rewards.worker for the group. Raises LostError."""
        if setting.name not in self._known:
            found = self._request((len(self._known), setting, folders, START_SECONDS))
            if "error" in found:
                return found
            self._known.append(setting.name)
        return self._request((self._known.index(setting.name), group, seconds))

    def kill(self) -> str:
        """Kills the process; returns how it ended."""
        return self._child.kill()

    def _request(self, request: tuple[Any, ...]) -> dict[str, Any]:
        self._child.send(pickle.dumps(request))
        answer: dict[str, Any] = json.loads(self._child.receive(request[-1]))
        return answer
