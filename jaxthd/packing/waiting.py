"""Chooses the documents of the next row among those that wait, under the layout "whole".

A row in which a document is split makes the ranks exchange; one without exchanges nothing. So documents that
must be split are held back until they fill a row together, and the other rows are made of whole documents.
What room is left beside the split ones is filled with whole documents that wait, too. No document, whole or
split, waits while more than PATIENCE of the packer's buffers are read: the oldest then begins a row, full or
not.

The choice depends only on the documents that wait and on how many buffers were read after each. So a stream
that goes on from a saved position makes the rows it would have made.
"""

from collections.abc import Iterator, Sequence

from jaxthd.packing.assignment import Placement, Shares, Size
from jaxthd.packing.fit import BufferLimits, Fit

WINDOW = 2
"""Whole documents of this many buffers wait, at least, before a row is made of them."""
PATIENCE = 32
"""Most buffers that are read while a document waits."""
HELD = 2
"""The documents that are held back take fewer slots than this many buffers."""


def next_row(
    limits: BufferLimits, fits: Sequence[Fit], ages: Sequence[int], *, is_last: bool = False
) -> Placement | None:
    """Places documents of the next row; None if more must be read before. Numbers are those in `fits`.

    fits: of the documents that wait, none of them unassignable, as they came: so each can be split, or is not
    longer than a share. ages: the buffers read after each. is_last: nothing more can be read; then a row is
    made as long as documents wait.
    """
    shares, sizes = limits.shares, [fit.size for fit in fits]
    assert shares is not None
    held = [i for i, size in enumerate(sizes) if size.slots > shares.share]
    whole = [i for i, size in enumerate(sizes) if size.slots <= shares.share]
    placed = None
    if held:
        is_due = is_last or max(ages[i] for i in held) >= PATIENCE
        is_due |= sum(sizes[i].slots for i in held) >= HELD * shares.capacity
        placed = _row_of_split(shares, sizes, held, whole, is_due=is_due)
    is_due = bool(whole) and (is_last or max(ages[i] for i in whole) >= PATIENCE)
    if placed is None and (is_due or sum(sizes[i].slots for i in whole) >= WINDOW * shares.capacity):
        placed = shares.best(sizes, _rows_of_whole(shares, sizes, held, whole))
    return placed


def _row_of_split(
    shares: Shares, sizes: Sequence[Size], held: Sequence[int], whole: Sequence[int], *, is_due: bool
) -> Placement | None:
    """A row with the held documents that fill it together, and more. None if there is no good one; where a
    row is due, it has the one that waits longest, good or not.
    """

    def rows(together: Sequence[int]) -> Iterator[Placement]:
        chosen, others = _that_fit(shares, sizes, together, whole)
        numbers = [*range(len(together), shares.most_split + 1), *range(len(together) - 1, 0, -1)]
        return shares.rows(sizes, chosen, others, numbers)

    longest = sorted(held, key=lambda i: -sizes[i].slots)
    if is_due:
        return shares.best(sizes, rows(_together(shares, sizes, [held[0], *longest])))
    together = _together(shares, sizes, longest)
    if len(together) == len(held) < shares.most_split:
        return None
    placed = shares.best(sizes, rows(together))
    return placed if placed and shares.is_good(placed, sizes) else None


def _together(shares: Shares, sizes: Sequence[Size], documents: Sequence[int]) -> list[int]:
    """The documents, in this order, that one row can hold if all of them are split."""
    found, room = list[int](), shares.share
    for i in dict.fromkeys(documents):
        taken = 2 * shares.chunk(sizes[i].slots)
        if taken <= room and len(found) < shares.most_split:
            found.append(i)
            room -= taken
    return found


def _rows_of_whole(
    shares: Shares, sizes: Sequence[Size], held: Sequence[int], whole: Sequence[int]
) -> Iterator[Placement]:
    """A row of whole documents; then, if that is not full and even, rows with some split: first the held."""
    chosen, others = _that_fit(shares, sizes, [], whole)
    yield from shares.rows(sizes, chosen, others, [0])
    together = _together(shares, sizes, held)
    for number in range(1, shares.most_split + 1):
        yield from shares.rows(sizes, [chosen[0], *together, *chosen[1:]], others, [number])
        yield from shares.rows(sizes, chosen, others, [number])


def _that_fit(
    shares: Shares, sizes: Sequence[Size], first: Sequence[int], then: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(the documents that would fill a row if ranks did not divide it, the others): `first`, then those of
    `then` in their order."""
    chosen, others = list(first), list[int]()
    names = "slots", "segments", "frames"
    slots, segments, frames = (sum(getattr(sizes[i], name) for i in first) for name in names)
    for i in then:
        more = sizes[i]
        fits = slots + more.slots <= shares.capacity
        fits &= segments + more.segments <= shares.segments and frames + more.frames <= shares.frames
        if fits:
            slots, segments, frames = slots + more.slots, segments + more.segments, frames + more.frames
        (chosen if fits else others).append(i)
    return chosen, others
