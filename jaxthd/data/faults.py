"""What is left out of a run, and why. Nothing here imports jax: worker processes do without it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxthd.jsonl import append_line, keep_lines


@dataclass(frozen=True)
class Fault:
    """An item that cannot be used, and why. Runs skip these, count them and list them."""

    key: str
    reason: str


class SkipLog:
    """Everything left out: one JSON object {"manifest", "key", "reason"} a line, each item once.

    The file keeps what earlier calls of the same run wrote; len() counts what this one left out.
    Usable from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._listed = {(line["manifest"], line["key"]) for line in keep_lines(path, lambda line: True)}
        self._left_out: set[tuple[str, str]] = set()

    def of(self, manifests: Sequence[str]) -> Callable[[str, str], None]:
        """What to call with (key, reason) for an item of one of these manifests, in read_manifest's order."""
        return partial(self._add, manifests)

    def _add(self, manifests: Sequence[str], key: str, reason: str) -> None:
        line, _, name = key.partition(":")
        number, prefixed, line = line.rpartition("/")
        manifest, key = manifests[int(number) if prefixed else 0], f"{line}:{name}"
        with self._lock:
            self._left_out.add((manifest, key))
            if (manifest, key) not in self._listed:
                self._listed.add((manifest, key))
                append_line(self.path, {"manifest": manifest, "key": key, "reason": reason})

    def __len__(self) -> int:
        return len(self._left_out)
