"""Signals and the time limit ask a run to stop at a point from which it can be continued."""

import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from jaxthd.data.child_process import OF_THE_RUN
from jaxthd.files.unread_output import drop_unread_output
from jaxthd.parallel.processes import exchange

ALWAYS = (signal.SIGTERM, signal.SIGINT)
UNLESS_HANDLED = tuple(number for number in OF_THE_RUN if number not in ALWAYS)
"""A closed terminal, and what queues send before a time limit. Each by itself would end the process. nohup
ignores SIGHUP, and a program of the user's own may handle any of them: then they are left as they are."""
STOPPED = os.EX_TEMPFAIL
"""Exit status of a run that has stopped before its last step, and that the same command continues: 75, which
means "try again" in sysexits.h."""
READER_SECONDS = 0.1
"""The time in which the reader of a pipe, such as tee, ends of a signal that was sent to it too."""


class StopRequests(AbstractContextManager["StopRequests"]):
    """Says why a run should stop: a context manager, whose `listen` begins to handle signals.

    It lasts until all is written and sent, so that signals which follow the first (the terminal's
    SIGHUP and the shell's; SIGTERM after SIGUSR1) do not end the process before. Only Ctrl-C does, after any
    first signal. Outside the main thread, where Python receives no signals, none arrives.
    max_seconds: a run should also stop so many seconds after `began` (time.monotonic(); None: now); 0: never.
    """

    def __init__(self, max_seconds: float = 0.0, began: float | None = None) -> None:
        self._max_seconds = max_seconds
        self.began = time.monotonic() if began is None else began
        self._arrived = ""
        self._before: dict[int, Any] = {}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def listen(self) -> None:
        """Handles signals from now on."""
        if threading.current_thread() is threading.main_thread():
            default = [n for n in UNLESS_HANDLED if signal.getsignal(n) is signal.SIG_DFL]
            self._before |= {n: signal.signal(n, self._on_signal) for n in (*ALWAYS, *default)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._arrived = self._arrived or signal.Signals(number).name
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        drop_unread_output()

    def __call__(self) -> str:
        """Returns why the run should stop, in all of its processes; "" if it should not.

        All processes call it, equally often: a signal to one of them stops all.
        """
        is_late = bool(self._max_seconds) and time.monotonic() - self.began >= self._max_seconds
        own = f"by {self._arrived}" if self._arrived else ""
        own = own or f"by train.max_seconds {self._max_seconds:g}" * is_late
        reason = next((reason for reason in exchange(own) if reason), "")
        if reason:
            time.sleep(READER_SECONDS)
        drop_unread_output()
        return reason
