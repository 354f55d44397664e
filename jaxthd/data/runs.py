"""Makes rows of the packer's buffers: the documents of a buffer may be more than the ranks can share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import grain

from jaxthd.packing.assignment import Placement
from jaxthd.packing.document import Document
from jaxthd.packing.fit import Fit


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """A document, and how it fits the buffers. It is no NamedTuple, which grain's packer would flatten."""

    document: Document
    fit: Fit


@dataclass(frozen=True, eq=False)
class RowDocuments:
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
