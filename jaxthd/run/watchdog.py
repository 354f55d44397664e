"""Says where a run stands that does not get on, and which process holds it up.

A thread in each process looks every few seconds whether something was done (jaxthd.parallel.beats). Of
several processes each tells the others, through the key-value store, how far it is and where its main thread
stands. So a process that is stopped, or whose disk hangs, is named with the stack that it had last. The store
is in process 0: while that is stopped, a second thread waits for it, and the first one names it.
"""

import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import NamedTuple

from jaxthd.parallel.beats import beats
from jaxthd.parallel.processes import is_first, process_id, reports, tell

TICK_SECONDS = 0.25
"""The lateness of these ticks says whether the process gets the processor time that it asks for."""
REPORT_SECONDS = 3.0
STALL_SECONDS = 30.0
"""A process that gets nothing done for so long, and for three times as long as ever before, stands still."""
SILENT_SECONDS = 12.0
"""A process that tells nothing for so long is stopped, or its machine or network is gone. Shorter than
jaxthd.parallel.processes.HEARTBEAT_SECONDS, after which all end."""
LAST_SECONDS = 20.0
"""A process that is silent for so long is named even where this one is busy, as with compiling: jax ends all
soon."""
LATE = 0.5
"""A process that is this share of the time late is slow, where the median is less than half of that."""
SAY_AGAIN_SECONDS = 60.0
FRAMES = 8
"""Frames of a stack that are told, the innermost ones."""
_COMPILERS = (  # parts of the files of frames; tracing and compiling may take minutes, and are no stall
    "jax/_src/compiler",
    "jax/_src/interpreters",
    "jax/_src/pjit",
    "jax/_src/compilation_cache",
)


class Report(NamedTuple):
    """The progress of a process. beats: what it has got done. still: seconds since the last. usual: the
    longest pause before. cause: what its time goes to. late: share of the last seconds that it was late.
    stack: of its main thread, the innermost frame last."""

    number: int
    name: str
    beats: int
    still: float
    usual: float
    cause: str
    late: float
    stack: list[str]

    @property
    def is_stalled(self) -> bool:
        """Whether it gets nothing done for far longer than ever before."""
        return self.still > max(STALL_SECONDS, 3 * self.usual)


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches the thread that makes it, until it is left. A context manager.

    cause: what the run's time goes to now. stalled: receives the seconds of each pause that was a stall.
    say: prints a line.
    """

    def __init__(
        self,
        cause: Callable[[], str],
        stalled: Callable[[float], None] = lambda seconds: None,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._cause, self._stalled, self._say = cause, stalled, say
        self._watched, self._name = threading.get_ident(), f"pid {os.getpid()} on {socket.gethostname()}"
        self._beats, self._since, self._usual, self._number = beats(), time.monotonic(), 0.0, 0
        self._compiled, self._is_stalled = 0.0, False
        self._heard: dict[int, tuple[int, float]] = {}
        self._said: dict[str, float] = {}
        self._end = threading.Event()
        self._found: dict[int, Report] = {}
        self._told: SimpleQueue[Report | None] = SimpleQueue()
        targets = self._watch, self._converse
        self._threads = [threading.Thread(target=x, name="watchdog", daemon=True) for x in targets]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._told.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def _watch(self) -> None:
        # The first report is due at once: a process that is stopped before it is known to nobody.
        late, reported = 0.0, time.monotonic() - REPORT_SECONDS
        while True:
            began = time.monotonic()
            if self._end.wait(TICK_SECONDS):
                return
            now = time.monotonic()
            late += max(now - began - TICK_SECONDS, 0.0)
            self._count(now)
            is_known = is_first() or self._found  # until process 0 is heard of, every tick asks for it
            if now - reported >= REPORT_SECONDS * bool(is_known):
                self._judge(self._report(now, late / max(now - reported, REPORT_SECONDS)), now)
                late, reported = 0.0, now

    def _count(self, now: float) -> None:
        """Notes what was done since the last look."""
        if (found := beats()) == self._beats:
            return
        pause = now - self._since
        if self._is_stalled:
            self._stalled(pause)
            self._say(f"it goes on, after {pause:.0f} s")
        elif self._compiled < self._since:
            self._usual = max(self._usual, pause)
        self._beats, self._since, self._is_stalled = found, now, False

    def _report(self, now: float, late: float) -> Report:
        self._number += 1
        frame = sys._current_frames().get(self._watched)
        frames = traceback.extract_stack(frame) if frame else []
        if any(part in x.filename for x in frames for part in _COMPILERS):
            self._compiled = now
        still = now - max(self._since, self._compiled)
        stack = [f"{x.filename}:{x.lineno} in {x.name}" for x in frames[-FRAMES:]]
        return Report(self._number, self._name, self._beats, still, self._usual, self._cause(), late, stack)

    def _judge(self, own: Report, now: float) -> None:
        """Says what holds the run up, if anything does."""
        if self._told.empty():
            self._told.put(own)
        if own.is_stalled and not self._is_stalled:
            self._is_stalled = True
            self._say(f"{self._of(process_id())} {_standing(own)}")
        self._judge_others(self._found, own, now)

    def _converse(self) -> None:
        """Tells the others of this process, and hears of them."""
        while own := self._told.get():
            tell("watchdog", own)
            # Process 0 alone reads what all tell; the others do where it may be the one that is behind.
            of_all = is_first() or own.still > SILENT_SECONDS
            with suppress(Exception):  # process 0 is gone: jax ends this process, and says so
                self._found = {i: Report(*report) for i, report in reports("watchdog", of_all=of_all).items()}

    def _judge_others(self, found: Mapping[int, Report], own: Report, now: float) -> None:
        for process, seconds in self._silent(found, own, now).items():
            report = found[process]
            text = f"tells nothing for {seconds:.0f} s: it is stopped, or cut off; it was {report.cause}"
            self._once(f"{self._of(process, report)} {text}, at{_stack(report)}", now)
        first = min((report.beats for report in found.values()), default=0)
        stalled = all(report.is_stalled or report.beats == first for report in found.values())
        behind = [i for i, report in found.items() if report.beats == first and report.is_stalled]
        if stalled and behind and len(behind) < len(found):
            for process in behind:
                report = found[process]
                self._once(f"{self._of(process, report)} holds the others up: {_standing(report)}", now)
        usual = statistics.median(report.late for report in found.values()) if found else 0.0
        for process, report in found.items():
            if report.late > LATE and usual < LATE / 2:
                text = f"is slow: it waits {report.late:.0%} of the time for a processor; what else runs?"
                self._once(f"{self._of(process, report)} {text}", now, key=f"slow {process}")

    def _silent(self, found: Mapping[int, Report], own: Report, now: float) -> dict[int, float]:
        """Seconds for which processes have told nothing, where these are too many."""
        seconds = {}
        for process, report in found.items():
            number, heard = self._heard.get(process, (-1, now))
            self._heard[process] = (report.number, now if report.number != number else heard)
            silent = now - self._heard[process][1]
            if silent > (SILENT_SECONDS if own.still > SILENT_SECONDS / 2 else LAST_SECONDS):
                seconds[process] = silent
        if 0 in seconds:  # nobody is heard without it
            return {} if process_id() == 0 else {0: seconds[0]}
        return seconds

    def _once(self, text: str, now: float, key: str = "") -> None:
        key = key or text[:20]
        if now - self._said.get(key, -SAY_AGAIN_SECONDS) >= SAY_AGAIN_SECONDS:
            self._said[key] = now
            self._say(text)

    def _of(self, process: int, report: Report | None = None) -> str:
        return f"warning: process {process} ({report.name if report else self._name})"


def _standing(report: Report) -> str:
    before = f"at most {report.usual:.1f} s before" if report.usual else "nothing to compare with yet"
    text = f"gets nothing done for {report.still:.0f} s ({before}) while {report.cause.replace('_', ' ')}"
    return f"{text}; its main thread is at{_stack(report)}"


def _stack(report: Report) -> str:
    return "".join(f"\n    {frame}" for frame in report.stack)
