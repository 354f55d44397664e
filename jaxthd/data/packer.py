"""The grain plugin: documents in, packed and laid-out rows out.

PackDocuments drops into anybody's grain pipeline of Documents:

    documents = grain.MapDataset.source(recordings).shuffle(seed=0).map(to_document)  # None: skipped
    pack = PackDocuments(
        capacity=8192, audio_capacity=48000, max_documents=64, front_end=config.model.encoder, context=2
    )
    for rows in documents.pipe(pack).batch(4):
        rows.batch, rows.report
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, get_args

import grain
import numpy as np

from jaxthd.config import Config, FrontEnd, Packing
from jaxthd.data.best_fit import BestFitDecreasing
from jaxthd.data.skipped import Skipped
from jaxthd.errors import UserError
from jaxthd.packing.assignment import Placement, Shares, pairs_per_slot
from jaxthd.packing.batch import Batch, without_rows
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.packing.layout import LayoutKind
from jaxthd.packing.pack import PackReport, pack_row
from jaxthd.packing.waiting import next_row

OnSkip = Callable[[str, str], None]
"""Called with (document key, reason) for every document that is skipped."""


def log_skip(key: str, reason: str) -> None:
    """The default on_skip: one warning per document, on this module's logger."""
    logging.getLogger(__name__).warning("skipped document %r: %s", key, reason)


class PackedRow(NamedTuple):
    """One packed, laid-out buffer, and a report of what it holds.

    The arrays of a row have no dim R, as elements of a grain data set have none: batch(R) adds it. The report
    of R rows is an array of R reports. put_batch and concatenate_rows take either.
    """

    batch: Batch
    report: PackReport


@dataclass(frozen=True, eq=False)
class SizedDocument:
    """A document, and how it fits the buffers. It is no NamedTuple, which grain's packer would flatten."""

    document: Document
    fit: Fit
    unit_frames: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Token slots, units of audio and segments that it takes in a buffer."""
        return self.fit.slots, sum(self.fit.piece_frames) // self.unit_frames, self.fit.segments


class RowDocuments(NamedTuple):
    """The documents of a row; under the layout "whole", in the order of their placement, and that."""

    documents: list[Document]
    placement: Placement | None = None


class Pending(NamedTuple):
    """A document that waits, and the number of buffers that were read after its own."""

    sized: SizedDocument
    age: int


Row = tuple[Sequence[int], RowDocuments | None]
"""(the numbers of the documents that are taken, at least one; the row of them, or None)."""

Take = Callable[[Sequence[Pending], bool], Row | None]
"""Called with the documents that wait, and whether they are the last. It returns None if more must be read
before it takes any. It decides by its arguments alone."""


@dataclass(frozen=True)
class PackDocuments(Sequence[Any]):
    """Grain transformation: MapDataset or IterDataset of Documents -> data set of PackedRow.

    ds.pipe(PackDocuments(...)) packs a stream of documents. ds.apply(PackDocuments(...)) packs windows of it,
    each by itself: a window is grain's Batch, its rows are grain's FlatMap, and PackDocuments is the sequence
    of these two. So it stands among other operations as [to_document, *PackDocuments(...)], in ds.apply and
    in grain.DataLoader. It leaves the last row of every window half empty, and needs no state of its own.

    Elements may also be Skipped, which is reported by on_skip(key, reason), or None: the code that made it
    has reported it. Documents that can never fit are skipped and reported each time they are read: in every
    epoch, and again when a restored iterator reads them once more.

    Grain's own packer fills buffers by tokens and audio frames jointly. Under the layout "whole" documents of
    some buffers wait, and rows are chosen among these (packing/waiting.py).

    The state of a stream is (the packer's state before a buffer, which documents were yielded from there on).
    It is exact, JSON-serialisable and means the same under every mesh and layout. That is why documents are
    skipped at two points. A document that fits no mesh (too many tokens, too much audio) is skipped before
    the packer. One that does not fit this mesh (Fit.unassignable) is skipped after the packer, where rows are
    chosen.

    Raises UserError on construction if the sizes contradict each other.
    """

    capacity: int
    """Token slots of a buffer; a multiple of 2 * context."""
    audio_capacity: int
    """Most audio frames of the documents in a buffer. 0: documents with recordings are skipped, and batches
    have no audio arrays."""
    max_documents: int
    """Most documents in a buffer. Each answer of a document with several counts, and a shared prompt."""
    front_end: FrontEnd | None = None
    """The front end of the documents' audio; None where they have none."""
    packing: Packing = "first_fit"
    """Grain's first-fit or best-fit packer; "best_fit_decreasing", which packs windows of documents, the
    largest first; "padded" puts one document in each row."""
    packing_bins: int = 8
    """Buffers that the packer keeps open at a time; of "best_fit_decreasing", those of a window, about."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this."""
    context: int = 1
    """Context ranks that the buffer is laid out for."""
    layout: LayoutKind = "buffer"
    """What is divided over the context ranks: the whole buffer; or, "whole", only documents that must be, and
    each other one stays on one rank."""
    splits: int = 8
    """Under "whole": the most documents of a buffer that are divided; 0: none."""
    pairs_per_slot: float = 0.0
    """Under "whole": what a token slot costs a rank besides attention, in query-key pairs. More documents are
    divided only where all of a rank's work would else be uneven."""
    audio_ranks: int = 1
    """Ranks that share a buffer's audio."""
    shuffle_seed: int | None = None
    """Seed of grain's shuffle of the open buffers when it yields them; None: in order, the emptiest last."""
    depths: int = 0
    """Depths of multi-token prediction that the batch has data for."""
    extras: tuple[str, ...] = ()
    """Names of Document.extras that the batch holds, for an objective that reads them."""
    on_skip: OnSkip = log_skip
    """Called with (document key, reason) for every skipped document."""
    answers: bool = False
    """Whether documents may have several answers (Document.answers). All batches then have document_ids."""
    share_prompts: bool = True
    """Whether the answers to a prompt share its token slots; all batches then have prefixes."""
    window: int = 256
    """Documents of a window, where windows are packed: the more, the fuller the rows. A MapDataset reads a
    window anew for each of as many places: make an IterDataset of it before (to_iter_dataset)."""

    def __post_init__(self) -> None:
        if self.context > 1 and self.capacity % (2 * self.context):
            raise UserError(
                f"capacity {self.capacity} must be a multiple of 2 * context = {2 * self.context}"
            )
        if self.layout not in get_args(LayoutKind):
            raise UserError(
                f"layout is {self.layout!r}; choose one of {', '.join(get_args(LayoutKind))}: for batches in "
                "which each document is divided over the context ranks, thd_batch and shard_packed"
            )
        if self.packing not in get_args(Packing):
            raise UserError(f"packing is {self.packing!r}; choose one of {', '.join(get_args(Packing))}")
        if min(self.capacity, self.max_documents, self.packing_bins, self.round_to, self.window) < 1:
            raise UserError(
                "capacity, max_documents, packing_bins, round_to and window must be at least 1: "
                f"{self.capacity}, {self.max_documents}, {self.packing_bins}, {self.round_to}, {self.window}"
            )
        if self.splits < 0:
            raise UserError(
                f"splits is {self.splits}; expected at least 0, the most documents that are split"
            )
        if self.audio_capacity < 0 or self.audio_ranks < 1:
            raise UserError(
                f"audio_capacity is {self.audio_capacity} and audio_ranks {self.audio_ranks}; expected at "
                "least 0, and at least 1: correct them"
            )
        if self.answers and self.depths:
            raise UserError(f"depths is {self.depths} with answers; expected 0, no multi-token prediction")

    @property
    def limits(self) -> BufferLimits:
        """The most that one buffer holds."""
        return BufferLimits(
            self.capacity,
            self.audio_capacity,
            self.max_documents,
            self.audio_ranks,
            self.round_to,
            self.front_end,
            self.share_prompts,
            self._shares,
        )

    @property
    def _shares(self) -> Shares | None:
        if self.layout != "whole" or self.context == 1:
            return None
        most = self.max_documents, self.audio_capacity
        return Shares(self.context, self.capacity, self.splits, self.pairs_per_slot, *most)

    def __call__(self, documents: Any) -> grain.IterDataset:
        """The dataset of PackedRow. A MapDataset is read without threads; convert it first for others.

        Raises UserError for what is no data set, as where grain.DataLoader is given this as one operation.
        """
        if not isinstance(documents, grain.MapDataset | grain.IterDataset):
            raise UserError(
                f"PackDocuments was called with a {type(documents).__name__}; expected a grain data set of "
                "documents: use ds.pipe(pack); or unpack it among a DataLoader's operations, as in "
                "operations=[to_document, *pack]"
            )
        return self.choose(documents.map(self._judge_element)).map(lambda row: self.row(*row))

    def __len__(self) -> int:
        return len(self._operations)

    def __getitem__(self, index: Any) -> Any:
        """The operations that pack windows: grain's Batch of documents, and the rows of a window."""
        return self._operations[index]

    @property
    def _operations(self) -> tuple[grain.transforms.Batch, grain.experimental.FlatMapTransform]:
        return grain.transforms.Batch(self.window, batch_fn=self.pack_window), _Rows(self.window)

    def pack_window(self, documents: Sequence[Document | Skipped | None]) -> list[PackedRow]:
        """The rows of some documents, packed by themselves."""
        whole = replace(self, packing_bins=len(documents))  # none is closed before the window ends
        return list(grain.MapDataset.source(documents).pipe(whole))

    def judge(self, document: Document) -> SizedDocument:
        """The document and how it fits."""
        limits = self.limits
        return SizedDocument(document, limits.fit(document), limits.unit[0])

    def _judge_element(self, element: Any) -> SizedDocument | Skipped | None:
        if element is None or isinstance(element, Skipped):
            return element
        if not isinstance(element, Document):
            raise UserError(
                f"PackDocuments was given a {type(element).__name__}; expected jaxthd.Documents: map the "
                "elements before (jaxthd.SpeechDocuments, jaxthd.Document.splice)"
            )
        return self.judge(element)

    def choose(self, documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
        """The RowDocuments of each row, from a dataset of what `judge` returns, of Skipped and None."""
        if isinstance(documents, grain.MapDataset):
            documents = documents.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        packable = documents.filter(self._keep)
        if self.packing == "padded":
            buffers = packable.map(lambda sized: [sized])
        elif self.packing == "best_fit_decreasing":
            most = (self.capacity, self.audio_capacity // self.limits.unit[0], self.max_documents)
            buffers = BestFitDecreasing(packable, most, self.packing_bins, self.shuffle_seed)
        else:
            packers = {
                "first_fit": grain.experimental.FirstFitPackIterDataset,
                "best_fit": grain.experimental.BestFitPackIterDataset,
            }
            # Grain copies what it packs into buffers. So it packs markers of the right lengths, and the
            # documents travel beside them. Grain could round lengths itself (pack_alignment), but its
            # datasets do not accept that option.
            lengths = {"tokens": self.capacity, "frames": self.audio_capacity // self.limits.unit[0]}
            if self.answers:
                lengths["segments"] = self.max_documents
            buffers = packers[self.packing](
                packable.map(partial(_markers, lengths)),
                length_struct=lengths,
                meta_features=("sized",),
                num_packing_bins=self.packing_bins,
                max_sequences_per_bin=self.max_documents,
                shuffle_bins=self.shuffle_seed is not None,
                seed=self.shuffle_seed or 0,
            ).map(lambda buffer: buffer["sized"])
        return Runs(buffers, self._take, reads_ahead=self._chooses)

    def row(self, documents: Sequence[Document], placement: Placement | None = None) -> PackedRow:
        """Packs and lays out documents that fit. Without documents the row is all padding.

        placement: of the documents on context ranks, for the layout "whole"; None: any.
        """
        batch, report = pack_row(
            documents,
            capacity=self.capacity,
            audio_capacity=self.audio_capacity,
            front_end=self.front_end,
            max_documents=self.max_documents,
            context=self.context,
            audio_ranks=self.audio_ranks,
            round_to=self.round_to,
            layout=self.layout,
            depths=self.depths,
            extras=self.extras,
            answers=self.answers,
            share_prompts=self.share_prompts,
            shares=self._shares,
            placement=placement,
        )
        return PackedRow(without_rows(batch), report)

    def _keep(self, sized: SizedDocument | Skipped | None) -> bool:
        if sized is None:
            return False
        if isinstance(sized, Skipped):
            self.on_skip(sized.key, sized.reason)
            return False
        if sized.fit.too_large:
            self.on_skip(sized.document.key, sized.fit.too_large)
        return not sized.fit.too_large

    @property
    def _chooses(self) -> bool:
        """Whether rows are chosen among the documents of several buffers."""
        return self._shares is not None and self.packing != "padded"

    def _take(self, waiting: Sequence[Pending], is_last: bool) -> Row | None:
        """Takes a row: all that wait, or documents that fill the context ranks, for which more may be needed.

        Documents that cannot be assigned to the ranks go before: they are taken without a row, and skipped.
        """
        documents = [x.sized for x in waiting]
        if rejected := [i for i, sized in enumerate(documents) if sized.fit.unassignable]:
            for i in rejected:
                self.on_skip(documents[i].document.key, documents[i].fit.unassignable)
            return rejected, None
        if not self._chooses:
            return range(len(documents)), RowDocuments([sized.document for sized in documents])
        fits, ages = [sized.fit for sized in documents], [x.age for x in waiting]
        placed = next_row(self.limits, fits, ages, is_last=is_last)
        if placed is None:
            return None
        return placed.order, RowDocuments([documents[i].document for i in placed.order], placed.renumbered())


def pack_documents(
    config: Config,
    *,
    shuffle_seed: int | None = None,
    depths: int = 0,
    extras: Sequence[str] = (),
    on_skip: OnSkip = log_skip,
    answers: bool = False,
) -> PackDocuments:
    """Returns PackDocuments with the sizes of a Config; without an encoder, audio_capacity is 0."""
    data, encoder = config.data, config.model.encoder
    return PackDocuments(
        capacity=data.capacity,
        audio_capacity=data.audio_capacity if encoder else 0,
        max_documents=data.max_documents,
        front_end=encoder,
        packing=data.packing,
        packing_bins=data.packing_bins,
        round_to=data.round_to,
        context=config.mesh.context,
        layout=config.compute.layout,
        splits=config.compute.context_splits,
        pairs_per_slot=pairs_per_slot(config),
        audio_ranks=config.mesh.audio_ranks,
        shuffle_seed=shuffle_seed,
        depths=depths,
        extras=tuple(extras),
        on_skip=on_skip,
        answers=answers,
        share_prompts=config.posttraining.share_prompts,
    )


class _Rows(grain.experimental.FlatMapTransform):
    """Yields the rows of a window. max_fan_out: the most there may be, one for each document."""

    def __init__(self, max_fan_out: int) -> None:
        self.max_fan_out = max_fan_out

    def flat_map(self, element: list[PackedRow]) -> list[PackedRow]:
        """The rows of a window, one by one."""
        return element


def _markers(names: Collection[str], sized: SizedDocument) -> dict[str, Any]:
    """Stand-ins for grain's packer: arrays as long as what the document takes of each of `names`."""
    takes = dict(zip(("tokens", "frames", "segments"), sized.size, strict=True))
    return {"sized": sized, **{name: np.zeros(takes[name], np.int8) for name in names}}


class Runs(grain.IterDataset):
    """Rows of the packer's buffers, chosen by `take` among the documents that wait.

    reads_ahead: documents of several buffers may wait at a time; otherwise only those of one.
    """

    def __init__(self, buffers: grain.IterDataset, take: Take, *, reads_ahead: bool = False) -> None:
        super().__init__(buffers)
        self._take, self._reads_ahead = take, reads_ahead

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._take, reads_ahead=self._reads_ahead)

    def __str__(self) -> str:
        return "Runs"


class _RunsIterator(grain.DatasetIterator):
    """State: the parent's state before the first buffer that has waiting documents; which of the documents
    from there on were taken: a number if they are the first ones of that buffer, else ranges; how many
    buffers were read, if several.
    """

    def __init__(self, buffers: grain.DatasetIterator, take: Take, *, reads_ahead: bool) -> None:
        super().__init__(buffers)
        self._buffers, self._take, self._reads_ahead = buffers, take, reads_ahead
        self._start(buffers.get_state(), 0, 0)

    def _start(self, before: dict[str, Any], taken: int | Sequence[Sequence[int]], to_read: int) -> None:
        self._before, self._to_read = [before], to_read  # one more state than buffers
        self._read: list[list[SizedDocument | None]] = []  # None in place of those that were taken
        self._is_count = isinstance(taken, int)  # of documents of the first buffer, which holds more
        ranges = [(0, taken)] if isinstance(taken, int) else taken
        self._taken = set(chain(*(range(start, end) for start, end in ranges)))
        self._is_restored = self._is_count and bool(self._taken)

    def __next__(self) -> RowDocuments:
        while True:
            numbers, row = self._next_taken()
            self._taken.update(numbers)
            self._forget()
            # Documents of buffers that are not read yet may be taken already, after another layout.
            self._is_count = bool(self._read) or not self._taken
            if row:
                return row

    def _next_taken(self) -> Row:
        """The documents that `take` takes, with their numbers here; reads as many buffers as it needs."""
        while True:
            ages = range(len(self._read) - 1, -1, -1)
            documents = [(x, age) for buffer, age in zip(self._read, ages, strict=True) for x in buffer]
            waiting = [Pending(x, age) for x, age in documents if x is not None]
            numbers = [i for i, (x, _) in enumerate(documents) if x is not None]
            found = self._take(waiting, False) if waiting and self._to_read == 0 else None
            if found is None and not self._read_buffer():
                if not waiting:
                    raise StopIteration
                found = self._take(waiting, True)
            if found is not None:
                return [numbers[i] for i in found[0]], found[1]

    def _read_buffer(self) -> bool:
        """Reads one more buffer, if there is one."""
        try:
            self._read.append(list(next(self._buffers)))
        except StopIteration:
            return False
        self._before.append(self._buffers.get_state())
        self._to_read = max(self._to_read - 1, 0)
        if self._is_restored and self._taken.issuperset(range(len(self._read[0]))):
            self._refuse()
        self._is_restored = False
        self._forget()
        return True

    def _refuse(self) -> None:
        raise ValueError(
            f"the state says {len(self._taken)} documents of a buffer were handed out, but it holds "
            f"{len(self._read[0])}; restore with the data and packing settings it was saved with"
        )

    def _forget(self) -> None:
        """Drops the documents that are taken, and the first buffers as long as all of theirs are."""
        before = 0
        for buffer in self._read:
            buffer[:] = [None if before + i in self._taken else x for i, x in enumerate(buffer)]
            before += len(buffer)
        while self._read and self._taken.issuperset(range(len(self._read[0]))):
            count = len(self._read.pop(0))
            self._taken = {i - count for i in self._taken if i >= count}
            self._before.pop(0)

    def get_state(self) -> dict[str, Any]:
        """The state, JSON-serialisable, as the class describes it."""
        ranges = _ranges(sorted(self._taken))
        is_first = not ranges or (len(ranges) == 1 and ranges[0][0] == 0)
        emitted = len(self._taken) if is_first and self._is_count else ranges
        state = {"packer": self._before[0], "emitted": emitted}
        read = len(self._read) + self._to_read
        return state | ({"read": read} if read > 1 else {})

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where get_state was called, also under another layout."""
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"], state.get("read", 0) if self._reads_ahead else 0)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """[start, end] of each run of rising numbers without a gap."""
    found: list[list[int]] = []
    for i in numbers:
        if found and found[-1][1] == i:
            found[-1][1] = i + 1
        else:
            found.append([i, i + 1])
    return found
