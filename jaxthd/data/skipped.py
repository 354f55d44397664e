"""The items that a run skips, and why. It imports no jax, since worker processes use it."""

import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.files.jsonl import append_line, keep_lines

FILTERED = "data.filter."
"""Beginning of the reason where a filter has dropped an item."""


class Skipped(NamedTuple):
    """An item that cannot be used, and why. Runs skip these, count them and list them."""

    key: str
    reason: str


def numbered_key(number: int, key: str) -> str:
    """The key that an item has in a run; `key` is its key in data set number `number`."""
    return f"{number}/{key}" if number else key


def set_of_key(key: str) -> tuple[int, str]:
    """Returns the number of the data set, and the key in it, of a key made by numbered_key."""
    numbered = re.match(r"(\d+)/", key)
    return (int(numbered[1]), key[numbered.end() :]) if numbered else (0, key)


def least_share(bad: int, read: int, items: int, *, is_sample: bool) -> float:
    """Returns the least share of a data set's items that is bad, to judge by those that were read.

    bad: bad items among the `read` ones. items: in the set. is_sample: whether those read are a random
    sample: the share then has a bound of three standard deviations; else all others count as good.
    Source: Wilson (1927), the lower end of the score interval.
    """
    if not bad or not items:
        return 0.0
    read = max(read, bad)  # a pass that counts no reads, as a cached reference's, lists what it skips
    if read >= items or not is_sample:
        return bad / items
    share, z = bad / read, 3.0
    spread = z * math.sqrt(share * (1 - share) / read + z * z / (4 * read * read))
    return (share + z * z / (2 * read) - spread) / (1 + z * z / read)


class Listed:
    """Reports the items of some data sets to a SkipLog. Called with (key, reason), it lists an item.

    manifests: as the log names the data sets whose numbers the keys have (numbered_key).
    """

    def __init__(self, log: "SkipLog", manifests: Sequence[str]) -> None:
        self._log, self._manifests = log, manifests

    def __call__(self, key: str, reason: str) -> None:
        number, key = set_of_key(key)
        self._log.add(self._manifests[number], key, reason)

    def read(self, row: int, key: str) -> None:
        """Counts an item that row `row` of the batches has read, whether it can be used or not."""
        self._log.count_read(row, self._manifests[set_of_key(key)[0]])


class SkipLog:
    """Lists every skipped item once, as one JSON object {"manifest", "key", "reason"} a line.

    The file keeps what earlier calls of the same run wrote; len() counts what this call skipped, `reasons`
    has those of the whole run. Several threads may use it. writes: False in a process whose items another
    process writes, which gets them from `news`.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self._writes = path, writes
        self._lock = threading.Lock()
        before = keep_lines(path, lambda line: True) if writes else []
        self._listed = {(line["manifest"], line["key"]): str(line["reason"]) for line in before}
        self._skipped: dict[tuple[str, str], str] = {}
        self._counts: Counter[str] = Counter()
        self._reads: Counter[tuple[int, str]] = Counter()
        self._news: list[list[str]] = []

    def count_read(self, row: int, manifest: str) -> None:
        """Counts an item of a data set that row `row` of the batches has read."""
        with self._lock:
            self._reads[row, manifest] += 1

    def reads(self) -> list[list[Any]]:
        """Returns [row, manifest, items read] for merge_reads of the other processes."""
        with self._lock:
            return [[row, manifest, count] for (row, manifest), count in self._reads.items()]

    def merge_reads(self, reads: Sequence[Sequence[Any]]) -> None:
        """Takes over what another process has read. A row that several processes read counts once."""
        with self._lock:
            for row, manifest, count in reads:
                self._reads[row, manifest] = max(self._reads[row, manifest], count)

    def read_of(self, manifest: str) -> int:
        """Returns how many items of a data set all rows have read in this call, again in every epoch."""
        with self._lock:
            return sum(count for (_, name), count in self._reads.items() if name == manifest)

    def add(self, manifest: str, key: str, reason: str) -> None:
        """Adds an item. manifest, key: as the file names them."""
        with self._lock:
            if (manifest, key) not in self._skipped:
                self._skipped[manifest, key] = reason
                self._counts[manifest] += not reason.startswith(FILTERED)
            if (manifest, key) not in self._listed:
                self._listed[manifest, key] = reason
                if self._writes:
                    append_line(self.path, {"manifest": manifest, "key": key, "reason": reason})
                else:
                    self._news.append([manifest, key, reason])

    def has(self, manifest: str, key: str) -> bool:
        """Whether this call of the run has skipped the item."""
        return (manifest, key) in self._skipped

    @property
    def total(self) -> int:
        """Number of items skipped in the whole run."""
        return len(self._listed)

    def count(self, manifests: Collection[str]) -> int:
        """Number of items of these data sets that this call has skipped, without those filtered."""
        return sum(self._counts[manifest] for manifest in set(manifests))

    def reasons(
        self, manifests: Collection[str], *, this_call: bool = False, filtered: bool = False
    ) -> list[str]:
        """Why each item of these data sets was skipped, in the whole run or in this call alone.

        filtered: those that a filter has dropped; else the others.
        """
        with self._lock:
            found = self._skipped if this_call else self._listed
            reasons = [why for (manifest, _), why in found.items() if manifest in manifests]
        return [why for why in reasons if why.startswith(FILTERED) == filtered]

    def news(self) -> list[list[str]]:
        """The arguments of every `add` since the last call, for the process that writes them."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def __len__(self) -> int:
        return len(self._skipped)


def main_reasons(reasons: Sequence[str], most: int = 3) -> str:
    """The most frequent reasons with their numbers, as text: "more than 25.6 s ... (4); no such file (2)".

    Reasons are alike if they differ in numbers and names only; where they differ, there is an ellipsis.
    """
    groups: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for reason in reasons:
        words = reason.split()
        groups[tuple(re.sub(r"\S*[\d/.'\"]\S*", "_", word) for word in words)].append(words)
    ordered = sorted(groups.values(), key=len, reverse=True)
    texts = []
    for alike in ordered[:most]:
        words = [each[0] if len(set(each)) == 1 else "\u2026" for each in zip(*alike, strict=True)]
        texts.append(f"{' '.join(words)} ({len(alike)})")
    others = sum(map(len, ordered[most:]))
    return "; ".join([*texts, *([f"other reasons ({others})"] if others else [])])
