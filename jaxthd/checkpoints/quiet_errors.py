"""Keeps a failed save or restore to one message: orbax would add a traceback for every thread and array."""

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences what orbax and asyncio log about errors that orbax also raises.

    tensorstore's threads call the event loop of a failed save after it was closed, and coroutines that nobody
    awaits any more complain when they are collected. Neither can be caught: Python hands such errors to
    sys.unraisablehook alone, so that is replaced here; all others are passed on. Nothing else in jaxthd uses
    asyncio.
    """
    loggers, report = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or not {"orbax", "asyncio"} & set(Path(record.pathname).parts)

    def report_others(found: Any) -> None:
        if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
            report(found)

    for logger in loggers:
        logger.addFilter(is_wanted)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
        for logger in loggers:
            logger.removeFilter(is_wanted)
