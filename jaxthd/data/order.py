"""The order of the items in a row's stream, also where a data set grows while a run trains.

Row i of n reads items i, i + n, ... of each epoch's order. An order is a function of the seed, the epoch and
the number of items. So an epoch that has begun keeps the items that it began with, and later ones have all.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import grain

Sizes = tuple[int, ...]
"""Numbers of items of the data sets that are read as one, in their order."""


class ItemRef(NamedTuple):
    """Item number `item` of data set number `source`, in epoch `epoch` (from 0) of that data set."""

    source: int
    item: int
    epoch: int


class Era(NamedTuple):
    """Epochs with the same items: those from `first` on, until the next era's."""

    first: int
    sizes: Sizes

    @property
    def items(self) -> int:
        return sum(self.sizes)


class Epochs:
    """The order of the items in every epoch of data sets that are read as one.

    sizes: their numbers of items now. seed: of the shuffle; None: items keep their order.
    eras: by which sizes the epochs are made; the first epoch of the first era begins at place 0.
    """

    def __init__(self, sizes: Sequence[int], seed: int | None) -> None:
        self.sizes, self._seed = tuple(sizes), seed
        self.eras = [Era(0, self.sizes)]
        self._orders: dict[tuple[int, int, int], grain.MapDataset] = {}

    def items_of(self, row: int, rows: int) -> int:
        """Returns how many items a row reads in an epoch of the present sizes."""
        return len(range(row, sum(self.sizes), rows))

    def at(self, row: int, rows: int, place: int) -> tuple[int, int]:
        """Returns (number of the item, its epoch) at a place of a row's stream."""
        for era, following in zip(self.eras, [*self.eras[1:], None], strict=True):
            own = len(range(row, era.items, rows))
            epochs = following.first - era.first if following else None
            if epochs is None or place < epochs * own:
                epoch = era.first + place // own
                order = self._order(era.items, row, rows)
                return self._now(era, int(order[epoch * own + place % own])), epoch
            place -= epochs * own
        raise AssertionError("the last era has no end")

    def grown(self, saved: Sequence[Sequence[Any]], epoch: int) -> list[Era]:
        """Returns the eras where the present items are those of the saved eras, and others after them.

        saved: eras as a position has them. epoch: the latest that has been read from, which keeps its items.
        """
        eras = [Era(first, tuple(sizes)) for first, sizes in saved]
        if eras[-1].sizes != self.sizes:
            eras = [era for era in eras if era.first <= epoch] + [Era(epoch + 1, self.sizes)]
        return eras

    def _order(self, items: int, row: int, rows: int) -> grain.MapDataset:
        key = items, row, rows
        if key not in self._orders:
            order = grain.MapDataset.range(items)
            order = order if self._seed is None else order.shuffle(seed=self._seed)
            self._orders[key] = order[row::rows]
        return self._orders[key]

    def _now(self, era: Era, item: int) -> int:
        """Returns the present number of an item: data sets before its own may have grown."""
        if era.sizes == self.sizes:
            return item
        starts = [0, *accumulate(era.sizes)]
        number = max(n for n, start in enumerate(starts[:-1]) if start <= item)
        return sum(self.sizes[:number]) + item - starts[number]


def epochs_of(sizes: Sequence[Sequence[int]], seed: int | None) -> list[Epochs]:
    """Returns the epochs of each source. sizes: of the data sets that it reads as one. seed: source s is
    shuffled with seed + s, modulo 2^32; None: items keep their order."""
    return [Epochs(each, None if seed is None else (seed + s) % 2**32) for s, each in enumerate(sizes)]


def item_refs(
    epochs: Sequence[Epochs], weights: Sequence[float] | None, *, row: int = 0, rows: int = 1, repeat: bool
) -> grain.MapDataset:
    """The ItemRefs of a row, of the sources with these epochs, mixed. weights, repeat: as for row_streams."""
    refs = []
    for s, each in enumerate(epochs):
        places = grain.MapDataset.range(each.items_of(row, rows))
        places = places.repeat() if repeat else places
        refs.append(places.map_with_index(partial(_ref, s, each, row, rows)))
    return grain.MapDataset.mix(refs, weights) if weights else refs[0]


def _ref(source: int, epochs: Epochs, row: int, rows: int, index: int, _: int) -> ItemRef:
    return ItemRef(source, *epochs.at(row, rows, index))
