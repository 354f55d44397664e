"""Where a run's time goes, cause by cause, over all commands that continued it.

Kept in WORKDIR/goodput.json, and in every line of metrics.jsonl.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jax.monitoring

from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import read_lines
from jaxthd.parallel.beats import beat
from jaxthd.parallel.processes import is_first
from jaxthd.run.metrics import CAUSES

P = ParamSpec("P")
R = TypeVar("R")
FILE = "goodput.json"
RUN_AGAIN = ("stepping", "drawing", "data_wait", "reward_wait", "validating")
"""Causes of time that was for nothing where its steps run again."""
_COMPILING = "/jax/core/compile/"
"""Prefix of the events with which jax reports the time of tracing, lowering and compiling."""


class TimeAccount(AbstractContextManager["TimeAccount"]):
    """Every second of the command belongs to one cause (jaxthd.run.metrics.CAUSES). A context manager.

    began: when the command did, of time.monotonic(). Time counts as starting until the first switch. What the
    thread that made it compiles counts as compiling, whatever else it happens in. What the command does at
    its end counts as the last cause.
    """

    def __init__(self, workdir: Path, began: float) -> None:
        self._path, self._settled, self.began = workdir / FILE, began, began
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause, self._is_continued, self._stalled = "starting", False, 0.0
        self._compiled: list[tuple[float, float]] = []  # spans since the last settling, apart, in order
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def continued(self, lines_file: Path, last_step: int) -> None:
        """Goes on from the account of the commands before. Call it before lines are removed from the metrics.

        lines_file: metrics.jsonl. last_step: of the restored checkpoint. The time of later steps is lost.
        """
        self._is_continued = True
        if not is_first():
            return
        lines = [line for line in read_lines(lines_file) if "goodput" in line]
        newest = max(
            (_seconds_of(lines[-1]) if lines else {}, stored_seconds(self._path.parent)),
            key=lambda x: sum(x.values()),
        )
        kept = [line for line in lines if 0 < line["step"] <= last_step]
        before = dict.fromkeys(CAUSES, 0.0) | newest
        intact = dict.fromkeys(CAUSES, 0.0) | (_seconds_of(kept[-1]) if kept else {})
        for cause in RUN_AGAIN:
            lost = max(before[cause] - intact[cause], 0.0)
            before[cause] -= lost
            before["lost"] += lost
        for cause, seconds in before.items():
            self._seconds[cause] += seconds
        self._write()

    def switch(self, cause: str) -> None:
        """From now on, time belongs to this cause."""
        beat()
        self._settle()
        self._cause = cause

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """The time inside belongs to this cause."""
        outside = self._cause
        self.switch(cause)
        try:
            yield
        finally:
            self.switch(outside)

    def timed(self, cause: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose time belongs to this cause."""

        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            """Calls the function; the time of the call belongs to the cause."""
            with self.during(cause):
                return function(*args, **kwargs)

        return inside

    @contextmanager
    def loading(self, work: Any) -> Iterator[None]:
        """Inside, the next batch is loaded while the devices compute `work`, a tree of arrays.

        The devices wait for data from when they are done until it is there.
        """
        done: list[float] = []

        def wait() -> None:
            """Notes when the devices are done with `work`."""
            with suppress(Exception):  # an error of the step is raised where its results are read
                jax.block_until_ready(work)
                done.append(time.monotonic())

        waiting = threading.Thread(target=wait, name="end of the step", daemon=True)
        waiting.start()
        try:
            yield
        finally:
            self.switch(self._cause)
            if done:
                self.move(self._settled - done[0], "data_wait")

    def move(self, seconds: float, cause: str) -> None:
        """So many of the present cause's seconds belong to another one."""
        self._settle()
        seconds = min(max(seconds, 0.0), self._seconds[self._cause])
        self._seconds[self._cause] -= seconds
        self._seconds[cause] += seconds

    @property
    def cause(self) -> str:
        """The cause that time belongs to now."""
        return self._cause

    def stalled(self, seconds: float) -> None:
        """So many seconds before now were a stall, whatever they belonged to. Any thread may call it."""
        self._stalled += seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each cause until now, since the run began."""
        self._settle()
        return dict(self._seconds)

    def __exit__(self, *_: object) -> None:
        self._settle()
        jax.monitoring.unregister_event_duration_listener(self._listen)
        if is_first() and self._is_continued:
            self._write()

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(_COMPILING) and threading.get_ident() == self._thread:
            end = time.monotonic()
            start = max(end - duration_secs, self._settled)
            # What compiles may compile something else inside: that is reported first.
            while self._compiled and self._compiled[-1][1] > start:
                start = min(start, self._compiled.pop()[0])
            self._compiled.append((start, end))

    def _settle(self) -> None:
        """Gives the time since the last call to the present cause, but what was compiling."""
        now = time.monotonic()
        compiling = sum(end - start for start, end in self._compiled)
        self._seconds["compiling"] += compiling
        self._seconds[self._cause] += max(now - self._settled - compiling, 0.0)
        stalled, self._stalled = min(self._stalled, self._seconds[self._cause]), 0.0
        self._seconds[self._cause] -= stalled
        self._seconds["stalled"] += stalled
        self._settled, self._compiled = now, []

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self._seconds) + "\n")


def stored_seconds(workdir: Path) -> dict[str, float]:
    """The seconds of each cause as the newest command has left them; none where there is no account."""
    try:
        found = json.loads((workdir / FILE).read_text())
        return {cause: float(found.get(cause, 0.0)) for cause in CAUSES}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _seconds_of(line: Mapping[str, Any]) -> dict[str, float]:
    return {cause: float(line.get(f"{cause}_seconds") or 0.0) for cause in CAUSES}
