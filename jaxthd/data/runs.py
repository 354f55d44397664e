"""Divides the packer's buffers into rows: the audio of a buffer may be more than the ranks can share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grain

from jaxthd.packing.document import Document
from jaxthd.packing.fit import Fit


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """A document, and how it fits the buffers. It is no NamedTuple, which grain's packer would flatten."""

    document: Document
    fit: Fit


FirstRun = Callable[[Sequence[JudgedDocument]], tuple[int, list[Document]]]


class Runs(grain.IterDataset):
    """Divides buffers into consecutive runs of their documents with `first_run`."""

    def __init__(self, buffers: grain.IterDataset, first_run: FirstRun) -> None:
        super().__init__(buffers)
        self._first_run = first_run

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._first_run)

    def __str__(self) -> str:
        return "Runs"


class _RunsIterator(grain.DatasetIterator):
    """State: the parent's state before the buffer, and how many of the buffer's documents were yielded."""

    def __init__(self, buffers: grain.DatasetIterator, first_run: FirstRun) -> None:
        super().__init__(buffers)
        self._buffers = buffers
        self._first_run = first_run
        self._start(buffers.get_state(), 0)

    def _start(self, before: dict[str, Any], emitted: int) -> None:
        self._before, self._emitted = before, emitted
        self._buffer: Sequence[JudgedDocument] | None = None  # None: not read yet

    def __next__(self) -> list[Document]:
        while True:
            if self._buffer is None:
                self._buffer = next(self._buffers)
            rest = self._buffer[self._emitted :]
            if not rest:
                raise ValueError(
                    f"the state says {self._emitted} documents of a buffer were handed out, but it holds "
                    f"{len(self._buffer)}; restore with the data and packing settings it was saved with"
                )
            taken, run = self._first_run(rest)
            self._emitted += taken
            if self._emitted == len(self._buffer):
                self._start(self._buffers.get_state(), 0)
            if run:
                return run

    def get_state(self) -> dict[str, Any]:
        return {"packer": self._before, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"])
