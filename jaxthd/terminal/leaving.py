"""The end of a command: a library that was used may have exit hooks that wait for ever; the process does not.

W&B, for one, waits for a process of its own when Python exits.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

EXIT_SECONDS = 10.0
"""Seconds that Python may take to exit once the command is done and all is saved."""

_why: list[str] = []
_began: list[float] = []


def command_began() -> float:
    """When this process began, of time.monotonic(), if it is one of a command; else now."""
    return _began[0] if _began else time.monotonic()


def _process_began() -> float:
    """When the kernel started this process; now, where that is not known."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError, AttributeError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    return now


def may_hang(why: str) -> None:
    """From now on the end of this process is bounded. why: what may keep it alive, for the message."""
    _why.append(why)


@contextmanager
def ends_in_time() -> Iterator[None]:
    """Around a whole command: the process ends EXIT_SECONDS after it, if something was used that may hang.

    The exit status is that of the command.
    """
    status = 0
    _began[:] = [_process_began()]
    try:
        yield
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException:
        status = 1
        raise
    finally:
        if _why:
            threading.Thread(target=_end, args=(status,), name="bounded exit", daemon=True).start()


def _end(status: int) -> None:
    time.sleep(EXIT_SECONDS)
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        print(f"warning: {', '.join(_why)} kept the process alive: ended", file=sys.stderr, flush=True)
    os._exit(status)
