"""What is left out of a run, and why. Nothing here imports jax: worker processes do without it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxthd.files.jsonl import append_line, keep_lines


@dataclass(frozen=True)
class Fault:
    """An item that cannot be used, and why. Runs skip these, count them and list them."""

    key: str
    reason: str


class SkipLog:
    """Everything left out: one JSON object {"manifest", "key", "reason"} a line, each item once.

    The file keeps what earlier calls of the same run wrote; len() counts what this one left out.
    Usable from several threads. writes: False in a process that has another one write: it hands over `news`.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        self._lock = threading.Lock()
        before = keep_lines(path, lambda line: True) if writes else []
        self._listed = {(line["manifest"], line["key"]) for line in before}
        self._left_out: set[tuple[str, str]] = set()
        self._news: list[list[str]] = []

    def of(self, manifests: Sequence[str]) -> Callable[[str, str], None]:
        """What to call with (key, reason) for an item of one of these manifests, in read_manifest's order."""
        return partial(self._add, manifests)

    def _add(self, manifests: Sequence[str], key: str, reason: str) -> None:
        line, _, name = key.partition(":")
        number, prefixed, line = line.rpartition("/")
        self.add(manifests[int(number) if prefixed else 0], f"{line}:{name}", reason)

    def add(self, manifest: str, key: str, reason: str) -> None:
        """An item, by the names that the file has for it."""
        with self._lock:
            self._left_out.add((manifest, key))
            if (manifest, key) not in self._listed:
                self._listed.add((manifest, key))
                if self._writes:
                    append_line(self.path, {"manifest": manifest, "key": key, "reason": reason})
                else:
                    self._news.append([manifest, key, reason])

    def has(self, manifest: str, key: str) -> bool:
        """Whether this item was left out, in this call."""
        return (manifest, key) in self._left_out

    def news(self) -> list[list[str]]:
        """The arguments of every `add` since the last call, where another process writes them."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def __len__(self) -> int:
        return len(self._left_out)
