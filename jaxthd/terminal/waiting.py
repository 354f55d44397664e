"""Progress of something that tells nothing of it meanwhile, such as a compilation: how long it has taken."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PLAIN_SECONDS = 15.0
"""Seconds between two lines where standard error is no terminal."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """While the inside runs, standard error says what is waited for: on a terminal one line with the seconds,
    which goes at the end; elsewhere a line now and then.
    """
    began, done, is_live = time.monotonic(), threading.Event(), sys.stderr.isatty()

    def show() -> None:
        """Says it again and again, until the inside is done."""
        while not done.wait(1.0 if is_live else PLAIN_SECONDS):
            text = f"{what}: {time.monotonic() - began:.0f} s"
            print(f"\r{text}" if is_live else text, end="" if is_live else "\n", file=sys.stderr, flush=True)

    print(what, end="" if is_live else "\n", file=sys.stderr, flush=True)
    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
