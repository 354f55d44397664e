"""Standard output and error that nobody can read any more: a terminal was closed, or a pipe's reader ended.

A command whose results are in files goes on without them, as it does under nohup.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

OUTPUTS = (1, 2)
"""File descriptors of standard output and standard error."""
_GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing to a pipe without a reader, and to a terminal that was closed."""


def drop_unread_output() -> None:
    """Leads standard output and error nowhere once nobody can read them. Otherwise the next line that is
    printed would raise OSError.
    """
    for output in OUTPUTS:
        poll = select.poll()
        poll.register(output, 0)  # errors and hang-ups are always reported
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            _drop(output)


def _drop(output: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), output)
    if output == 1:  # where standard error has gone too, its own write leads it nowhere
        text = "nobody reads standard output any more (a closed pipe or terminal): this command goes on"
        with suppress(OSError):
            print(f"warning: {text} without it", file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """A file descriptor whose writes lead nowhere from the first on that nobody can read."""

    def write(self, data: Any) -> int:
        """Writes the bytes; returns their number."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            _drop(self.fileno())
            return super().write(data)


def keep_going_unread() -> None:
    """From now on a print that nobody can read raises nothing in this process.

    Standard streams that something else has replaced, such as a notebook or a test, are left alone.
    """
    sys.stdout, sys.stderr = _kept(sys.stdout, sys.__stdout__), _kept(sys.stderr, sys.__stderr__)


def _kept(stream: Any, original: Any) -> Any:
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):  # what it still holds is lost where nobody can read it
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        # Under PYTHONUNBUFFERED a stream writes through, but not through the buffer that is around this one:
        # a warning would be lost where the process is killed.
        line_buffering=stream.line_buffering or stream.write_through,
        write_through=stream.write_through,
    )


@contextmanager
def goes_on_unread() -> Iterator[None]:
    """Around a command, or as its decorator: as keep_going_unread, until it ends."""
    before = sys.stdout, sys.stderr
    keep_going_unread()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # closed by somebody else
                stream.flush()
        sys.stdout, sys.stderr = before
