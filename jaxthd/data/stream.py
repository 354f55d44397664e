"""A row's stream of documents: which items it reads, in which order, and who computes their documents.

In every epoch, row i of n reads items i, i + n, ... of each data set's order. An order is a function of the
seed, the epoch and the number of items. So where a data set grows while a run trains, an epoch that has begun
keeps the items that it began with, and later ones have all. A stream's state is one number, the count of
items read. It does not depend on processes or the mesh.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import grain

from jaxthd.data.filters import by_setting
from jaxthd.data.mismatched import WithMismatched
from jaxthd.data.packer import PackDocuments, SizedDocument
from jaxthd.data.skipped import FILTERED, Skipped
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.packing.document import Document

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
        """Number of items of an epoch, of all data sets together."""
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
            of_row = len(range(row, era.items, rows))
            epochs = following.first - era.first if following else None
            if epochs is None or place < epochs * of_row:
                epoch = era.first + place // of_row
                order = self._order(era.items, row, rows)
                return self._now(era, int(order[epoch * of_row + place % of_row])), epoch
            place -= epochs * of_row
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


Load = Callable[[Any, int], Document | Skipped]
"""(item, epoch) -> the item's document, or a Skipped with the reason. It is pickled for workers."""

OnRead = Callable[[int, str], None]
"""Called with (row, document key) for every item that a row of the batches reads."""

GROUP = 8
"""Items in one request to a worker process."""


class Loaded(NamedTuple):
    """A value that `load` returned for an item of data set number `source` in an epoch of it."""

    source: int
    document: Document | Skipped
    epoch: int = 0


def row_streams(
    sources: Sequence[Any],
    load: Load,
    pack: PackDocuments,
    *,
    rows: int,
    local_rows: Collection[int] | None,
    weights: Sequence[float] | None,
    repeat: bool,
    epochs: Sequence[Epochs],
    latest: list[int],
    pool: Workers | None,
    on_read: OnRead = lambda row, key: None,
) -> list[grain.DatasetIterator | None]:
    """The iterators over the RowDocuments of every row of the batch.

    sources: random access to the items of one data set each. load: makes their documents.
    local_rows: the rows that this process reads (None: all); for the others the list has None.
    weights: proportions in which the sources are drawn from; None: there is one source.
    repeat: True: endless, with a new order every epoch. False: one epoch.
    epochs: the order of each source's items. latest: receives the latest epoch that is read from, of each
        source.
    pool: worker processes that run `load`; None: this process runs it. on_read: called for every item.
    """
    streams: list[grain.DatasetIterator | None] = []
    for row in range(rows):
        if local_rows is not None and row not in local_rows:
            streams.append(None)
            continue
        mixed = item_refs(epochs, weights, row=row, rows=rows, repeat=repeat)
        loaded = (
            _LoadedByWorkers(mixed, sources, load, pool) if pool else mixed.map(partial(_load, sources, load))
        )
        shares = [each.items_of(row, rows) for each in epochs] if repeat else None
        sift = _Sift(pack, shares, partial(on_read, row), latest)
        streams.append(iter(pack.choose(loaded.map(sift))))
    return streams


def _load(sources: Sequence[Any], load: Load, ref: ItemRef) -> Loaded:
    return Loaded(ref.source, load(_item(sources, ref), ref.epoch), ref.epoch)


def _item(sources: Sequence[Any], ref: ItemRef) -> Any:
    source = sources[ref.source]
    if isinstance(source, WithMismatched):
        return source.of_epoch(ref.item, ref.epoch)
    return source[ref.item]


class _Sift:
    """Judges loaded items in the stream's order. Returns None for a Skipped, which it reports.

    It counts the items since the last document that fits. Otherwise a repeated stream without any document
    that fits would be read for ever.
    items: number of this row's items in each data set; None for a stream that is not repeated.
    on_read: called with the key of every item. latest: receives the latest epoch of each data set.
    """

    def __init__(
        self,
        pack: PackDocuments,
        items: Sequence[int] | None,
        on_read: Callable[[str], None],
        latest: list[int],
    ) -> None:
        self._pack, self._items, self._on_read, self._latest = pack, items, on_read, latest
        self._without_fit: Counter[int] = Counter()
        self._filtered: list[str] = []

    def __call__(self, loaded: Loaded) -> SizedDocument | None:
        document, sized = loaded.document, None
        self._on_read(document.key)
        self._latest[loaded.source] = max(self._latest[loaded.source], loaded.epoch)
        if isinstance(document, Skipped):
            self._pack.on_skip(document.key, document.reason)
            self._filtered += [document.reason] * document.reason.startswith(FILTERED)
        else:
            sized = self._pack.judge(document)
            if not sized.fit.reject_reason:
                self._without_fit.clear()
                self._filtered.clear()
                return sized
        self._without_fit[loaded.source] += 1
        if self._items and all(self._without_fit[s] > 2 * items for s, items in enumerate(self._items)):
            settings = f"data.filter drops {by_setting(self._filtered)}; " * bool(self._filtered)
            raise UserError(
                f"none of {sum(self._items)} items could be used: all were skipped, in two epochs; {settings}"
                "expected documents that fit a buffer: widen data.filter where it drops them, raise the "
                "capacities that the reasons name, or correct the data (skipped.jsonl in a run's workdir "
                "lists them)"
            )
        return sized


class _LoadedByWorkers(grain.IterDataset):
    """Loads the items of ItemRefs in order. Worker processes compute them ahead of the stream."""

    def __init__(self, refs: grain.MapDataset, sources: Sequence[Any], load: Load, workers: Workers) -> None:
        super().__init__()
        self._iterator = partial(_WorkersIterator, refs, sources, load, workers)

    def __iter__(self) -> grain.DatasetIterator:
        return self._iterator()

    def __str__(self) -> str:
        return "LoadedByWorkers"


class _WorkersIterator(grain.DatasetIterator):
    """State: a count of the items yielded, like that of grain's own iterator over the refs."""

    def __init__(self, refs: grain.MapDataset, sources: Sequence[Any], load: Load, workers: Workers) -> None:
        super().__init__()
        self._refs, self._sources, self._load, self._workers = refs, sources, load, workers
        self._asked: deque[tuple[list[ItemRef], Future[list[Document | Skipped]]]] = deque()
        self._answered: Iterator[Loaded] = iter(())
        self._next = self._next_asked = 0

    def __next__(self) -> Loaded:
        self._assert_not_closed()
        loaded = next(self._answered, None)
        if loaded is None:
            self._ask()
            if not self._asked:
                raise StopIteration
            refs, answer = self._asked.popleft()
            found = zip(refs, answer.result(), strict=True)
            self._answered = (Loaded(ref.source, document, ref.epoch) for ref, document in found)
            loaded = next(self._answered)
        self._next += 1
        return loaded

    def _ask(self) -> None:
        """Keeps two requests in flight for each worker: it computes one while the next waits."""
        while len(self._asked) < 2 * self._workers.count and self._next_asked < len(self._refs):
            end = min(self._next_asked + GROUP, len(self._refs))
            refs = [self._refs[i] for i in range(self._next_asked, end)]
            items = [(_item(self._sources, ref), ref.epoch) for ref in refs]
            self._asked.append((refs, self._workers.submit(self._load, items)))
            self._next_asked = end

    def _forget(self) -> None:
        for _, answer in list(self._asked):
            answer.cancel()
        self._asked.clear()
        self._answered = iter(())

    def get_state(self) -> dict[str, Any]:
        """The number of items yielded."""
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind so many items; requests in flight are dropped."""
        self._forget()
        self._next = self._next_asked = state["next_index"]

    def close(self) -> None:
        """Drops the requests in flight; next() then raises."""
        super().close()
        self._forget()
