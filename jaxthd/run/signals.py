"""SIGTERM and Ctrl-C ask a run to stop at a point from which it can be continued."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxthd.parallel.processes import exchange


@contextmanager
def stop_requested(max_seconds: float = 0.0, start: float | None = None) -> Iterator[Callable[[], str]]:
    """Yields a function that says why the run should stop, "" if it should not.

    It should once SIGTERM or SIGINT has arrived in any process of the run, and max_seconds (0: never) after
    `start` (time.monotonic(); None: now) in any. All processes call the function, equally often. A second
    signal acts as it does without this.
    Outside the main thread, where Python receives no signals, none arrives.
    """
    arrived, began = threading.Event(), time.monotonic() if start is None else start

    def asked() -> str:
        is_late = bool(max_seconds) and time.monotonic() - began >= max_seconds
        reason = (
            "by a signal" if arrived.is_set() else f"by train.max_seconds {max_seconds:g}" if is_late else ""
        )
        return next((reason for reason in exchange(reason) if reason), "")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        arrived.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
