"""Jitted functions that know how many programs they have, and which of these came from the cache on disk."""

import functools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.monitoring

from jaxthd.parallel.beats import beat

_READ = "/jax/compilation_cache/cache_hits"
"""The event by which jax reports that a program was read from the cache on disk in place of compiling it."""
_reads = threading.local()


class ProgramCount(NamedTuple):
    """Programs since the command started. made: all. read: those of them that were read from the cache."""

    made: int = 0
    read: int = 0

    def text(self, of: str = "") -> str:
        """The count for people, such as "3 programs of the step, 1 of them read from the cache"."""
        all_of_them = f"{self.made} program{'s' * (self.made != 1)}{of}"
        if not self.read:
            return f"{all_of_them} compiled"
        return all_of_them + f", {self.read} of them" * (self.read < self.made) + " read from the cache"


def together(counts: Iterable[ProgramCount]) -> ProgramCount:
    """The sums of the counts."""
    made, read = zip(*counts, strict=True)
    return ProgramCount(sum(made), sum(read))


class Program:
    """A function of jax.jit, with all that it has besides, which counts its programs."""

    def __init__(self, jitted: Any) -> None:
        self._jitted, self._read = jitted, 0
        _listen()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _count()
        beat()
        try:
            return self._jitted(*args, **kwargs)
        finally:
            beat()
            self._read += _count() - before

    def compiled(self, *args: Any) -> Any:
        """The program of arguments of these shapes; a call with such arguments does not compile it again."""
        before = _count()
        try:
            return self._jitted.lower(*args).compile()
        finally:
            self._read += _count() - before

    @property
    def count(self) -> ProgramCount:
        """Programs that calls have made so far."""
        made = self._jitted._cache_size()
        return ProgramCount(made, min(self._read, made))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


@functools.cache
def _listen() -> None:
    def note(event: str, **_: Any) -> None:
        """Counts a program that this thread has read."""
        if event == _READ:
            _reads.count = _count() + 1

    jax.monitoring.register_event_listener(note)


def _count() -> int:
    """Programs that this thread has read from the cache."""
    found: int = getattr(_reads, "count", 0)
    return found
