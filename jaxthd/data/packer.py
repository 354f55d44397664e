"""The grain plugin: documents in, packed and laid-out rows out.

PackDocuments drops into anybody's grain pipeline of Documents:

    documents = grain.MapDataset.source(recordings).shuffle(seed=0).map(to_document)  # None: skipped
    pack = PackDocuments(capacity=8192, audio_capacity=48000, max_documents=64, num_mels=80, context=2)
    for row in documents.pipe(pack):
        row.batch, row.report
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import grain
import numpy as np

from jaxthd.config import Config
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING, Document
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.packing.pack import PackReport, pack_row

OnSkip = Callable[[str, str], None]
"""Called with (document key, reason) for every document that is skipped."""


def log_skip(key: str, reason: str) -> None:
    """The default on_skip: one warning per document, on this module's logger."""
    logging.getLogger(__name__).warning("skipped document %r: %s", key, reason)


class PackedRow(NamedTuple):
    """One packed, laid-out buffer: arrays with R = 1, and a report of what it holds."""

    batch: Batch
    report: PackReport


@dataclass(frozen=True, eq=False)
class JudgedDocument:
    """A document, and how it fits the buffers. It is no NamedTuple, which grain's packer would flatten."""

    document: Document
    fit: Fit


@dataclass(frozen=True)
class PackDocuments:
    """Grain transformation: MapDataset or IterDataset of Documents (or None) -> IterDataset of PackedRow.

    Apply it with ds.pipe(PackDocuments(...)). Elements that are None are dropped: the code that made
    them has reported them. Documents that can never fit are skipped and reported by on_skip(key, reason) each
    time they are read: in every epoch, and again when a restored iterator reads them once more.

    Grain's own packer fills buffers by tokens and mel frames jointly. If a buffer's encoder chunks cannot be
    assigned whole to the audio ranks, the buffer is divided into consecutive runs of documents whose chunks
    can.

    The iterator's state is (the packer's state before the buffer, how many of the buffer's documents were
    yielded). It is exact, JSON-serialisable and the same under every mesh. That is why documents are skipped
    at two points. A document that fits no mesh (too many tokens, too much audio) is skipped before the
    packer. One that does not fit this mesh (its audio cannot be assigned to the ranks) is skipped after the
    packer, where buffers are divided.

    Raises ValueError on construction if the sizes contradict each other.
    """

    capacity: int
    """Token slots of a buffer; a multiple of 2 * context."""
    audio_capacity: int
    """Most mel frames of the documents in a buffer. 0: documents with recordings are skipped, and batches
    have no audio arrays."""
    max_documents: int
    """Most documents in a buffer. Each answer of a document with several counts, and a shared prompt."""
    num_mels: int = 0
    """Mel bands of the documents' audio."""
    packing: Literal["first_fit", "best_fit", "padded"] = "first_fit"
    """Grain's first-fit or best-fit packer; "padded" puts one document in each row."""
    packing_bins: int = 8
    """Buffers that the packer keeps open at a time."""
    round_to: int = 1
    """Each document's slots are rounded up to a multiple of this."""
    context: int = 1
    """Context ranks that the buffer is laid out for."""
    layout: Literal["buffer", "document"] = "buffer"
    """What is divided over the context ranks: the whole buffer, or each document by itself. "document"
    needs a round_to that is a multiple of 2 * context."""
    audio_ranks: int = 1
    """Ranks that share a buffer's audio."""
    longest_chunk: int = 0
    """Mel frames of the longest encoder chunk: each audio rank has room for one, even if that is more than
    its share of audio_capacity."""
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

    def __post_init__(self) -> None:
        if self.context > 1 and self.capacity % (2 * self.context):
            raise ValueError(
                f"capacity {self.capacity} must be a multiple of 2 * context = {2 * self.context}"
            )
        if self.layout == "document" and self.context > 1 and self.round_to % (2 * self.context):
            raise ValueError(
                f"round_to {self.round_to} must be a multiple of 2 * context = {2 * self.context} for the "
                'layout "document", which divides each document over the context ranks'
            )
        if self.packing not in ("first_fit", "best_fit", "padded"):
            raise ValueError(f'packing is {self.packing!r}; choose "first_fit", "best_fit" or "padded"')
        if self.capacity < 1 or self.max_documents < 1 or self.packing_bins < 1 or self.round_to < 1:
            raise ValueError(f"capacity, max_documents, packing_bins and round_to must be at least 1: {self}")
        if self.audio_capacity < 0 or self.audio_ranks < 1:
            raise ValueError(f"audio_capacity must be at least 0, and audio_ranks at least 1: {self}")
        if self.answers and self.depths:
            raise ValueError(f"depths is {self.depths} with answers; expected 0, no multi-token prediction")

    @property
    def limits(self) -> BufferLimits:
        """The most that one buffer holds."""
        return BufferLimits(
            self.capacity,
            self.audio_capacity,
            self.max_documents,
            self.audio_ranks,
            self.round_to,
            self.longest_chunk,
            self.share_prompts,
        )

    def __call__(self, documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
        """The dataset of PackedRow. A MapDataset is read without threads; convert it first for others."""
        return self.pack_judged(documents.map(self.judge))

    def judge(self, document: Document | None) -> JudgedDocument | None:
        """The document and how it fits; None for None."""
        return None if document is None else JudgedDocument(document, self.limits.fit(document))

    def pack_judged(self, documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
        """Like __call__, for a dataset of what `judge` returns."""
        if isinstance(documents, grain.MapDataset):
            documents = documents.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        packable = documents.filter(self._keep)
        if self.packing == "padded":
            buffers = packable.map(lambda judged: [judged])
        else:
            packers = {
                "first_fit": grain.experimental.FirstFitPackIterDataset,
                "best_fit": grain.experimental.BestFitPackIterDataset,
            }
            # Grain copies what it packs into buffers. So it packs markers of the right lengths, and the
            # documents travel beside them. Grain could round lengths itself (pack_alignment), but its
            # datasets do not accept that option.
            lengths = {"tokens": self.capacity, "frames": self.audio_capacity // SUBSAMPLING}
            if self.answers:
                lengths["segments"] = self.max_documents
            buffers = packers[self.packing](
                packable.map(partial(_markers, lengths)),
                length_struct=lengths,
                meta_features=("judged",),
                num_packing_bins=self.packing_bins,
                max_sequences_per_bin=self.max_documents,
                shuffle_bins=self.shuffle_seed is not None,
                seed=self.shuffle_seed or 0,
            ).map(lambda buffer: buffer["judged"])
        return _Runs(buffers, self._first_run).map(self.row)

    def row(self, documents: Sequence[Document]) -> PackedRow:
        """Packs and lays out documents that fit. Without documents the row is all padding."""
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
                longest_chunk=self.longest_chunk,
                layout=self.layout,
                depths=self.depths,
                extras=self.extras,
                answers=self.answers,
                share_prompts=self.share_prompts,
            )
        )

    def _keep(self, judged: JudgedDocument | None) -> bool:
        if judged is None:
            return False
        if judged.fit.too_large:
            self.on_skip(judged.document.key, judged.fit.too_large)
        return not judged.fit.too_large

    def _first_run(self, buffer: Sequence[JudgedDocument]) -> tuple[int, list[Document]]:
        """Takes the longest run of documents whose audio can be assigned; returns (number taken, row).

        Returns (1, []) if the audio of the first document cannot be assigned: that document is skipped.
        """
        taken = self.limits.first_run([judged.fit for judged in buffer])
        if not taken:
            self.on_skip(buffer[0].document.key, buffer[0].fit.unassignable)
        return max(taken, 1), [judged.document for judged in buffer[:taken]]


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
        num_mels=encoder.num_mels if encoder else 0,
        packing=data.packing,
        packing_bins=data.packing_bins,
        round_to=data.round_to,
        context=config.mesh.context,
        layout=config.compute.context_layout,
        audio_ranks=config.mesh.audio_ranks,
        longest_chunk=encoder.chunk_frames if encoder else 0,
        shuffle_seed=shuffle_seed,
        depths=depths,
        extras=tuple(extras),
        on_skip=on_skip,
        answers=answers,
        share_prompts=config.posttraining.share_prompts,
    )


def _markers(names: Collection[str], judged: JudgedDocument) -> dict[str, Any]:
    """What grain's packer packs: arrays as long as what the document takes of each of `names`."""
    fit = judged.fit
    takes = {
        "tokens": fit.slots,
        "frames": sum(fit.chunk_frames) // SUBSAMPLING,
        "segments": fit.segments,
    }
    return {"judged": judged, **{name: np.zeros(takes[name], np.int8) for name in names}}


FirstRun = Callable[[Sequence[JudgedDocument]], tuple[int, list[Document]]]


class _Runs(grain.IterDataset):
    """Divides buffers into consecutive runs of their documents with `first_run`."""

    def __init__(self, buffers: grain.IterDataset, first_run: FirstRun) -> None:
        super().__init__(buffers)
        self._first_run = first_run

    def __iter__(self) -> grain.DatasetIterator:
        return _RunsIterator(iter(self.parents[0]), self._first_run)

    def __str__(self) -> str:
        return "Runs"


class _RunsIterator(grain.DatasetIterator):
    """State: the parent's state before the buffer, and how many of the buffer's documents were yielded."""

    def __init__(self, buffers: grain.DatasetIterator, first_run: FirstRun) -> None:
        super().__init__(buffers)
        self._buffers = buffers
        self._first_run = first_run
        self._start(buffers.get_state(), 0)

    def _start(self, before: dict[str, Any], emitted: int) -> None:
        self._before, self._emitted = before, emitted
        self._buffer: Sequence[JudgedDocument] | None = None  # None: not read yet

    def __next__(self) -> list[Document]:
        while True:
            if self._buffer is None:
                self._buffer = next(self._buffers)
            rest = self._buffer[self._emitted :]
            if not rest:
                raise ValueError(
                    f"the state says {self._emitted} documents of a buffer were handed out, but it holds "
                    f"{len(self._buffer)}; restore with the data and packing settings it was saved with"
                )
            taken, run = self._first_run(rest)
            self._emitted += taken
            if self._emitted == len(self._buffer):
                self._start(self._buffers.get_state(), 0)
            if run:
                return run

    def get_state(self) -> dict[str, Any]:
        return {"packer": self._before, "emitted": self._emitted}

    def set_state(self, state: dict[str, Any]) -> None:
        self._buffers.set_state(state["packer"])
        self._start(state["packer"], state["emitted"])
