"""Best-fit decreasing: windows of documents, the largest first, each into the fullest buffer that it fits."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


def pack_stream(sizes: Sequence[Size], limits: Size, buffers: int) -> Iterator[list[list[int]]]:
    """The buffers of each window of a stream, indices of documents. buffers: of a window, about."""
    carried: list[int] = []
    at, is_last = 0, False
    while not is_last:
        window = list(carried)
        total = tuple(sum(sizes[i][k] for i in window) for k in range(len(limits)))
        while at < len(sizes) and not is_complete(total, limits, buffers):
            total = tuple(t + n for t, n in zip(total, sizes[at], strict=True))
            window.append(at)
            at += 1
        is_last = not is_complete(total, limits, buffers)
        of_window = [sizes[i] for i in window]
        packed = pack_window(of_window, limits, carried=len(carried), is_last=is_last)
        carried = [window[i] for i in packed.carried]
        if packed.buffers:
            yield [[window[i] for i in buffer] for buffer in packed.buffers]


def _shares(size: Sequence[int], limits: Size) -> list[float]:
    return [n / limit if limit else 0.0 for n, limit in zip(size, limits, strict=True)]
