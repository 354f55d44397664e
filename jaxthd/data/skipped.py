"""The items that a run skips, and why. It imports no jax, since worker processes use it."""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxthd.files.jsonl import append_line, keep_lines


class Skipped(NamedTuple):
    """An item that cannot be used, and why. Runs skip these, count them and list them."""

    key: str
    reason: str


def numbered_key(number: int, key: str) -> str:
    """The key that an item has in a run; `key` is its key in data set number `number`."""
    return f"{number}/{key}" if number else key


class SkipLog:
    """Lists every skipped item once, as one JSON object {"manifest", "key", "reason"} a line.

    The file keeps what earlier calls of the same run wrote; len() counts what this call skipped. Several
    threads may use it. writes: False in a process whose items another process writes, which gets them from
    `news`.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        self._lock = threading.Lock()
        before = keep_lines(path, lambda line: True) if writes else []
        self._listed = {(line["manifest"], line["key"]) for line in before}
        self._skipped: set[tuple[str, str]] = set()
        self._news: list[list[str]] = []

    def of(self, manifests: Sequence[str]) -> Callable[[str, str], None]:
        """Returns a function (key, reason) that adds an item of one of these data sets (see numbered_key)."""
        return partial(self._add, manifests)

    def _add(self, manifests: Sequence[str], key: str, reason: str) -> None:
        numbered = re.match(r"(\d+)/", key)
        number = int(numbered[1]) if numbered else 0
        self.add(manifests[number], key[numbered.end() :] if numbered else key, reason)

    def add(self, manifest: str, key: str, reason: str) -> None:
        """Adds an item. manifest, key: as the file names them."""
        with self._lock:
            self._skipped.add((manifest, key))
            if (manifest, key) not in self._listed:
                self._listed.add((manifest, key))
                if self._writes:
                    append_line(self.path, {"manifest": manifest, "key": key, "reason": reason})
                else:
                    self._news.append([manifest, key, reason])

    def has(self, manifest: str, key: str) -> bool:
        """Whether this call of the run has skipped the item."""
        return (manifest, key) in self._skipped

    def news(self) -> list[list[str]]:
        """The arguments of every `add` since the last call, for the process that writes them."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def __len__(self) -> int:
        return len(self._skipped)
