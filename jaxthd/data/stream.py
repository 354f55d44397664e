"""A row's stream of documents: which items it reads, in which order, and who computes their documents.

In every epoch, row i of n reads items i, i + n, ... of each data set's order. A stream's state is one number,
the count of items read. It does not depend on processes or the mesh.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grain

from jaxthd.data.mismatched import item_of
from jaxthd.data.packer import PackDocuments
from jaxthd.data.runs import JudgedDocument
from jaxthd.data.skipped import Skipped
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.packing.document import Document

Item = TypeVar("Item")
Load = Callable[[Any, int], Document | Skipped]
"""(item, epoch) -> the item's document, or a Skipped with the reason. It is pickled for workers."""

GROUP = 8
"""Items in one request to a worker process."""


class ItemRef(NamedTuple):
    """Item number `item` of data set number `source`, in epoch `epoch` (from 0) of that data set."""

    source: int
    item: int
    epoch: int


class Loaded(NamedTuple):
    """What `load` returned for an item of data set number `source`."""

    source: int
    document: Document | Skipped


def row_streams(
    sources: Sequence[Sequence[Any]],
    load: Load,
    pack: PackDocuments,
    *,
    rows: int,
    own: Collection[int] | None,
    weights: Sequence[float] | None,
    repeat: bool,
    seed: int | None,
    pool: Workers | None,
) -> list[grain.DatasetIterator | None]:
    """The iterators over the RowDocuments of every row of the batch.

    sources: random access to the items of one data set each. load: makes their documents.
    own: the rows that this process reads (None: all); for the others the list has None.
    weights: proportions in which the sources are drawn from; None: there is one source.
    repeat: True: endless, with a new order every epoch. False: one epoch.
    seed: source s is shuffled with seed + s, modulo 2^32; None: items keep their order.
    pool: worker processes that run `load`; None: this process runs it.
    """
    orders = item_orders(list(map(len, sources)), seed)
    streams: list[grain.DatasetIterator | None] = []
    for row in range(rows):
        if own is not None and row not in own:
            streams.append(None)
            continue
        shares = [order[row::rows] for order in orders]
        mixed = item_refs(shares, weights, repeat=repeat)
        loaded = (
            _LoadedByWorkers(mixed, sources, load, pool) if pool else mixed.map(partial(_load, sources, load))
        )
        sift = _Sift(pack, [len(share) for share in shares] if repeat else None)
        streams.append(iter(pack.choose(loaded.map(sift))))
    return streams


def item_orders(lengths: Sequence[int], seed: int | None) -> list[grain.MapDataset]:
    """The order of each data set's items, by their numbers. seed: as for row_streams."""
    orders = [grain.MapDataset.range(length) for length in lengths]
    if seed is None:
        return orders
    return [order.shuffle(seed=(seed + s) % 2**32) for s, order in enumerate(orders)]


def item_refs(
    orders: Sequence[grain.MapDataset], weights: Sequence[float] | None, *, repeat: bool
) -> grain.MapDataset:
    """The ItemRefs of the data sets with these orders, mixed. weights, repeat: as for row_streams."""
    refs = [
        (order.repeat() if repeat else order).map_with_index(partial(_ref, s, len(order)))
        for s, order in enumerate(orders)
    ]
    return grain.MapDataset.mix(refs, weights) if weights else refs[0]


def _ref(source: int, items: int, index: int, item: int) -> ItemRef:
    return ItemRef(source, item, index // items)


def _load(sources: Sequence[Sequence[Item]], load: Load, ref: ItemRef) -> Loaded:
    return Loaded(ref.source, load(item_of(sources[ref.source], ref.item, ref.epoch), ref.epoch))


class _Sift:
    """Judges loaded items in the stream's order. Returns None for a Skipped, which it reports.

    It counts the items since the last document that fits. Otherwise a repeated stream without any document
    that fits would be read for ever.
    items: number of this row's items in each data set; None for a stream that is not repeated.
    """

    def __init__(self, pack: PackDocuments, items: Sequence[int] | None) -> None:
        self._pack, self._items = pack, items
        self._without_fit: Counter[int] = Counter()

    def __call__(self, loaded: Loaded) -> JudgedDocument | None:
        document, judged = loaded.document, None
        if isinstance(document, Skipped):
            self._pack.on_skip(document.key, document.reason)
        else:
            judged = self._pack.judge(document)
            if not judged.fit.misfit:
                self._without_fit.clear()
                return judged
        self._without_fit[loaded.source] += 1
        if self._items and all(self._without_fit[s] > 2 * items for s, items in enumerate(self._items)):
            raise UserError(
                f"none of {sum(self._items)} items could be used: all were skipped, in two epochs; expected "
                "documents that fit a buffer: raise the capacities that the reasons name, or correct the "
                "data (skipped.jsonl in a run's workdir lists them)"
            )
        return judged


class _LoadedByWorkers(grain.IterDataset):
    """Loads the items of ItemRefs in order. Worker processes compute them ahead of the stream."""

    def __init__(
        self, refs: grain.MapDataset, sources: Sequence[Sequence[Item]], load: Load, workers: Workers
    ) -> None:
        super().__init__()
        self._iterator = partial(_WorkersIterator, refs, sources, load, workers)

    def __iter__(self) -> grain.DatasetIterator:
        return self._iterator()

    def __str__(self) -> str:
        return "LoadedByWorkers"


class _WorkersIterator(grain.DatasetIterator):
    """State: a count of the items yielded, like that of grain's own iterator over the refs."""

    def __init__(
        self, refs: grain.MapDataset, sources: Sequence[Sequence[Item]], load: Load, workers: Workers
    ) -> None:
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
            self._answered = (Loaded(ref.source, document) for ref, document in found)
            loaded = next(self._answered)
        self._next += 1
        return loaded

    def _ask(self) -> None:
        """Keeps two requests in flight for each worker: it computes one while the next waits."""
        while len(self._asked) < 2 * self._workers.count and self._next_asked < len(self._refs):
            end = min(self._next_asked + GROUP, len(self._refs))
            refs = [self._refs[i] for i in range(self._next_asked, end)]
            items = [(item_of(self._sources[ref.source], ref.item, ref.epoch), ref.epoch) for ref in refs]
            self._asked.append((refs, self._workers.submit(self._load, items)))
            self._next_asked = end

    def _forget(self) -> None:
        for _, answer in list(self._asked):
            answer.cancel()
        self._asked.clear()
        self._answered = iter(())

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._forget()
        self._next = self._next_asked = state["next_index"]

    def close(self) -> None:
        super().close()
        self._forget()
