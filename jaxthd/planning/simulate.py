"""Simulates packing from lengths alone: the buffers that the loader would make, and their costs."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxthd.config import Config, DataConfig, Packing
from jaxthd.data.best_fit import pack_stream
from jaxthd.packing.assignment import Placement, Shares
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.packing.layout import ContextLayout, attention_work, imbalance, order_documents
from jaxthd.packing.waiting import next_row
from jaxthd.planning.lengths import Lengths, slots_of

BALANCED = 100
"""Number of buffers, evenly spaced, whose attention work is computed."""


COSTS = "padding|of audio frames|skipped|overhead"


class Outcome(NamedTuple):
    """The result of packing a stream of documents with the settings of `config`.

    buffers: lists of documents. padding, audio_padding: shares of token slots and of audio frames.
    skipped: share of documents that fit no buffer.
    overhead: work on padding over work on documents (see jaxthd.planning.search.flops_per_slot).
    placements: of each buffer's documents, in the buffer's order, under the layout "whole"; else [].
    """

    config: Config
    buffers: list[list[int]]
    padding: float
    audio_padding: float
    skipped: float
    overhead: float
    placements: list[Placement] = []  # noqa: RUF012 (nobody changes it)

    @property
    def data(self) -> DataConfig:
        """The settings that the stream was packed with."""
        return self.config.data

    @property
    def documents(self) -> Int[np.ndarray, " buffers"]:
        """Number of documents in each buffer."""
        return np.array([len(buffer) for buffer in self.buffers], int)

    @property
    def costs(self) -> list[str]:
        """Cells for the columns COSTS."""
        shares = self.padding, self.audio_padding, self.skipped, self.overhead
        return [f"{share:.1%}" for share in shares]


def simulate(stream: Lengths, config: Config, work: tuple[float, float]) -> Outcome:
    """Packs the stream with the settings of config.data, for config.mesh.

    The last group of buffers is not counted: they are half empty only because the stream ends, and training
    goes on. work: work of a token slot and of a mel frame (jaxthd.planning.search.flops_per_slot).
    """
    data, limits = config.data, BufferLimits.of(config)
    slots = slots_of(stream, config)
    kept = np.flatnonzero((slots <= data.capacity) & (stream.frames <= data.audio_capacity))
    groups = list(
        pack_lengths(
            slots[kept].tolist(),
            stream.frames[kept].tolist(),
            capacity=data.capacity,
            audio_capacity=data.audio_capacity,
            max_documents=data.max_documents,
            packing=data.packing,
            packing_bins=data.packing_bins,
            unit_frames=limits.unit[0],
        )
    )
    if len(groups) > 1:
        groups.pop()
    packed = [kept[buffer].tolist() for buffer in chain(*groups)]
    placements, fits = list[Placement](), None
    if limits.shares is None or data.packing == "padded":
        buffers = packed
    else:
        fits = fits_of(stream, config)
        placed = list(placed_rows(packed, fits, limits))
        buffers, placements = [row for row, _ in placed], [placement for _, placement in placed]
    slots_taken, frames_held = len(buffers) * data.capacity, len(buffers) * limits.array_frames
    inside = list(chain(*packed))
    assigned = len(inside) if fits is None else sum(not fits[i].unassignable for i in inside)
    return _outcome(stream, config, buffers, slots_taken, frames_held, work)._replace(
        skipped=1 - len(kept) / len(slots) * assigned / max(len(inside), 1), placements=placements
    )


def padded(
    stream: Lengths, config: Config, rows: int, work: tuple[float, float], *, epoch: int = 0
) -> Outcome:
    """Batches of `rows` documents, each batch padded to its longest document.

    epoch: number of documents of an epoch, which are sorted by length; 0: the stream's order is kept.
    """
    batches, count = [], len(stream.tokens)
    for start in range(0, count, epoch or count):
        documents = np.arange(start, min(start + (epoch or count), count))
        if epoch:
            documents = documents[np.argsort(stream.tokens[documents], kind="stable")]
        batches += [documents[i : i + rows] for i in range(0, len(documents), rows)]
    slots, frames = (sum(int(x[b].max()) * len(b) for b in batches) for x in (stream.tokens, stream.frames))
    return _outcome(stream, config, [b.tolist() for b in batches], slots, frames, work)


def _outcome(
    stream: Lengths,
    config: Config,
    buffers: list[list[int]],
    slots: int,
    frames: int,
    work: tuple[float, float],
) -> Outcome:
    """The outcome of buffers that have `slots` token slots and `frames` audio frames in all."""
    inside = np.array(list(chain(*buffers)), int)
    tokens, front_end = int(stream.tokens[inside].sum()), config.model.encoder
    heard = float(stream.seconds[inside].sum()) / front_end.seconds(1) if front_end else 0.0
    useful = work[0] * tokens + work[1] * heard
    return Outcome(
        config,
        buffers,
        padding=1 - tokens / max(slots, 1),
        audio_padding=1 - heard / frames if frames else 0.0,
        skipped=0.0,
        overhead=(work[0] * slots + work[1] * frames) / useful - 1 if useful else math.inf,
    )


def balance(stream: Lengths, outcome: Outcome) -> tuple[float, float]:
    """Attention work of the busiest context rank over the mean: (as packed, as the loader orders documents).

    The results are means over BALANCED buffers.
    """
    capacity, context = outcome.config.data.capacity, outcome.config.mesh.context
    layout, slots = ContextLayout.of(outcome.config), slots_of(stream, outcome.config)
    found = []
    if (shares := Shares.of(outcome.config)) is not None:
        fits, every = fits_of(stream, outcome.config), max(len(outcome.buffers) // BALANCED, 1)
        for buffer, placement in list(zip(outcome.buffers, outcome.placements, strict=True))[::every]:
            uneven = imbalance(shares.rank_work(placement, [fits[document].size for document in buffer]))
            found.append((uneven, uneven))
        before, after = np.mean(found, axis=0)
        return float(before), float(after)
    for buffer in outcome.buffers[:: max(len(outcome.buffers) // BALANCED, 1)]:
        ids, positions, start = np.zeros(capacity, int), np.zeros(capacity, int), 0
        for segment, document in enumerate(buffer, 1):
            end = start + stream.tokens[document]
            ids[start:end], positions[start:end] = segment, np.arange(end - start)
            start += slots[document]
        perm = layout.permutation(ids)
        lengths, taken = stream.tokens[buffer].tolist(), slots[buffer].tolist()
        given = imbalance(attention_work(positions[perm], ids[perm], context))
        found.append((given, order_documents(lengths, capacity, context, 0, taken)[1]))
    before, after = np.mean(found, axis=0)
    return float(before), float(after)


def pack_lengths(
    slots: Sequence[int],
    frames: Sequence[int],
    *,
    capacity: int,
    audio_capacity: int,
    max_documents: int,
    packing: Packing,
    packing_bins: int,
    unit_frames: int = 1,
) -> Iterator[list[list[int]]]:
    """Fills buffers as the packers do; yields groups of buffers, each a list of indices of documents.

    slots, frames: token slots and audio frames (whole units, of unit_frames each) that each document takes;
        each must fit a buffer. The other arguments are those of PackDocuments, which also shuffles the
    buffers of a group. A group of packing_bins buffers is yielded when a document fits none of them; the last
    group may be smaller. Best-fit decreasing yields windows. "padded" puts one document in each buffer. It
    takes about 2 us a document at 8 bins.
    Source: the algorithms of grain.experimental.FirstFitPackIterDataset and BestFitPackIterDataset.
    """
    if packing == "best_fit_decreasing":
        sizes = [(n, f // unit_frames, 1) for n, f in zip(slots, frames, strict=True)]
        yield from pack_stream(sizes, (capacity, audio_capacity // unit_frames, max_documents), packing_bins)
        return
    most = 1 if packing == "padded" else max_documents
    bins = 1 if packing == "padded" else packing_bins
    group: list[list[int]] = []
    used: list[tuple[int, int]] = []
    for i, (n, f) in enumerate(zip(slots, frames, strict=True)):
        fitting = (
            b
            for b, (tokens, audio) in enumerate(used)
            if tokens + n <= capacity and audio + f <= audio_capacity and len(group[b]) < most
        )
        if packing == "best_fit":  # fullest in tokens and units of audio together; first of equals
            chosen = max(fitting, key=lambda b: used[b][0] + used[b][1] // unit_frames, default=None)
        else:
            chosen = next(fitting, None)
        if chosen is None:
            if len(group) == bins:
                yield group
                group, used = [], []
            chosen = len(group)
            group.append([])
            used.append((0, 0))
        group[chosen].append(i)
        used[chosen] = used[chosen][0] + n, used[chosen][1] + f
    if group:
        yield group


def placed_rows(
    packed: Sequence[Sequence[int]], fits: Sequence[Fit], limits: BufferLimits
) -> Iterator[tuple[list[int], Placement]]:
    """The rows under the layout "whole", as PackDocuments chooses them: documents, and their placement.

    packed: the packer's buffers, indices of documents. fits: of each document. The rows are full: those that
    are made when no more buffers come are left out.
    """
    waiting: list[tuple[int, int]] = []  # (number of its buffer, document)
    for read, buffer in enumerate(packed):
        waiting += [(read, document) for document in buffer if not fits[document].unassignable]
        while True:
            ages = [read - number for number, _ in waiting]
            placed = next_row(limits, [fits[document] for _, document in waiting], ages)
            if placed is None:
                break
            yield [waiting[i][1] for i in placed.order], placed.renumbered()
            taken = set(placed.order)
            waiting = [entry for i, entry in enumerate(waiting) if i not in taken]


def fits_of(stream: Lengths, config: Config) -> list[Fit]:
    """The fit of each document, from its lengths alone."""
    slots, shares = slots_of(stream, config), Shares.of(config)

    def fit(slots: int, tokens: int, pieces: Sequence[int]) -> Fit:
        """The demand of a document, and why no rank can hold it where that is so."""
        found = Fit(slots, 1, tuple(pieces), "", "", tokens * (tokens + 1) // 2)
        if shares is None or shares.fits(found.size):
            return found
        return found._replace(unassignable="longer than a context rank's share")

    return [fit(*sizes) for sizes in zip(slots.tolist(), stream.tokens.tolist(), stream.pieces, strict=True)]
