"""Counts what each data set of a run holds: items, hours, items without a recording, containers.

The count begins with the run, takes a minute at most, and ends beside the training. It reads headers of
recordings. The hours of a set that has not changed are read from WORKDIR/inventory.json. A run stops where
too much of a set cannot be used.
"""

import hashlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.audio.recordings import clip_seconds
from jaxthd.data.example import Cell, Clip, Example
from jaxthd.data.skipped import SkipLog, least_share, main_reasons, set_of_key
from jaxthd.data.sources.recordings import is_start
from jaxthd.data.sources.source import Source
from jaxthd.errors import StorageError, UserError
from jaxthd.files.atomic import write_atomically

SECONDS = 60.0
"""Seconds that a run waits for the count before it starts."""
THREADS = 16
"""Headers that are read at the same time: disks and networks make each of them wait."""
FILE = "inventory.json"
"""The file of a run with the counts of its data sets."""
BATCH = 64 * THREADS
"""Items between two looks at the clock: 0.1 s of headers on a local disk."""
USUAL = 0.5
"""The share of a set's recordings that are no longer than `usual`. The few that are longest teach little:
a small model trained on synthetic:dictated (4,000 of up to 15.3 s) had 44% of the words wrong in windows of
that length, 15% in windows of 9.6 s, which nine in ten do not exceed, and 8% in windows of 5.4 s, the median.
"""


@dataclass
class SetCount:
    """Counts one data set. `looked_at`, `seconds`, `lost` and `filtered` change as it is counted.

    source: the data set. examples: its usable items. skipped: number of those that cannot be used, by their
        text alone. dropped: number of those that data.filter drops by what the data set says of them.
    opens_all: whether each recording's header is read, also where the data set gives its duration. Without
        it such a file is only looked up.
    why_dropped: (item, its seconds) -> why data.filter drops it; "" if it does not. It is asked where the
        data set does not give the duration.
    looked_at: recordings counted. seconds: of these. longest: of the longest. lengths: how many have so many
        tenths of a second, rounded up. lost: why recordings are not
        there or cannot be opened, by the key of their item. filtered: why items are dropped.
    stored_seconds, stored_longest, stored_usual: of all recordings, and as `longest` and `usual`, from an
        earlier count of the same files.
    """

    source: Source
    examples: Sequence[Example]
    skipped: int = 0
    dropped: int = 0
    opens_all: bool = False
    why_dropped: Callable[[Example, float], str] = lambda example, seconds: ""
    looked_at: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)
    filtered: list[str] = field(default_factory=list)
    stored_seconds: float | None = None
    stored_longest: float = 0.0
    stored_usual: float = 0.0

    def __post_init__(self) -> None:
        clips = [example.clips for example in self.examples]
        self.recordings = sum(map(len, clips))
        self.without_recording = clips.count([])
        self.containers = self.source.containers()
        self._next = 0
        """The number of the first item that is not counted."""

    @property
    def items(self) -> int:
        """Number of items, whether they can be used or not."""
        return len(self.examples) + self.skipped + self.dropped

    @property
    def is_complete(self) -> bool:
        """Whether all recordings are counted."""
        return self.looked_at == self.recordings

    def count_some(self, threads: ThreadPoolExecutor) -> None:
        """Counts the recordings of the next BATCH items."""
        items = self.examples[self._next : self._next + BATCH]
        self._next += len(items)
        batch = [(example, clip) for example in items for clip in example.clips]
        clips = [clip for _, clip in batch]
        unknown = self.stored_seconds is None
        opened = [self.opens_all or (unknown and clip.duration is None) for clip in clips]
        # Cells one after the other: the rows of a group are read together, and the last group is kept.
        in_order = any([isinstance(clip, Clip) and isinstance(clip.member, Cell) for clip in clips])
        results = (map if in_order else threads.map)(clip_seconds, clips, opened)
        for (example, _), result in zip(batch, results, strict=True):
            if isinstance(result, str):
                self.lost.setdefault(example.key, result)
                continue
            self.seconds += result
            self.longest = max(self.longest, result)
            self.lengths[math.ceil(10 * result)] += 1
            if len(example.clips) == 1 and example.duration is None and self.stored_seconds is None:
                self.filtered += filter(None, [self.why_dropped(example, result)])
        self.looked_at += len(batch)
        if self.is_complete and self.stored_seconds is not None:
            self.seconds = self.stored_seconds

    @property
    def usual(self) -> float:
        """Seconds that half of the counted recordings do not exceed."""
        missing = math.ceil(USUAL * self.lengths.total())
        for tenths, number in sorted(self.lengths.items()):
            missing -= number
            if missing <= 0:
                return min(tenths / 10, self.longest)
        return 0.0

    def fingerprint(self) -> str:
        """Returns a digest of the files' names, sizes and times, and of the number of recordings."""
        stats = [(str(path), path.stat()) for path in self.source.files()]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        return hashlib.sha256(json.dumps([files, self.recordings]).encode()).hexdigest() if files else ""

    def text(self) -> str:
        """Says what the set holds, in one line."""
        where = "training" if self.source.setting.split == "training" else "validation"
        whys = [f"{self.skipped:,} cannot be used"] if self.skipped else []
        whys += [f"{self.dropped:,} dropped by data.filter"] if self.dropped else []
        parts = [f"{self.items:,} items" + f" ({', '.join(whys)})" * bool(whys)]
        if self.recordings:
            least = "" if self.is_complete else "at least "
            parts.append(f"{least}{self.seconds / 3600:,.2f} hours")
        parts.append(f"{self.without_recording:,} without a recording")
        if self.containers:
            parts.append(f"{self.containers.found:,} of {self.containers.named:,} containers")
        lines = [f"{self.source.title} ({where}): {', '.join(parts)}"]
        if self.lost:
            key, why = next(iter(self.lost.items()))
            lines.append(f"{len(self.lost):,} items have recordings that cannot be read, {key} first: {why}")
        if not self.is_complete:
            rest = self.recordings - self.looked_at
            lines.append(f"{rest:,} of {self.recordings:,} recordings uncounted; the count goes on")
        for name, number in self.source.unread_recordings.most_common():
            what = "names a second recording, which is not read"
            if is_start(name):
                what = f"gives a time, in seconds, which data.columns offset={name} would read"
            lines.append(f"the field {name} of {number:,} items {what}")
        return "; ".join([*lines, *(self.containers.notes if self.containers else ())])


class TrainedOn(NamedTuple):
    """Seconds of recordings. longest: of the longest. usual: what half of a training set do not exceed, in
    the set where that is most."""

    longest: float
    usual: float


def trained_on(workdir: Path) -> TrainedOn | None:
    """The lengths that a run was trained on, from its inventory; None where that does not say it."""
    try:
        sets = json.loads((workdir / FILE).read_text()).values()
    except (OSError, ValueError):
        return None
    said = [each for each in sets if each.get("is_training") and each.get("longest")]
    if not said:
        return None
    longest = max(each["longest"] for each in said)
    # Runs from before `usual` was counted have windows as long as the longest.
    return TrainedOn(longest, max(each.get("usual") or each["longest"] for each in said))


class Inventory:
    """Counts the data sets of a run, up to a time limit, and goes on in a thread.

    sets: by what they are counted. path: the file that keeps the numbers; None: they are not kept.
    """

    def __init__(self, sets: Sequence[SetCount], path: Path | None) -> None:
        self.sets, self._path = sets, path
        self._stored: dict[str, Any] = {}
        if path is not None:
            with suppress(OSError, ValueError):
                self._stored = json.loads(path.read_text())
        for each in sets:
            kept = self._stored.get(each.source.title, {})
            if kept.get("fingerprint") and kept["fingerprint"] == each.fingerprint():
                each.stored_seconds = kept["seconds"]
                each.stored_longest = kept.get("longest", 0.0)
                each.stored_usual = kept.get("usual", 0.0)
        self._stopped, self._news = threading.Event(), list[str]()
        self._thread: threading.Thread | None = None

    def count(self, seconds: float = SECONDS) -> list[str]:
        """Counts for at most this long; returns a line for each set. What is left is counted in a thread."""
        self._count(time.monotonic() + seconds)
        lines = [each.text() for each in self.sets]
        if all(each.is_complete for each in self.sets):
            self._store()
        else:
            self._thread = threading.Thread(target=self._finish, name="inventory", daemon=True)
            self._thread.start()
        return lines

    def news(self) -> list[str]:
        """Returns the lines of sets whose count has ended since the last call."""
        lines, self._news = self._news, []
        return lines

    def close(self) -> None:
        """Stops the thread."""
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def _finish(self) -> None:
        try:
            for each in [each for each in self.sets if not each.is_complete]:
                self._count(float("inf"), [each])
                if each.is_complete:
                    self._news = [*self._news, each.text()]
            self._store()
        except (OSError, StorageError) as error:  # the run needs no count
            self._news = [*self._news, f"the count of the data sets ended early: {error}"]

    def _count(self, until: float, sets: Sequence[SetCount] | None = None) -> None:
        with ThreadPoolExecutor(THREADS) as threads:
            for each in self.sets if sets is None else sets:
                while not each.is_complete and time.monotonic() < until and not self._stopped.is_set():
                    each.count_some(threads)

    def _store(self) -> None:
        """Keeps the numbers of the sets that are complete; hours are taken from there next time."""
        if self._path is None:
            return
        for each in self.sets:
            if each.is_complete:
                self._stored[each.source.title] = {
                    # A recording that is missing may be there next time.
                    "fingerprint": "" if each.lost else each.fingerprint(),
                    "items": each.items,
                    "skipped": each.skipped,
                    "without_recording": each.without_recording,
                    "recordings": each.recordings,
                    "seconds": round(each.seconds, 3),
                    "longest": round(each.longest, 3) if each.stored_seconds is None else each.stored_longest,
                    "usual": round(each.usual, 3) if each.stored_seconds is None else each.stored_usual,
                    "is_training": each.source.setting.split == "training",
                    "containers": each.containers and each.containers[:2],
                }
        with suppress(OSError):
            write_atomically(self._path, [json.dumps(self._stored, indent=2) + "\n"])


def require_few_skipped(
    data: DataConfig, sets: Sequence[SetCount], skipped: SkipLog, *, is_training: bool
) -> None:
    """Raises UserError where a larger share of a set than data.max_skipped_share cannot be used.

    Each set is judged by itself: a set with a tenth of the items may be half of what is drawn. The items that
    this call has read decide, and recordings that the count has not found.
    skipped: the items that are skipped and read. is_training: False: a set is refused only if nothing of it
    can be used.
    """
    most = data.max_skipped_share if is_training else None
    for count in sets:
        share = _unusable_share(count, skipped, shuffles=data.shuffle)
        if share == 1.0 if most is None else share > most:
            raise UserError(_unusable_text(count, skipped, most))


def _unusable_share(count: SetCount, skipped: SkipLog, *, shuffles: bool) -> float:
    """Returns the share of a set's items that cannot be used, at least."""
    title, usable = count.source.title, len(count.examples)
    if not count.items:
        return 0.0
    is_training = count.source.setting.split == "training"
    # A copy: the count's thread may add to it meanwhile.
    unread = len({key for key in list(count.lost) if not skipped.has(title, set_of_key(key)[1])})
    bad = max(skipped.count([title]) - count.skipped, 0)
    by_reading = least_share(bad, skipped.read_of(title), usable, is_sample=is_training and shuffles)
    by_count = (bad + unread) / usable if usable else 0.0
    return (count.skipped + usable * max(by_reading, by_count)) / count.items


def _unusable_text(count: SetCount, skipped: SkipLog, most: float | None) -> str:
    """Says what was skipped of a set, and why. most: the share that is exceeded; None: all of it."""
    title, reasons = count.source.title, skipped.reasons([count.source.title], this_call=True)
    whys = [*reasons, *list(count.lost.values())[: max(len(count.lost) - len(reasons), 0)]]
    read = min(skipped.read_of(title), len(count.examples))
    of = f"{read + count.skipped:,} read so far, of {count.items:,}" if read else f"{count.items:,}"
    which = f"{title} ({count.source.setting.field})"
    verdict = f"more than data.max_skipped_share {most or 0:g} of {which} cannot be used"
    if most is None:
        verdict = f"nothing of {which} can be used"
    how = f"raise data.max_skipped_share (a run lists each item in its {skipped.path.name}), "
    return (
        f"{verdict}: {len(whys):,} items of {of}: {main_reasons(whys)}. Correct the data, "
        + how * (most is not None)
        + "or start a new run with larger capacities"
    )
