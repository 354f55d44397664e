"""Counts what this process gets done: calls of programs, exchanges, changes of what its time goes to.

A process that is alive and whose count stands still does not get on (jaxthd.run.watchdog).
"""

from itertools import count

_numbers = count(1)
_newest = 0


def beat() -> None:
    """Counts one more thing done."""
    global _newest
    _newest = next(_numbers)


def beats() -> int:
    """The count so far."""
    return _newest
