"""The grain plugin: documents in, packed and laid-out rows out; and the loader that trains from it.

PackDocuments drops into anybody's grain pipeline of Documents:

    documents = grain.MapDataset.source(recordings).shuffle(seed=0).map(to_document)  # None: left out
    pack = PackDocuments(capacity=8192, audio_capacity=48000, max_documents=64, num_mels=80, context=2)
    for row in documents.pipe(pack):
        row.batch, row.report

make_loader builds such a pipeline for every row of the batch from a Config. All state is counted in items of
logical streams and says nothing about processes or the mesh: save under one mesh, restore under another.
"""

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import grain
import numpy as np

from jaxthd.config import Config
from jaxthd.data.faults import Fault
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.packing.balance import assign_chunks
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import SUBSAMPLING, Document
from jaxthd.packing.pack import PackReport, document_frames, pack_row, rank_share

Item = TypeVar("Item")
OnSkip = Callable[[str, str], None]
Load = Callable[[Any, int], Document | Fault]

GROUP = 8
"""Items that a worker process is asked for at a time."""


def log_skip(key: str, reason: str) -> None:
    """The default on_skip: one warning per document, on this module's logger."""
    logging.getLogger(__name__).warning("skipped document %r: %s", key, reason)


class PackedRow(NamedTuple):
    """One packed, laid-out buffer: arrays with R = 1, and what it holds."""

    batch: Batch
    report: PackReport


@dataclass(frozen=True)
class PackDocuments:
    """Grain transformation, MapDataset or IterDataset of Documents (or None) -> IterDataset of PackedRow.

    Apply with ds.pipe(PackDocuments(...)). Elements that are None (reported by whoever made them) are
    dropped. Documents that can never fit are dropped too, and named: on_skip(key, reason). on_skip hears of a
    document every time it is met: in each epoch, and once more when a restored iterator reads it again.

    Grain's own packer fills buffers by tokens and mel frames jointly. Where a buffer's encoder chunks
    cannot be assigned whole to the audio ranks, it is cut into consecutive runs of documents that can.

    The iterator's state is (the packer's state before the buffer, documents of the buffer already handed
    out): exact, JSON-serialisable, the same under every mesh. To keep it so, only what depends on no mesh is
    dropped before the packer (too many tokens, too much audio); what a mesh cannot take (audio of one
    document that does not spread over the ranks) is dropped where buffers are cut.

    Raises ValueError on construction when the sizes contradict each other.
    """

    capacity: int
    """Token slots of a buffer; a multiple of 2 * context."""
    audio_capacity: int
    """Mel frames of a buffer over all its audio ranks; a multiple of 8 * audio_ranks. 0: documents with
    recordings are dropped, and the batch has no audio arrays."""
    max_documents: int
    """Most documents in a buffer."""
    num_mels: int = 0
    """Mel bands of the documents' audio."""
    packing: Literal["first_fit", "best_fit", "padded"] = "first_fit"
    """Grain's first-fit or best-fit packer, or "padded": one document a row."""
    packing_bins: int = 8
    """Buffers the packer keeps open at a time."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this."""
    context: int = 1
    """Context ranks the buffer is laid out for."""
    layout: Literal["buffer", "document"] = "buffer"
    """What is cut over them. "document": each document by itself; round_to is a multiple of 2 * context."""
    audio_ranks: int = 1
    """Ranks that share a buffer's audio."""
    shuffle_seed: int | None = None
    """Seed of grain's shuffle of the open buffers as they leave; None: in order, the emptiest last."""
    depths: int = 0
    """Depths of multi-token prediction that the batch has data for."""
    on_skip: OnSkip = log_skip
    """Called with (document key, reason) for every document dropped."""

    def __post_init__(self) -> None:
        rank_share(self.audio_capacity, self.audio_ranks)
        if self.context > 1 and self.capacity % (2 * self.context):
            raise ValueError(
                f"capacity {self.capacity} must be a multiple of 2 * context = {2 * self.context}"
            )
        if self.layout == "document" and self.context > 1 and self.round_to % (2 * self.context):
            raise ValueError(
                f"round_to {self.round_to} must be a multiple of 2 * context = {2 * self.context} for the "
                'layout "document", which cuts each document over the context ranks'
            )
        if self.packing not in ("first_fit", "best_fit", "padded"):
            raise ValueError(f'packing is {self.packing!r}; choose "first_fit", "best_fit" or "padded"')
        if self.capacity < 1 or self.max_documents < 1 or self.packing_bins < 1 or self.round_to < 1:
            raise ValueError(f"capacity, max_documents, packing_bins and round_to must be at least 1: {self}")

    def __call__(self, documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
        """The dataset of PackedRow. A MapDataset is read without threads; convert it first for others."""
        if isinstance(documents, grain.MapDataset):
            documents = documents.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        fitting = documents.filter(self._keep)
        if self.packing == "padded":
            buffers = fitting.map(lambda document: [document])
        else:
            packers = {
                "first_fit": grain.experimental.FirstFitPackIterDataset,
                "best_fit": grain.experimental.BestFitPackIterDataset,
            }
            # Grain copies what it packs into buffers, so it packs markers of the right lengths and carries
            # the documents along. It would round lengths itself (pack_alignment), but its datasets do not
            # take the option.
            buffers = packers[self.packing](
                fitting.map(self._measure),
                length_struct={"tokens": self.capacity, "frames": self.audio_capacity // SUBSAMPLING},
                meta_features=("document",),
                num_packing_bins=self.packing_bins,
                max_sequences_per_bin=self.max_documents,
                shuffle_bins=self.shuffle_seed is not None,
                seed=self.shuffle_seed or 0,
            ).map(lambda buffer: buffer["document"])
        return _RunsDataset(buffers, self._first_run).map(self.row)

    def row(self, documents: Sequence[Document]) -> PackedRow:
        """Packs and lays out documents that fit; none give an all-padding row."""
        return PackedRow(
            *pack_row(
                documents,
                capacity=self.capacity,
                audio_capacity=self.audio_capacity,
                num_mels=self.num_mels,
                max_documents=self.max_documents,
                context=self.context,
                audio_ranks=self.audio_ranks,
                round_to=self.round_to,
                layout=self.layout,
                depths=self.depths,
            )
        )

    def misfit(self, document: Document) -> str | None:
        """Why a document can never be packed, or None when it can."""
        return self._too_large(document) or self._unspreadable(document)

    def _too_large(self, document: Document) -> str | None:
        if self._slots(document) > self.capacity:
            return f"its {self._slots(document)} token slots exceed the capacity of {self.capacity}"
        if document.chunks and not self.audio_capacity:
            return "it holds a recording, and audio_capacity is 0"
        if document.mel_frames > self.audio_capacity:
            return f"its {document.mel_frames} mel frames exceed the audio_capacity of {self.audio_capacity}"
        return None

    def _unspreadable(self, document: Document) -> str | None:
        if self._assignable([document]):
            return None
        return (
            f"its encoder chunks of {document_frames([document])} mel frames do not fit {self.audio_ranks} "
            f"audio ranks of {rank_share(self.audio_capacity, self.audio_ranks)} each; raise audio_capacity"
        )

    def _slots(self, document: Document) -> int:
        return -(-len(document) // self.round_to) * self.round_to

    def _assignable(self, documents: Sequence[Document]) -> bool:
        share = rank_share(self.audio_capacity, self.audio_ranks)
        return assign_chunks(document_frames(documents), self.audio_ranks, share) is not None

    def _keep(self, document: Document | None) -> bool:
        if document is None:
            return False
        reason = self._too_large(document)
        if reason:
            self.on_skip(document.key, reason)
        return reason is None

    def _measure(self, document: Document) -> dict[str, Any]:
        return {
            "tokens": np.zeros(self._slots(document), np.int8),
            "frames": np.zeros(document.mel_frames // SUBSAMPLING, np.int8),
            "document": document,
        }

    def _first_run(self, documents: Sequence[Document]) -> tuple[int, Sequence[Document]]:
        """(documents taken, the row they make): the longest run from the first on whose audio spreads.

        Taken one with an empty row: the first document does not spread even alone, and was reported.
        """
        for taken in range(len(documents), 0, -1):
            if self._assignable(documents[:taken]):
                return taken, documents[:taken]
        self.on_skip(documents[0].key, str(self._unspreadable(documents[0])))
        return 1, []


FirstRun = Callable[[Sequence[Document]], tuple[int, Sequence[Document]]]


class _RunsDataset(grain.IterDataset):
    """Lists of documents -> consecutive runs of them, as `first_run` cuts."""

    def __init__(self, parent: grain.IterDataset, first_run: FirstRun) -> None:
        super().__init__(parent)
        self._first_run = first_run

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._first_run)

    def __str__(self) -> str:
        return "RunsDataset"


class _RunsIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, first_run: FirstRun) -> None:
        super().__init__(parent)
        self._buffers = parent
        self._first_run = first_run
        self._start(parent.get_state(), 0)

    def _start(self, before: dict[str, Any], emitted: int) -> None:
        self._before, self._emitted = before, emitted
        self._documents: Sequence[Document] | None = None  # None: the buffer after `before` is not read yet

    def __next__(self) -> Sequence[Document]:
        while True:
            if self._documents is None:
                self._documents = next(self._buffers)
            rest = self._documents[self._emitted :]
            if not rest:
                raise ValueError(
                    f"the state says {self._emitted} documents of a buffer were handed out, but it holds "
                    f"{len(self._documents)}; restore with the data and packing settings it was saved with"
                )
            taken, run = self._first_run(rest)
            self._emitted += taken
            if self._emitted == len(self._documents):
                self._start(self._buffers.get_state(), 0)
            if run:
                return run

    def get_state(self) -> dict[str, Any]:
        return {"packer": self._before, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"])


class RowReport(NamedTuple):
    """What a row of a batch holds; see Loader."""

    row: int
    documents: int
    real_tokens: int
    supervised_tokens: int
    capacity_tokens: int
    audio_seconds: float
    imbalance: float


def totals(rows: Collection[RowReport]) -> dict[str, Any]:
    """Sums over the rows of a batch, by name; of imbalance the largest."""
    ordered = sorted(rows)
    sums = {name: sum(getattr(row, name) for row in ordered) for name in RowReport._fields[1:-1]}
    return {**sums, "imbalance": max(row.imbalance for row in ordered)}


class _Batches(Iterator[tuple[Batch, dict[str, Any]]]):
    """The rows' streams as batches, with the state of them all.

    streams: for every row of the batch, its stream, or None where another process reads it.
    """

    def __init__(self, streams: Sequence[grain.DatasetIterator | None], empty: PackedRow) -> None:
        self._streams, self._empty = streams, empty
        self._own = {row: stream for row, stream in enumerate(streams) if stream is not None}

    def __next__(self) -> tuple[Batch, dict[str, Any]]:
        rows: list[PackedRow | None] = [next(stream, None) for stream in self._own.values()]
        if not any(rows):
            raise StopIteration
        return self._batch([row or self._empty for row in rows])

    def empty(self) -> tuple[Batch, dict[str, Any]]:
        return self._batch([self._empty] * len(self._own))

    def _batch(self, rows: Sequence[PackedRow]) -> tuple[Batch, dict[str, Any]]:
        batches, packed = zip(*rows, strict=True)
        batch = concatenate_rows(batches)
        capacity = batch.tokens.shape[1]
        reports = [
            RowReport(
                row, len(r.keys), r.real_tokens, r.supervised_tokens, capacity, r.audio_seconds, r.imbalance
            )
            for row, r in zip(self._own, packed, strict=True)
        ]
        return batch, {**totals(reports), "keys": tuple(r.keys for r in packed), "rows": reports}

    def get_state(self) -> dict[str, Any]:
        return {"streams": [stream and stream.get_state() for stream in self._streams]}

    def set_state(self, state: dict[str, Any]) -> None:
        for stream, stream_state in zip(self._streams, state["streams"], strict=True):
            if stream:
                stream.set_state(stream_state)

    def close(self) -> None:
        for stream in self._own.values():
            stream.close()


class Loader(Iterator[tuple[Batch, dict[str, Any]]]):
    """Iterator of (Batch with R = rows, report), one grain stream a row. Made by make_loader.

    report: documents, real_tokens, supervised_tokens, capacity_tokens (ints, over all rows), audio_seconds,
        imbalance (of the worst row; it sets the pace), keys: for every row, its documents' keys by segment;
        rows: a RowReport of each.
    Stops when every stream is exhausted; one that ends before the others gives empty rows. What goes wrong
    while batches are made ahead is raised by next(). Leaving `with loader:` closes it.
    """

    def __init__(
        self, batches: _Batches, prefetch: int, workers: Workers | None, identity: dict[str, Any]
    ) -> None:
        self._ahead = _Ahead(batches, prefetch)
        self.empty = batches.empty()
        """What a batch without a document looks like: (Batch, report)."""
        self._identity = identity
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, _close, batches, self._ahead, workers)

    def __next__(self) -> tuple[Batch, dict[str, Any]]:
        return next(self._ahead)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the thread and the processes of this loader."""
        self._end()

    def get_state(self) -> dict[str, Any]:
        """Where the next batch starts, JSON-serialisable: what the streams depend on, and their states.

        The state is None of a row that is not read here; set_state takes no notice of it.
        """
        return {"identity": self._identity, **self._ahead.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues exactly where get_state was called, under any mesh, with any workers.

        Raises UserError when the state is of other data or other packing.
        """
        was, now = state["identity"], self._identity
        changed = [
            f"{k}: {was.get(k)!r} then, {now.get(k)!r} now"
            for k in {**was, **now}
            if was.get(k) != now.get(k)
        ]
        if changed:
            raise UserError(
                f"the saved data position belongs to another stream of documents ({'; '.join(changed)}); "
                "restore these settings, or start from the weights only"
            )
        self._ahead.set_state({"streams": state["streams"]})


class _Ahead(grain.experimental.ThreadPrefetchDatasetIterator):
    """Batches made ahead in a thread, each with the state after it; 0 ahead: made when asked for."""

    def __del__(self) -> None:
        """Nothing: its Loader closes it. At exit grain's own __del__ comes when grain is half gone."""


def _close(batches: _Batches, ahead: _Ahead, workers: Workers | None) -> None:
    # A thread that is reading a batch raises at its next document; then it can be waited for.
    if workers:
        workers.close()
    batches.close()
    ahead.close()


def pack_documents(
    config: Config, *, shuffle_seed: int | None = None, depths: int = 0, on_skip: OnSkip = log_skip
) -> PackDocuments:
    """As the configuration has it."""
    data, encoder = config.data, config.model.encoder
    return PackDocuments(
        capacity=data.capacity,
        audio_capacity=data.audio_capacity if encoder else 0,
        max_documents=data.max_documents,
        num_mels=encoder.num_mels if encoder else 0,
        packing=data.packing,
        packing_bins=data.packing_bins,
        round_to=data.round_to,
        context=config.mesh.context,
        layout=config.compute.context_layout,
        audio_ranks=config.mesh.audio_ranks,
        shuffle_seed=shuffle_seed,
        depths=depths,
        on_skip=on_skip,
    )


def make_loader(
    sources: Sequence[Sequence[Item]],
    load: Load,
    config: Config,
    *,
    rows: Collection[int] | None = None,
    repeat: bool = True,
    shuffle: bool | None = None,
    depths: int = 0,
    on_skip: OnSkip = log_skip,
    identity: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
    workers: int | Workers = 0,
    prefetch: int = 0,
) -> Loader:
    """The loader of a run: row i reads items i, i + rows, ... of each epoch's order, whatever the mesh is.

    sources: random access to the items (manifest lines) of one data set each.
    load(item, epoch): the item's Document, or why there is none; random draws in it must come from the item
        and the epoch. With workers it is pickled.
    config: data.*, mesh.context, mesh.audio_ranks, compute.context_layout and model.encoder.num_mels are used.
        Epoch e's order is a function of (data.seed, e).
    rows: those of the batch that are read here, the batch then having no others; None: all data.rows.
    repeat: without end, a new order every epoch; False: one epoch, in which every document appears once.
    shuffle: overrides data.shuffle. depths: see PackDocuments; they do not change the stream.
    on_skip: called for every Fault, and see PackDocuments.
    identity: what the documents depend on besides data.*; JSON values. A loader of another identity refuses
        a saved position.
    weights: how often to draw from each source, in proportion (to 1%, evenly spread); each has an order and
        epochs of its own. None: the sources are one, every item once an epoch. Without repeat they are too.
    workers: processes that compute load ahead of the stream, or Workers to share, which the caller closes; 0:
        it is computed here. prefetch: batches made ahead, in a thread. Neither changes the stream.
    Raises UserError for a source with fewer items than rows under repeat; while iterating, when two epochs
    of a repeated stream held no document that fits.
    """
    data = config.data
    shuffle = data.shuffle if shuffle is None else shuffle
    if len(sources) == 1 or not repeat or not weights:
        sources, weights = [sources[0] if len(sources) == 1 else list(chain(*sources))], None
    fewest = min(map(len, sources))
    if repeat and fewest < data.rows:
        raise UserError(
            f"{fewest} items cannot feed {data.rows} rows, each a stream of its own; add data, or lower "
            f"data.rows to at most {fewest}"
        )
    seed = data.seed if shuffle else None
    pack = pack_documents(config, shuffle_seed=seed, depths=depths, on_skip=on_skip)
    own = Workers(workers) if isinstance(workers, int) and workers > 0 else None
    pool = workers if isinstance(workers, Workers) else own
    orders = [grain.MapDataset.range(len(source)) for source in sources]
    if shuffle:
        orders = [order.shuffle(seed=data.seed + s) for s, order in enumerate(orders)]
    streams: list[grain.DatasetIterator | None] = []
    for row in range(data.rows):
        if rows is not None and row not in rows:
            streams.append(None)
            continue
        shares = [order[row :: data.rows] for order in orders]
        places = [
            (share.repeat() if repeat else share).map_with_index(partial(_place, s, len(share)))
            for s, share in enumerate(shares)
        ]
        mixed = grain.MapDataset.mix(places, weights) if weights else places[0]
        read = _ReadAhead(mixed, sources, load, pool) if pool else mixed.map(partial(_read, sources, load))
        sift = _Sift(pack, on_skip, [len(share) for share in shares] if repeat else None)
        streams.append(iter(read.map(sift).pipe(pack)))
    fields = (
        "rows",
        "capacity",
        "audio_capacity",
        "max_documents",
        "packing",
        "packing_bins",
        "round_to",
        "seed",
    )
    settings = {
        "items": [len(source) for source in sources] if weights else len(sources[0]),
        **({"weights": list(weights)} if weights else {}),
        "repeat": repeat,
        "shuffle": shuffle,
        **{k: getattr(data, k) for k in fields},
    }
    batches = _Batches(streams, pack.row([]))
    return Loader(batches, prefetch, own, settings | dict(identity or {}))


class _Place(NamedTuple):
    """Item number `item` of data set number `source`, which was gone through `epoch` times before."""

    source: int
    item: int
    epoch: int


def _place(source: int, items: int, index: int, item: int) -> _Place:
    return _Place(source, item, index // items)


Found = tuple[int, Document | Fault]
"""The number of the data set, and what its item gave."""


def _read(sources: Sequence[Sequence[Item]], load: Load, place: _Place) -> Found:
    return place.source, load(sources[place.source][place.item], place.epoch)


class _ReadAhead(grain.IterDataset):
    """Places -> Found, in order, computed ahead by worker processes. Its state is a count of places."""

    def __init__(
        self, places: grain.MapDataset, sources: Sequence[Sequence[Item]], load: Load, workers: Workers
    ) -> None:
        super().__init__()
        self._iterator = partial(_ReadAheadIterator, places, sources, load, workers)

    def __iter__(self) -> grain.DatasetIterator:
        return self._iterator()

    def __str__(self) -> str:
        return "ReadAhead"


class _ReadAheadIterator(grain.DatasetIterator):
    def __init__(
        self, places: grain.MapDataset, sources: Sequence[Sequence[Item]], load: Load, workers: Workers
    ) -> None:
        super().__init__()
        self._places, self._sources, self._load, self._workers = places, sources, load, workers
        self._asked: deque[tuple[list[_Place], Future[list[Document | Fault]]]] = deque()
        self._found: Iterator[Found] = iter(())
        self._next = self._next_asked = 0

    def __next__(self) -> Found:
        self._assert_not_closed()
        found = next(self._found, None)
        if found is None:
            self._ask()
            if not self._asked:
                raise StopIteration
            places, answer = self._asked.popleft()
            self._found = zip((place.source for place in places), answer.result(), strict=True)
            found = next(self._found)
        self._next += 1
        return found

    def _ask(self) -> None:
        """Twice as many groups as workers: each has one while the next waits."""
        while len(self._asked) < 2 * self._workers.count and self._next_asked < len(self._places):
            end = min(self._next_asked + GROUP, len(self._places))
            places = [self._places[i] for i in range(self._next_asked, end)]
            items = [(self._sources[p.source][p.item], p.epoch) for p in places]
            self._asked.append((places, self._workers.submit(self._load, items)))
            self._next_asked = end

    def _drop(self) -> None:
        for _, answer in list(self._asked):
            answer.cancel()
        self._asked.clear()
        self._found = iter(())

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drop()
        self._next = self._next_asked = state["next_index"]

    def close(self) -> None:
        super().close()
        self._drop()


class _Sift:
    """Found, in the stream's order -> Document; None for a Fault, which is reported.

    Counts fruitless items: a repeated stream of which nothing fits would otherwise be read for ever.
    items: this row's number of items of each data set; None where nothing is repeated.
    """

    def __init__(self, pack: PackDocuments, on_skip: OnSkip, items: Sequence[int] | None) -> None:
        self._pack, self._on_skip, self._items = pack, on_skip, items
        self._fruitless: Counter[int] = Counter()

    def __call__(self, found: Found) -> Document | None:
        source, document = found
        if isinstance(document, Fault):
            self._on_skip(document.key, document.reason)
        elif self._pack.misfit(document) is None:
            self._fruitless.clear()
            return document
        self._fruitless[source] += 1
        if self._items and all(self._fruitless[s] > 2 * items for s, items in enumerate(self._items)):
            raise UserError(
                f"none of this row's {sum(self._items)} items gave a document that fits, in two epochs; "
                "the reports of skipped items (of a run: skipped.jsonl in its workdir) say why"
            )
        return None if isinstance(document, Fault) else document
