"""Best-fit decreasing: windows of documents, the largest first, each into the fullest buffer that it fits."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import grain
import numpy as np

T = TypeVar("T")
Size = tuple[int, ...]
"""A document's demand of each thing that a buffer has a limit of."""


class PackedWindow(NamedTuple):
    """buffers: indices of the window's documents, each buffer in their order. carried: those that go into the
    next window, because their buffer is the emptiest."""

    buffers: list[list[int]]
    carried: list[int]


def is_complete(total: Size, limits: Size, buffers: int) -> bool:
    """Whether documents of that size in all fill so many buffers, if nothing else is needed."""
    return any(taken >= buffers * limit > 0 for taken, limit in zip(total, limits, strict=True))


def pack_window(
    sizes: Sequence[Size], limits: Size, *, carried: int = 0, is_last: bool = False
) -> PackedWindow:
    """Packs the documents of a window.

    sizes: of each document; each fits a buffer. carried: how many of them, the first, were carried into this
    window; they are placed before the others. The buffers are in the order of their first documents. Unless
    is_last, the documents of the buffer that is least full are carried, if there are other buffers and it
    holds none that was carried before.
    Source: best-fit decreasing (Johnson, 1973), in several dimensions by the largest share of a limit.
    """
    shares = [max(_shares(size, limits)) for size in sizes]
    used: list[list[int]] = []
    buffers: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: (i >= carried, -shares[i], i)):
        size = sizes[i]
        fitting = (
            b
            for b, taken in enumerate(used)
            if all(t + n <= most for t, n, most in zip(taken, size, limits, strict=True))
        )
        best = max(fitting, key=lambda b: sum(_shares(used[b], limits)), default=None)
        if best is None:
            best = len(buffers)
            buffers.append([])
            used.append([0] * len(limits))
        buffers[best].append(i)
        used[best] = [t + n for t, n in zip(used[best], size, strict=True)]
    left: list[int] = []
    if not is_last and len(buffers) > 1:
        emptiest = min(range(len(buffers)), key=lambda b: (max(_shares(used[b], limits)), b))
        if min(buffers[emptiest]) >= carried:
            left = sorted(buffers.pop(emptiest))
    return PackedWindow(sorted(map(sorted, buffers)), left)


def next_window(
    carried: Sequence[T], following: Iterator[T], size: Callable[[T], Size], limits: Size, buffers: int
) -> tuple[PackedWindow, list[T], bool]:
    """Reads and packs a window: (it, its documents, whether it is the last).

    carried: the documents that it begins with. following: those after them, which it reads until they fill
    about `buffers` buffers. size: of a document.
    """
    window = list(carried)
    total = tuple(sum(size(x)[k] for x in window) for k in range(len(limits)))
    while not (is_whole := is_complete(total, limits, buffers)):
        document = next(following, None)
        if document is None:
            break
        window.append(document)
        total = tuple(t + n for t, n in zip(total, size(document), strict=True))
    packed = pack_window(list(map(size, window)), limits, carried=len(carried), is_last=not is_whole)
    return packed, window, not is_whole


def pack_stream(sizes: Sequence[Size], limits: Size, buffers: int) -> Iterator[list[list[int]]]:
    """The buffers of each window of a stream, indices of documents. buffers: of a window, about."""
    carried, following, is_last = list[int](), iter(range(len(sizes))), False
    while not is_last:
        packed, window, is_last = next_window(carried, following, sizes.__getitem__, limits, buffers)
        carried = [window[i] for i in packed.carried]
        if packed.buffers:
            yield [[window[i] for i in buffer] for buffer in packed.buffers]


def _shares(size: Sequence[int], limits: Size) -> list[float]:
    return [n / limit if limit else 0.0 for n, limit in zip(size, limits, strict=True)]


class BestFitDecreasing(grain.IterDataset):
    """Judged documents, which have a `size`, -> buffers, lists of them.

    Each window of about `bins` buffers is packed as one.
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

    def _start(self, window: dict[str, Any], carried: list[Any]) -> None:
        """A window that is not read yet. carried: the documents that it begins with."""
        self._window, self._carried, self._emitted = window, carried, 0
        self._buffers: list[list[Any]] | None = None
        self._following: tuple[dict[str, Any], list[Any]] | None = None

    def __next__(self) -> list[Any]:
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
        sizes, limits = attrgetter("size"), self._limits
        window = next_window(self._carried, self._documents, sizes, limits, self._bins)
        packed, documents, is_last = window
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
        """The window under way, and how many of its buffers were yielded; JSON-serialisable."""
        return {**self._window, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        """Reads again the documents that were carried into the window, and goes on in it."""
        carried: list[Any] = []
        if state["carried"]:
            self._documents.set_state(state["carried_from"])
            read = [next(self._documents) for _ in range(max(state["carried"]) + 1)]
            carried = [read[i] for i in state["carried"]]
        self._documents.set_state(state["before"])
        self._start({name: state[name] for name in self._window}, carried)
        self._emitted = state["emitted"]
