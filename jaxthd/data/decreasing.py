"""Best-fit decreasing over a stream of documents, as a grain data set."""

from typing import Any

import grain
import numpy as np

from jaxthd.data.runs import JudgedDocument
from jaxthd.packing.best_fit import Size, is_complete, pack_window
from jaxthd.packing.document import SUBSAMPLING


class BestFitDecreasing(grain.IterDataset):
    """Judged documents -> buffers, lists of them. Each window of about `bins` buffers is packed as one.

    limits: token slots, encoder frames and segments of a buffer. seed: of the order of a window's buffers;
    None: the order of their first documents.
    """

    def __init__(self, documents: grain.IterDataset, limits: Size, bins: int, seed: int | None) -> None:
        super().__init__(documents)
        self._limits, self._bins, self._seed = limits, bins, seed

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(iter(self.parents[0]), self._limits, self._bins, self._seed)

    def __str__(self) -> str:
        return "BestFitDecreasing"


class _Iterator(grain.DatasetIterator):
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
        sizes = [_size(judged) for judged in self._carried]
        total = tuple(sum(size[k] for size in sizes) for k in range(len(self._limits)))
        is_last = False
        while not is_complete(total, self._limits, self._bins):
            judged = next(self._documents, None)
            if judged is None:
                is_last = True
                break
            new.append(judged)
            sizes.append(_size(judged))
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


def _size(judged: JudgedDocument) -> Size:
    fit = judged.fit
    return fit.slots, sum(fit.chunk_frames) // SUBSAMPLING, fit.segments
