"""SIGTERM and Ctrl-C ask a run to stop where it can be continued."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yields a function: whether SIGTERM or SIGINT has arrived. A second one acts as it does elsewhere.

    Outside the main thread, where Python takes no signals, it never has.
    """
    arrived = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield arrived.is_set
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        arrived.set()
        signal.signal(number, before[number])

    before: dict[int, Any] = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
