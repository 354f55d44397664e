"""Makes rows of the packer's buffers: the documents of a buffer may be more than the ranks can share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


Take = Callable[[Sequence[JudgedDocument]], tuple[Sequence[int], RowDocuments | None]]
"""Of documents that wait: (the numbers of those that are taken, the row of them or None). It takes at least
the first one, and decides by the waiting documents alone."""


class Runs(grain.IterDataset):
    """Rows of the packer's buffers, chosen by `take` among the documents that wait.

    window: token slots that the waiting documents take, at least, before some are taken. 0: only documents of
    one buffer wait at a time.
    """

    def __init__(self, buffers: grain.IterDataset, take: Take, window: int = 0) -> None:
        super().__init__(buffers)
        self._take, self._window = take, window

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._take, self._window)

    def __str__(self) -> str:
        return "Runs"


class _RunsIterator(grain.DatasetIterator):
    """State: the parent's state before the first buffer that has waiting documents; which of the documents
    from there on were taken, a number if they are the first ones of that buffer; how many buffers were read,
    if several.
    """

    def __init__(self, buffers: grain.DatasetIterator, take: Take, window: int) -> None:
        super().__init__(buffers)
        self._buffers, self._take, self._window = buffers, take, window
        self._start(buffers.get_state(), 0, 0)

    def _start(self, before: dict[str, Any], taken: int | Sequence[int], to_read: int) -> None:
        self._before, self._to_read = [before], to_read  # one more state than buffers
        self._read: list[Sequence[JudgedDocument]] = []
        self._taken = set(range(taken) if isinstance(taken, int) else taken)
        self._is_count = isinstance(taken, int)  # of documents of the first buffer, which holds more
        self._is_restored = self._is_count and bool(self._taken)

    def __next__(self) -> RowDocuments:
        while True:
            waiting = self._waiting()
            numbers, row = self._take([judged for _, judged in waiting])
            self._taken.update(waiting[number][0] for number in numbers)
            self._forget()
            # Documents of buffers that are not read yet may be taken already, after another layout.
            self._is_count = bool(self._read) or not self._taken
            if row:
                return row

    def _waiting(self) -> list[tuple[int, JudgedDocument]]:
        """Those not taken, and their numbers; reads buffers until there are enough."""
        while True:
            documents = [judged for buffer in self._read for judged in buffer]
            waiting = [(i, judged) for i, judged in enumerate(documents) if i not in self._taken]
            slots = sum(judged.fit.slots for _, judged in waiting)
            if self._to_read == 0 and waiting and slots >= self._window:
                return waiting
            try:
                self._read.append(next(self._buffers))
            except StopIteration:
                if not waiting:
                    raise
                return waiting
            self._before.append(self._buffers.get_state())
            self._to_read = max(self._to_read - 1, 0)
            if self._is_restored and self._taken.issuperset(range(len(self._read[0]))):
                self._refuse()
            self._is_restored = False
            self._forget()

    def _refuse(self) -> None:
        raise ValueError(
            f"the state says {len(self._taken)} documents of a buffer were handed out, but it holds "
            f"{len(self._read[0])}; restore with the data and packing settings it was saved with"
        )

    def _forget(self) -> None:
        """Drops the first buffers as long as all of their documents are taken."""
        while self._read and self._taken.issuperset(range(len(self._read[0]))):
            count = len(self._read.pop(0))
            self._taken = {i - count for i in self._taken if i >= count}
            self._before.pop(0)

    def get_state(self) -> dict[str, Any]:
        taken = sorted(self._taken)
        is_first = taken == list(range(len(taken)))
        emitted = len(taken) if is_first and self._is_count else taken
        state = {"packer": self._before[0], "emitted": emitted}
        read = len(self._read) + self._to_read
        return state | ({"read": read} if read > 1 else {})

    def set_state(self, state: dict[str, Any]) -> None:
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"], state.get("read", 0) if self._window else 0)
