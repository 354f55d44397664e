"""SIGTERM and Ctrl-C ask a run to stop at a point from which it can be continued."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxthd.parallel.processes import exchange


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGTERM or SIGINT has arrived in any process of the run.

    All processes call that function, equally often. A second signal acts as it does without this.
    Outside the main thread, where Python receives no signals, none arrives.
    """
    arrived = threading.Event()

    def asked() -> bool:
        return any(exchange(arrived.is_set()))

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
