"""The loader: batches of the rows' streams, each with a report and a position from which a run can resume.

Positions count the items of the rows' streams. They do not depend on processes or the mesh, so a position
saved under one mesh can be restored under another.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import grain

from jaxthd.config import Config, DataConfig
from jaxthd.data.mismatched import WithMismatched
from jaxthd.data.mixing import require_weights
from jaxthd.data.packer import OnSkip, PackDocuments, RowDocuments, log_skip, pack_documents
from jaxthd.data.position import DataSets, Position
from jaxthd.data.shared_batches import HandedOut, Received, Sharers
from jaxthd.data.skipped import SkipLog
from jaxthd.data.stream import Load, OnRead, epochs_of, row_streams
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.pack import PackReport
from jaxthd.parallel.processes import exchange


class RowReport(NamedTuple):
    """Statistics of one row of a batch. row: its number in the batch.

    The other fields are those of BatchReport, for this row alone.
    """

    row: int
    documents: int
    real_tokens: int
    supervised_tokens: int
    capacity_tokens: int
    audio_seconds: float
    imbalance: float
    segments: int
    audio_slots_seconds: float = 0.0

    @classmethod
    def of(cls, row: int, packed: PackReport, capacity: int, seconds: float) -> "RowReport":
        """capacity, seconds: token slots and audio that the row has room for."""
        return cls(
            row,
            len(packed.keys),
            packed.real_tokens,
            packed.supervised_tokens,
            capacity,
            packed.audio_seconds,
            packed.imbalance,
            packed.segments,
            seconds,
        )


class BatchReport(NamedTuple):
    """Statistics of a batch.

    rows: a report of each of its rows, in the order of their numbers.
    keys: for every row read in this process, its documents' keys: keys[row][d - 1] names document d
        (Batch.documents). seconds: of these documents' audio.
    """

    rows: tuple[RowReport, ...]
    keys: tuple[tuple[str, ...], ...]
    seconds: tuple[tuple[float, ...], ...] = ()

    @property
    def documents(self) -> int:
        """Documents of all rows."""
        return sum(row.documents for row in self.rows)

    @property
    def real_tokens(self) -> int:
        """Token slots that are not padding."""
        return sum(row.real_tokens for row in self.rows)

    @property
    def supervised_tokens(self) -> int:
        """Positions whose next token is predicted."""
        return sum(row.supervised_tokens for row in self.rows)

    @property
    def capacity_tokens(self) -> int:
        """All token slots."""
        return sum(row.capacity_tokens for row in self.rows)

    @property
    def audio_seconds(self) -> float:
        """Seconds of audio without padding."""
        return sum(row.audio_seconds for row in self.rows)

    @property
    def audio_slots_seconds(self) -> float:
        """Audio that the buffers have room for."""
        return sum(row.audio_slots_seconds for row in self.rows)

    @property
    def imbalance(self) -> float:
        """Attention work of the busiest context rank over the mean, in the worst row, which sets the pace."""
        return max(row.imbalance for row in self.rows)


BatchAndReport = tuple[Batch, BatchReport]


class Loader(Iterator[BatchAndReport]):
    """Iterator of (Batch with R = rows, BatchReport), with one stream for each row. make_loader makes it.

    It stops when every stream is exhausted; a stream that ends earlier yields empty rows. An error during
    prefetch is raised by next(). It is a context manager that closes itself on exit.
    skipped: synchronises it with the other processes: next() then waits for all of them, and ends when the
    streams of all have ended. Reports cover all rows, but `keys` only those of this process. None: it knows
    nothing of other processes. sharers: with `skipped`, the processes of this machine that read the same
    rows, one of which makes the batches of all; None: this process makes its own.
    """

    def __init__(
        self,
        batches: "_Batches",
        prefetch: int,
        workers: Workers | None,
        position: Position,
        skipped: SkipLog | None,
        sharers: Sharers | None,
    ) -> None:
        self._empty, self._position, self._skipped = batches.empty, position, skipped
        shared = sharers if sharers and sharers.number > 1 else None
        self._leader = shared.leader if shared and not shared.leads else None
        self._made: _Prefetch | Received
        if shared and not shared.leads:
            self._made = Received(batches.get_state(), shared)
        else:
            self._made = _Prefetch(HandedOut(batches, shared) if shared else batches, prefetch)
        # Done once: by close(), when nobody holds this object any more, or as the interpreter exits.
        self._end = weakref.finalize(self, _end, batches, self._made, workers, sharers)

    def __next__(self) -> BatchAndReport:
        if self._skipped is None:
            return next(self._made)
        made = next(self._made, None) if self._leader is None else None
        batch, report = made or self._empty
        rows_here = report.rows if self._leader is None else []
        answers = exchange([made is not None, rows_here, self._skipped.news(), self._skipped.reads()])
        if self._leader is not None and answers[self._leader][0]:
            # Not before: whoever waits for the leader waits in the exchange, where the leader is named.
            batch, report = next(self._made)
        for _, _, news, reads in answers:
            for item in news:
                self._skipped.add(*item)
            self._skipped.merge_reads(reads)
        if not any(goes_on for goes_on, _, _, _ in answers):
            raise StopIteration
        # A row that several processes read counts once.
        rows = {RowReport(*row) for _, rows, _, _ in answers for row in rows}
        return batch, report._replace(rows=tuple(sorted(rows)))

    def keys(self, report: BatchReport) -> list[list[str]]:
        """The documents' keys of all rows; `report` has only this process's. All processes call it."""
        _, empty = self._empty
        own = [(row.row, keys) for row, keys in zip(empty.rows, report.keys, strict=True)]
        return [keys for _, keys in sorted(dict(map(tuple, chain(*exchange(own)))).items())]

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops this loader's prefetch thread and its worker processes."""
        self._end()

    def get_state(self) -> dict[str, Any]:
        """Where the next batch starts, JSON-serialisable: what the streams depend on, and their states.

        The state of a row that this process does not read is None; see whole_position.
        """
        return self._position.state() | self._made.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues exactly where get_state was called, under any mesh, with any workers.

        Where the data has changed since and that is accepted, a new epoch begins instead. Raises UserError if
        the state was saved for other data or other packing.
        """
        self._made.set_state(self._made.get_state())  # no thread reads on, and into later epochs
        if self._position.restore(state):
            self._made.set_state({"streams": state["streams"], "latest": list(self._position.latest)})


def whole_position(position: dict[str, Any]) -> dict[str, Any]:
    """Merges the processes' states, each of its own rows, into the state of all rows. All processes call it.

    The result depends neither on the number of processes nor on the mesh, so it can be restored under others.
    """
    streams = zip(*exchange(position["streams"]), strict=True)
    latest = [max(epochs) for epochs in zip(*exchange(position["latest"]), strict=True)]
    merged = [next(s for s in states if s is not None) for states in streams]
    return position | {"streams": merged, "latest": latest}


class _Batches(Iterator[BatchAndReport]):
    """Assembles batches from the rows' streams and collects the states of all streams.

    streams: the stream of every row of the batch, or None for a row that another process reads.
    """

    def __init__(
        self, streams: Sequence[grain.DatasetIterator | None], pack: PackDocuments, latest: list[int]
    ) -> None:
        self._streams, self._pack, self._latest = streams, pack, latest
        self._own = {row: stream for row, stream in enumerate(streams) if stream is not None}
        self.empty = self._packed([None] * len(self._own))

    def __next__(self) -> BatchAndReport:
        rows: list[RowDocuments | None] = [next(stream, None) for stream in self._own.values()]
        if not any(rows):
            raise StopIteration
        return self._packed(rows)

    def _packed(self, rows: Sequence[RowDocuments | None]) -> BatchAndReport:
        """The batch of these rows. None: a row without documents."""
        packed = [self._pack.row(*(row or RowDocuments([]))) for row in rows]
        batch = concatenate_rows([row.batch for row in packed])
        room = self._pack.capacity, self._pack.limits.seconds
        reports = (RowReport.of(n, row.report, *room) for n, row in zip(self._own, packed, strict=True))
        keys, seconds = (tuple(getattr(x.report, name) for x in packed) for name in ("keys", "seconds"))
        return batch, BatchReport(tuple(reports), keys, seconds)

    def get_state(self) -> dict[str, Any]:
        """The states of all rows' streams (None: another process reads the row), and the latest epochs."""
        streams = [stream and stream.get_state() for stream in self._streams]
        return {"streams": streams, "latest": list(self._latest)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes get_state's states of this process's streams."""
        for stream, stream_state in zip(self._streams, state["streams"], strict=True):
            if stream:
                stream.set_state(stream_state)

    def close(self) -> None:
        """Ends the streams; one that waits for a document raises."""
        for stream in self._own.values():
            stream.close()


class _Prefetch(grain.experimental.ThreadPrefetchDatasetIterator):
    """Prefetches batches in a thread, each with the state after it. With prefetch 0, next() makes them."""

    def __del__(self) -> None:
        """Does nothing: the Loader closes it. At exit grain's own __del__ would find grain half torn down."""


def _end(
    batches: _Batches, made: _Prefetch | Received, workers: Workers | None, sharers: Sharers | None
) -> None:
    # A thread that is reading a batch raises at its next document, so that it can be joined.
    if workers:
        workers.close()
    batches.close()
    made.close()
    if sharers:
        sharers.close()


def make_loader(
    sources: Sequence[Sequence[Any]],
    load: Load,
    config: Config,
    *,
    rows: Collection[int] | None = None,
    repeat: bool = True,
    shuffle: bool | None = None,
    depths: int = 0,
    extras: Sequence[str] = (),
    answers: bool = False,
    mismatched: bool = False,
    on_skip: OnSkip = log_skip,
    on_read: OnRead = lambda row, key: None,
    identity: Mapping[str, Any] | None = None,
    sets: DataSets | None = None,
    weights: Sequence[float] | None = None,
    workers: int | Workers = 0,
    prefetch: int = 0,
    skipped: SkipLog | None = None,
    sharers: Sharers | None = None,
) -> Loader:
    """The loader of a run: row i reads items i, i + rows, ... of each epoch's order, whatever the mesh is.

    sources: random access to the items (manifest lines) of one data set each.
    load(item, epoch): returns the item's Document, or a Skipped that says why there is none. Its random
        draws must depend only on the item and the epoch. With workers it is pickled.
    config: data.*, mesh.context, mesh.audio_ranks, compute.context_layout, compute.context_splits and model
        are used. The order of epoch e is a function of (data.seed, e).
    rows: the rows that this process reads; its batches hold only these. None: all data.rows.
    repeat: True: endless, with a new order every epoch. False: one epoch, with every document once.
    shuffle: overrides data.shuffle. depths, extras: see PackDocuments; the stream does not depend on them.
    answers: whether documents may have several answers; see PackDocuments.
    mismatched: whether each item, an Example with answers, also gets answers of another one (WithMismatched).
    on_skip: called for every Skipped, and for the documents that PackDocuments skips. on_read: called for
        every item, as it is read.
    identity: what the documents depend on besides data.*, as JSON values. A position saved under one identity
        is refused under another. sets: how the data of a position is compared; None: by the identity alone.
    weights: proportions in which the sources are drawn from (rounded to 1%, evenly interleaved); each source
        has its own order and epochs. None, or repeat False: the sources are read as one, every item once an
        epoch.
    workers: number of processes that run `load` ahead of the stream, or Workers to share, which the caller
        closes. 0: this process runs it. prefetch: batches that a thread makes in advance. Neither changes
        the stream.
    skipped, sharers: see Loader. It closes the sharers.
    Raises UserError for weights that cannot mix the sources, and for a source with fewer items than rows if
    repeat; while iterating, if two epochs of a repeated stream held no document that fits.
    """
    data = config.data
    shuffle = data.shuffle if shuffle is None else shuffle
    weights = None if weights is None else list(weights)
    _require(sources, weights, data, rows, workers, prefetch)
    sizes = [[len(source)] for source in sources]
    if len(sources) == 1 or not repeat or not weights:
        sizes = [list(chain(*sizes))]
        sources, weights = [sources[0] if len(sources) == 1 else list(chain(*sources))], None
    if repeat:
        _require_items(min(map(len, sources)), data.rows)
    seed = data.seed if shuffle else None
    items: Sequence[Any] = sources
    if mismatched:
        items = [WithMismatched(source, data.seed) for source in sources]
    pack = pack_documents(
        config, shuffle_seed=seed, depths=depths, extras=extras, answers=answers, on_skip=on_skip
    )
    own_workers = Workers(workers) if isinstance(workers, int) and workers > 0 else None
    pool = workers if isinstance(workers, Workers) else own_workers
    stream_identity = {
        "items": [len(source) for source in sources] if weights else len(sources[0]),
        **({"weights": list(weights)} if weights else {}),
        **_stream_identity(data, repeat, shuffle),
        **({"share_prompts": pack.share_prompts} if answers else {}),
        **({"mismatched": True} if mismatched else {}),
    } | dict(identity or {})
    position = Position(stream_identity, epochs := epochs_of(sizes, seed), sets, "documents")
    shape: dict[str, Any] = {"rows": data.rows, "local_rows": rows, "weights": weights, "repeat": repeat}
    shape |= {"epochs": epochs, "latest": position.latest}
    streams = row_streams(items, load, pack, **shape, pool=pool, on_read=on_read)
    batches = _Batches(streams, pack, position.latest)
    return Loader(batches, prefetch, own_workers, position, skipped, sharers)


def _require_items(fewest: int, rows: int) -> None:
    if fewest < rows:
        raise UserError(
            f"{fewest} items cannot feed {rows} rows, each a stream of its own; add data, or lower data.rows "
            f"to at most {fewest}"
        )


def _require(
    sources: Sequence[Any],
    weights: Sequence[float] | None,
    data: DataConfig,
    rows: Collection[int] | None,
    workers: int | Workers,
    prefetch: int,
) -> None:
    """Raises UserError for arguments of make_loader that contradict one another. Commands have checked the
    config before (jaxthd.validate).
    """
    require_weights(weights or (), len(sources))
    if not sources:
        raise UserError("there is no data set to load; expected one source or more: name one")
    if data.rows < 1 or not 0 <= data.seed < 2**32:
        raise UserError(
            f"data.rows is {data.rows} and data.seed {data.seed}; expected 1 row or more, and a seed from 0 "
            f"to {2**32 - 1}: correct them"
        )
    if rows is not None and not (len(rows) and all(0 <= row < data.rows for row in rows)):
        raise UserError(
            f"rows is {list(rows)}; expected one or more from 0 to {data.rows - 1}, of the {data.rows} in "
            "data.rows: correct it (jaxthd.parallel.mesh.local_rows tells those of a process)"
        )
    if prefetch < 0 or (isinstance(workers, int) and workers < 0):
        raise UserError(
            f"workers is {workers} and prefetch {prefetch}; expected 0 or more of each: correct them"
        )


_STREAM_FIELDS = (
    "rows",
    "capacity",
    "audio_capacity",
    "max_documents",
    "packing",
    "packing_bins",
    "round_to",
    "seed",
)
"""Fields of DataConfig that shape the rows' streams."""


def _stream_identity(data: DataConfig, repeat: bool, shuffle: bool) -> dict[str, Any]:
    """Returns the settings that shape the rows' streams."""
    return {"repeat": repeat, "shuffle": shuffle, **{name: getattr(data, name) for name in _STREAM_FIELDS}}
