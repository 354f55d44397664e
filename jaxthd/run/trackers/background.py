"""Trackers run in threads of their own, and what goes wrong there never stops or delays a run."""

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

from jaxthd.run.trackers.tracker import Line, TrackedRun, Tracker

CLOSE_SECONDS = 60.0
"""Longest time that the end of a run waits for a tracker."""


class BackgroundTracker:
    """Opens a tracker and writes to it in a thread. Its first failure ends it, and is reported once.

    name: for messages. make: opens the tracker. say: prints a line; it is called by the thread that calls
    the methods of this class, which raise nothing. leave_behind: called where it does not end in time.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        say: Callable[[str], None],
        leave_behind: Callable[[], None] = lambda: None,
    ) -> None:
        self._name, self._say, self._leave_behind = name, say, leave_behind
        self._lines: SimpleQueue[Line | bool] = SimpleQueue()  # True, False: close; whether the run failed
        self._failure, self._told = "", False
        # A daemon: a tracker that hangs does not keep the process alive.
        self._thread = Thread(target=self._work, args=(make, run), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Hands a metrics line over, without waiting for the tracker."""
        self._tell()
        if not self._failure:
            self._lines.put(line)

    def close(self, *, failed: bool) -> None:
        """Waits until the tracker has all lines, at most CLOSE_SECONDS. failed: by an error."""
        self._lines.put(failed)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._failure = self._failure or f"it has not ended within {CLOSE_SECONDS:g} s"
        if self._failure:
            with suppress(Exception):
                self._leave_behind()
        self._tell()

    def _work(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        try:
            tracker = make(run)
            while not isinstance(line := self._lines.get(), bool):
                tracker.write(line)
            tracker.close(failed=line)
        except ImportError as error:
            self._failure = f"{error}; to install it: pip install 'jaxthd[{self._name}]'"
        except BaseException as error:  # libraries may raise SystemExit too
            # One that is left behind may fail of that.
            self._failure = self._failure or f"{type(error).__name__}: {error}"

    def _tell(self) -> None:
        if self._failure and not self._told:
            self._told = True
            self._say(
                f"warning: the tracker {self._name} has failed ({self._failure}). The run goes on without "
                "it: metrics.jsonl has every step, and the tracker gets them when the run is continued"
            )
