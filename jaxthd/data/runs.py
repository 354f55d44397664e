"""Buffers of documents, and rows of buffers, as grain data sets whose states are exact.

BestFitDecreasing packs windows of documents into buffers. The documents of a buffer, by it or by grain's own
packers, may be more than the ranks can share: Runs makes the rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxthd.packing.assignment import Placement
from jaxthd.packing.best_fit import Size, is_complete, pack_window
from jaxthd.packing.document import SUBSAMPLING, Document
from jaxthd.packing.fit import Fit


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """A document, and how it fits the buffers. It is no NamedTuple, which grain's packer would flatten."""

    document: Document
    fit: Fit

    @property
    def size(self) -> Size:
        """Token slots, encoder frames and segments that it takes in a buffer."""
        return self.fit.slots, sum(self.fit.chunk_frames) // SUBSAMPLING, self.fit.segments


class RowDocuments(NamedTuple):
    """The documents of a row; under the layout "whole", in the order of their placement, and that."""

    documents: list[Document]
    placement: Placement | None = None


class Waiting(NamedTuple):
    """A document that waits, and the number of buffers that were read after its own."""

    judged: JudgedDocument
    age: int


Taken = tuple[Sequence[int], RowDocuments | None]
"""(the numbers of the documents that are taken, at least one; the row of them, or None)."""

Take = Callable[[Sequence[Waiting], bool], Taken | None]
"""Called with the documents that wait, and whether they are the last. It returns None if more must be read
before it takes any. It decides by its arguments alone."""


class Runs(grain.IterDataset):
    """Rows of the packer's buffers, chosen by `take` among the documents that wait.

    reads_ahead: documents of several buffers may wait at a time; otherwise only those of one.
    """

    def __init__(self, buffers: grain.IterDataset, take: Take, *, reads_ahead: bool = False) -> None:
        super().__init__(buffers)
        self._take, self._reads_ahead = take, reads_ahead

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._take, reads_ahead=self._reads_ahead)

    def __str__(self) -> str:
        return "Runs"


class _RunsIterator(grain.DatasetIterator):
    """State: the parent's state before the first buffer that has waiting documents; which of the documents
    from there on were taken: a number if they are the first ones of that buffer, else ranges; how many
    buffers were read, if several.
    """

    def __init__(self, buffers: grain.DatasetIterator, take: Take, *, reads_ahead: bool) -> None:
        super().__init__(buffers)
        self._buffers, self._take, self._reads_ahead = buffers, take, reads_ahead
        self._start(buffers.get_state(), 0, 0)

    def _start(self, before: dict[str, Any], taken: int | Sequence[Sequence[int]], to_read: int) -> None:
        self._before, self._to_read = [before], to_read  # one more state than buffers
        self._read: list[list[JudgedDocument | None]] = []  # None in place of those that were taken
        self._is_count = isinstance(taken, int)  # of documents of the first buffer, which holds more
        ranges = [(0, taken)] if isinstance(taken, int) else taken
        self._taken = set(chain(*(range(start, end) for start, end in ranges)))
        self._is_restored = self._is_count and bool(self._taken)

    def __next__(self) -> RowDocuments:
        while True:
            numbers, row = self._next_taken()
            self._taken.update(numbers)
            self._forget()
            # Documents of buffers that are not read yet may be taken already, after another layout.
            self._is_count = bool(self._read) or not self._taken
            if row:
                return row

    def _next_taken(self) -> Taken:
        """The documents that `take` takes, with their numbers here; reads as many buffers as it needs."""
        while True:
            ages = range(len(self._read) - 1, -1, -1)
            documents = [(x, age) for buffer, age in zip(self._read, ages, strict=True) for x in buffer]
            waiting = [Waiting(x, age) for x, age in documents if x is not None]
            numbers = [i for i, (x, _) in enumerate(documents) if x is not None]
            found = self._take(waiting, False) if waiting and self._to_read == 0 else None
            if found is None and not self._read_buffer():
                if not waiting:
                    raise StopIteration
                found = self._take(waiting, True)
            if found is not None:
                return [numbers[i] for i in found[0]], found[1]

    def _read_buffer(self) -> bool:
        """Reads one more buffer, if there is one."""
        try:
            self._read.append(list(next(self._buffers)))
        except StopIteration:
            return False
        self._before.append(self._buffers.get_state())
        self._to_read = max(self._to_read - 1, 0)
        if self._is_restored and self._taken.issuperset(range(len(self._read[0]))):
            self._refuse()
        self._is_restored = False
        self._forget()
        return True

    def _refuse(self) -> None:
        raise ValueError(
            f"the state says {len(self._taken)} documents of a buffer were handed out, but it holds "
            f"{len(self._read[0])}; restore with the data and packing settings it was saved with"
        )

    def _forget(self) -> None:
        """Drops the documents that are taken, and the first buffers as long as all of theirs are."""
        before = 0
        for buffer in self._read:
            buffer[:] = [None if before + i in self._taken else x for i, x in enumerate(buffer)]
            before += len(buffer)
        while self._read and self._taken.issuperset(range(len(self._read[0]))):
            count = len(self._read.pop(0))
            self._taken = {i - count for i in self._taken if i >= count}
            self._before.pop(0)

    def get_state(self) -> dict[str, Any]:
        ranges = _ranges(sorted(self._taken))
        is_first = not ranges or (len(ranges) == 1 and ranges[0][0] == 0)
        emitted = len(self._taken) if is_first and self._is_count else ranges
        state = {"packer": self._before[0], "emitted": emitted}
        read = len(self._read) + self._to_read
        return state | ({"read": read} if read > 1 else {})

    def set_state(self, state: dict[str, Any]) -> None:
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"], state.get("read", 0) if self._reads_ahead else 0)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """[start, end] of each run of rising numbers without a gap."""
    found: list[list[int]] = []
    for i in numbers:
        if found and found[-1][1] == i:
            found[-1][1] = i + 1
        else:
            found.append([i, i + 1])
    return found


class BestFitDecreasing(grain.IterDataset):
    """Judged documents -> buffers, lists of them. Each window of about `bins` buffers is packed as one.

    limits: token slots, encoder frames and segments of a buffer. seed: of the order of a window's buffers;
    None: the order of their first documents.
    """

    def __init__(self, documents: grain.IterDataset, limits: Size, bins: int, seed: int | None) -> None:
        super().__init__(documents)
        self._limits, self._bins, self._seed = limits, bins, seed

    def __iter__(self) -> grain.DatasetIterator:
        return _DecreasingIterator(iter(self.parents[0]), self._limits, self._bins, self._seed)

    def __str__(self) -> str:
        return "BestFitDecreasing"


class _DecreasingIterator(grain.DatasetIterator):
    """State: where the window's new documents begin, and which of the window before were carried into it.

    A document is carried once at most, so that two windows are all that is read again.
    """

    def __init__(self, documents: grain.DatasetIterator, limits: Size, bins: int, seed: int | None) -> None:
        super().__init__(documents)
        self._documents, self._limits, self._bins, self._seed = documents, limits, bins, seed
        self._start({"window": 0, "before": documents.get_state(), "carried_from": None, "carried": []}, [])

    def _start(self, window: dict[str, Any], carried: list[JudgedDocument]) -> None:
        """A window that is not read yet. carried: the documents that it begins with."""
        self._window, self._carried, self._emitted = window, carried, 0
        self._buffers: list[list[JudgedDocument]] | None = None
        self._following: tuple[dict[str, Any], list[JudgedDocument]] | None = None

    def __next__(self) -> list[JudgedDocument]:
        while True:
            if self._buffers is None:
                self._read()
            assert self._buffers is not None
            if self._emitted < len(self._buffers):
                self._emitted += 1
                return self._buffers[self._emitted - 1]
            if self._following is None:
                raise StopIteration
            self._start(*self._following)

    def _read(self) -> None:
        """Reads a window, packs it, and prepares what follows it."""
        new: list[JudgedDocument] = []
        sizes = [judged.size for judged in self._carried]
        total = tuple(sum(size[k] for size in sizes) for k in range(len(self._limits)))
        is_last = False
        while not is_complete(total, self._limits, self._bins):
            judged = next(self._documents, None)
            if judged is None:
                is_last = True
                break
            new.append(judged)
            sizes.append(judged.size)
            total = tuple(t + n for t, n in zip(total, sizes[-1], strict=True))
        packed = pack_window(sizes, self._limits, carried=len(self._carried), is_last=is_last)
        documents = [*self._carried, *new]
        buffers = [[documents[i] for i in buffer] for buffer in packed.buffers]
        number = self._window["window"]
        if self._seed is not None:
            order = np.random.default_rng([self._seed, number]).permutation(len(buffers))
            buffers = [buffers[i] for i in order]
        self._buffers, self._following = buffers, None
        if not is_last:
            following = {
                "window": number + 1,
                "before": self._documents.get_state(),
                "carried_from": self._window["before"] if packed.carried else None,
                "carried": [i - len(self._carried) for i in packed.carried],
            }
            self._following = following, [documents[i] for i in packed.carried]

    def get_state(self) -> dict[str, Any]:
        return {**self._window, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        carried: list[JudgedDocument] = []
        if state["carried"]:
            self._documents.set_state(state["carried_from"])
            read = [next(self._documents) for _ in range(max(state["carried"]) + 1)]
            carried = [read[i] for i in state["carried"]]
        self._documents.set_state(state["before"])
        self._start({name: state[name] for name in self._window}, carried)
        self._emitted = state["emitted"]
