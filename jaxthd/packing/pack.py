"""Packs documents into one row of a Batch, laid out over the context ranks and the audio ranks.

Legend: T token slots, A slots of audio frames (BufferLimits.array_frames), E of their outputs, W numbers of a
frame, R = 1 row, K depths of multi-token prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Shaped

from jaxthd.config import FrontEnd
from jaxthd.errors import UserError
from jaxthd.packing.assignment import Placement, Shares
from jaxthd.packing.batch import AUDIO_FIELDS, Batch
from jaxthd.packing.document import Document, document_segments
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout, LayoutKind, attention_work, imbalance, order_documents


@dataclass(frozen=True)
class PackReport:
    """Statistics of a row. It is no NamedTuple, which grain would take for a tree of arrays.

    keys: the documents' keys, in buffer order: keys[d - 1] names document d (Batch.documents).
    real_tokens: token slots that are not padding. supervised_tokens: positions with weight 1.
    seconds: of each document's audio. imbalance: attention work of the busiest context rank / mean.
    segments: number of segments; without answers, that of the documents.
    """

    keys: tuple[str, ...]
    real_tokens: int
    supervised_tokens: int
    seconds: tuple[float, ...]
    imbalance: float
    segments: int

    @property
    def audio_seconds(self) -> float:
        """Seconds of all audio."""
        return sum(self.seconds, 0.0)


class _Placed(NamedTuple):
    """A segment in its row.

    document: the number of its document in the row, from 1. start: its first slot. indices: the tokens of its
    document that it holds. prefix: the id of the segment that it continues, or 0.
    """

    document: int
    start: int
    indices: Int[np.ndarray, " n"]
    prefix: int

    @property
    def end(self) -> int:
        """The slot behind its last one."""
        return self.start + len(self.indices)


class TokenArrays(NamedTuple):
    """A row's token arrays in document order, named as in Batch."""

    tokens: Int32[np.ndarray, " T"]
    targets: Int32[np.ndarray, " T"]
    weights: Float32[np.ndarray, " T"]
    segment_ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]
    document_ids: Int32[np.ndarray, " T"]
    prefixes: Int32[np.ndarray, " T"]

    @classmethod
    def empty(cls, capacity: int) -> "TokenArrays":
        """Arrays of a row that is all padding, to be written to."""
        tokens, targets, segment_ids, positions, document_ids, prefixes = np.zeros((6, capacity), np.int32)
        weights = np.zeros(capacity, np.float32)
        return cls(tokens, targets, weights, segment_ids, positions, document_ids, prefixes)


class _Audio(NamedTuple):
    """A row's audio arrays, named as in Batch; audio_slots in document order."""

    audio_slots: Int32[np.ndarray, " T"]
    features: Float32[np.ndarray, "A W"]
    frame_mask: Bool[np.ndarray, " A"]
    piece_ids: Int32[np.ndarray, " E"]
    piece_positions: Int32[np.ndarray, " E"]
    recording_ids: Int32[np.ndarray, " E"] | None
    recording_positions: Int32[np.ndarray, " E"] | None
    recording_labels: Int32[np.ndarray, "E labels"] | None


def pack_row(
    documents: Sequence[Document],
    *,
    capacity: int,
    audio_capacity: int,
    max_documents: int,
    front_end: FrontEnd | None = None,
    context: int = 1,
    audio_ranks: int = 1,
    round_to: int = 1,
    order_seed: int | None = 0,
    layout: LayoutKind = "buffer",
    depths: int = 0,
    extras: Sequence[str] = (),
    answers: bool = False,
    share_prompts: bool = True,
    shares: Shares | None = None,
    placement: Placement | None = None,
) -> tuple[Batch, PackReport]:
    """Packs documents into one buffer (Batch with R = 1). Without documents the row is all padding.

    capacity: token slots T, a multiple of 2 * context. audio_capacity: the most audio frames of the
        documents, which `audio_ranks` ranks share. 0: the Batch's audio fields are None.
    front_end: of the documents' audio; None where they have none.
    round_to: each document's slots are rounded up to a multiple of this, with padding slots behind it.
    order_seed: seeds the search for the order that balances attention (order_documents); None keeps the
        given order.
    layout: what is divided over the context axis (packing/layout.py). "whole" decides the order by the
        placement of the documents, and needs `shares`.
    shares: of the context ranks, for the layout "whole" on several. placement: of the documents on them; None
        finds one.
    depths: depths of multi-token prediction, K. extras: names of the Document.extras that the Batch gets;
        each number is stored at the position before its token.
    answers: documents may have several answers, so that the Batch has document_ids; and prefixes, if
    share_prompts: the slots of a prompt hold for all of its answers (packing/document.py).
    Position i is supervised (weight 1, target the next token) iff token i + 1 of the same document is:
    labels are masked first and shifted after, and never reach into another document.
    Raises ValueError if something does not fit; the message says which setting to increase. And for a
    document with several answers without `answers`.
    """
    limits = BufferLimits(
        capacity, audio_capacity, max_documents, audio_ranks, round_to, front_end, share_prompts, shares
    )
    if not answers:
        _require_single(documents)
    limits.require_room(documents)
    if front_end is None and any(document.pieces for document in documents):
        raise ValueError(
            "the documents have audio, and there is no front end; expected the one that made it: give "
            "front_end"
        )
    starts = splits = None
    if shares is not None:
        placement = placement or limits.place(documents)
        documents = [documents[d] for d in placement.order]
        starts, splits = shares.starts(placement, list(map(limits.slots, documents)))
    elif order_seed is not None and layout == "buffer":
        order = _balanced_order(documents, limits, context, order_seed)
        documents = [documents[d] for d in order]
    placed = _place(documents, limits, starts)
    row = _write_tokens(documents, placed, capacity)
    audio = _write_audio(documents, placed, limits) if audio_capacity and front_end else None
    perm = ContextLayout(layout, context, round_to).permutation(row.segment_ids, splits)
    batch = _as_batch(row, audio, perm, depths)._replace(
        extras=_write_extras(documents, placed, capacity, extras, perm),
        document_ids=row.document_ids[perm][None] if answers else None,
        prefixes=row.prefixes[perm][None] if answers and share_prompts else None,
        splits=None if splits is None else splits[None],
    )
    work = attention_work(_keys_before(row)[perm], row.segment_ids[perm], context)
    of_frames = front_end.seconds if front_end else float
    seconds = tuple(of_frames(sum(piece.own_frames for piece in d.pieces)) for d in documents)
    return batch, _report(documents, row, seconds, work)


def _report(
    documents: Sequence[Document],
    row: TokenArrays,
    seconds: tuple[float, ...],
    work: Int[np.ndarray, " context"],
) -> PackReport:
    return PackReport(
        keys=tuple(d.key for d in documents),
        real_tokens=int((row.segment_ids > 0).sum()),
        supervised_tokens=int(row.weights.sum()),
        seconds=seconds,
        imbalance=imbalance(work),
        segments=int(row.segment_ids.max(initial=0)),
    )


def _require_single(documents: Sequence[Document]) -> None:
    for document in documents:
        if document.answers:
            raise ValueError(
                f"document {document.key!r} has {len(document.answers)} answers; expected documents of one "
                "sequence: pack with answers=True"
            )


def _balanced_order(
    documents: Sequence[Document], limits: BufferLimits, context: int, seed: int
) -> list[int]:
    """The order of the documents that balances attention over the context ranks."""
    slots, work = list(map(limits.slots, documents)), None
    if context > 1 and any(document.answers for document in documents):
        rows = (_write_tokens([d], _place([d], limits), n) for d, n in zip(documents, slots, strict=True))
        work = [np.where(row.segment_ids > 0, _keys_before(row) + 1, 0) for row in rows]
    lengths = [len(document) for document in documents]
    return order_documents(lengths, limits.capacity, context, seed, slots, work)[0]


def _place(
    documents: Sequence[Document], limits: BufferLimits, starts: Sequence[int] | None = None
) -> list[_Placed]:
    """The segments of a row, in document order: the segment with id s is the (s - 1)-th.

    starts: the slot at which each document begins; None: behind the one before.
    """
    placed: list[_Placed] = []
    start = 0
    for number, document in enumerate(documents, 1):
        first = len(placed) + 1
        start = start if starts is None else starts[number - 1]
        for indices, is_continuation in document_segments(document, limits.share_prompts):
            placed.append(_Placed(number, start, indices, first if is_continuation else 0))
            start += -(-len(indices) // limits.round_to) * limits.round_to
    return placed


def _keys_before(row: TokenArrays) -> Int[np.ndarray, " T"]:
    """Number of tokens before each one, those of the segment that its own continues included."""
    lengths = np.bincount(row.segment_ids, minlength=1)
    lengths[0] = 0
    return row.positions + lengths[row.prefixes]


def _write_extras(
    documents: Sequence[Document],
    placed: Sequence[_Placed],
    capacity: int,
    names: Sequence[str],
    perm: Int32[np.ndarray, " T"],
) -> dict[str, Float32[np.ndarray, "R T"]]:
    """Batch.extras. Raises UserError for a document that lacks one."""
    extras = {name: np.zeros(capacity, np.float32) for name in names}
    for document in documents:
        missing = [name for name in names if name not in document.extras]
        if missing:
            raise UserError(
                f"document {document.key!r} has no extras {', '.join(missing)}, which the objective reads; "
                "expected a number for each token: give them in Document.extras"
            )
    for segment in placed:
        for name, x in extras.items():
            of_document = documents[segment.document - 1].extras[name]
            x[segment.start : segment.end - 1] = of_document[segment.indices[1:]]
    return {name: x[perm][None] for name, x in extras.items()}


def _write_tokens(documents: Sequence[Document], placed: Sequence[_Placed], capacity: int) -> TokenArrays:
    row = TokenArrays.empty(capacity)
    for number, (d, start, indices, prefix) in enumerate(placed, 1):
        end, document = start + len(indices), documents[d - 1]
        row.tokens[start:end] = document.tokens[indices]
        row.segment_ids[start:end] = number
        row.positions[start:end] = np.arange(len(indices))
        row.document_ids[start:end], row.prefixes[start:end] = d, prefix
        supervised, after = document.supervised[indices[1:]], document.tokens[indices[1:]]
        row.weights[start : end - 1] = supervised
        row.targets[start : end - 1] = np.where(supervised, after, 0)
    return row


def _write_audio(documents: Sequence[Document], placed: Sequence[_Placed], limits: BufferLimits) -> _Audio:
    """Writes every piece of audio, once, where limits.piece_starts says.

    Raises ValueError for a piece with another number of columns than the front end's frames have.
    """
    front_end = limits.front_end
    assert front_end is not None
    frames, (per_unit, outputs), width = limits.array_frames, limits.unit, front_end.width
    audio_slots = np.full(limits.capacity, -1, np.int32)
    features, frame_mask = np.zeros((frames, width), np.float32), np.zeros(frames, bool)
    piece_ids, piece_positions, recording_ids = np.zeros((3, limits.array_outputs), np.int32)
    recording_positions = np.full(limits.array_outputs, -1, np.int32)
    starts = limits.piece_starts(documents)
    pieces = [piece for document in documents for piece in document.pieces]
    begun = zip(chain(*starts), pieces, strict=True)
    rising = sorted(first for first, piece in begun if len(piece.features))
    number = {first: i for i, first in enumerate(rising, 1)}
    slots_of_tokens = [np.full(len(document), -1, np.int32) for document in documents]
    labels = np.full((limits.array_outputs, front_end.labels_per_output), -1, np.int32)
    waiting: tuple[int, ...] = ()
    recording = heard = 0
    for document, of_tokens, starts_of_document in zip(documents, slots_of_tokens, starts, strict=True):
        slots = [np.empty(0, np.int32)]
        for piece, first in zip(document.pieces, starts_of_document, strict=True):
            x, recording, heard = piece.features, recording + piece.begins, 0 if piece.begins else heard
            if x.shape[1] != width:
                raise ValueError(
                    f"document {document.key!r} has audio frames of {x.shape[1]} numbers, expected {width}, "
                    f"as {front_end.title} has"
                )
            features[first : first + len(x)] = x
            frame_mask[first : first + len(x) - piece.padding] = True
            count = piece.units(limits.unit) * outputs
            at = first // per_unit * outputs + np.arange(count, dtype=np.int32)
            piece_ids[at], piece_positions[at] = number.get(first, 0), np.arange(count)
            recording_ids[at] = recording
            slots.append(at[piece.first : piece.first + piece.tokens])
            position = heard - piece.first + np.arange(count, dtype=np.int32)
            is_own = (position >= heard) & (position < heard + piece.tokens)
            recording_positions[at] = np.where(is_own, position, -2 - position)
            waiting = piece.labels if piece.begins else waiting
            room = piece.tokens * labels.shape[1]
            own, waiting = waiting[:room], waiting[room:]
            of_piece = np.pad(np.asarray(own, np.int32), (0, room - len(own)), constant_values=-1)
            labels[slots[-1]] = of_piece.reshape(piece.tokens, -1)
            heard += piece.tokens
        of_tokens[document.is_audio] = np.concatenate(slots)
    for segment in placed:
        audio_slots[segment.start : segment.end] = slots_of_tokens[segment.document - 1][segment.indices]
    of_row = _Audio(
        audio_slots,
        features,
        frame_mask,
        piece_ids,
        piece_positions,
        recording_ids,
        recording_positions,
        labels,
    )
    if not front_end.reads_recordings:
        of_row = of_row._replace(recording_ids=None, recording_positions=None)
    return of_row if front_end.labels_per_output else of_row._replace(recording_labels=None)


def laid_out(row: TokenArrays, perm: Int32[np.ndarray, " T"], depths: int) -> Batch:
    """The batch of a row of tokens alone, one segment a document. row: in document order. perm, depths: as in
    pack_row."""
    return _as_batch(row, None, perm, depths)._replace(document_ids=None, prefixes=None)


def _future(row: TokenArrays, audio: _Audio | None, depths: int) -> dict[str, Shaped[np.ndarray, "K T"]]:
    """The batch's fields for multi-token prediction, from a row in document order."""
    sources = [("tokens", row.tokens, -1), ("targets", row.targets, 0), ("weights", row.weights, 0)]
    if audio:
        sources.append(("audio_slots", audio.audio_slots, -1))
    found = {f"future_{name}": np.full((depths, len(x)), fill, x.dtype) for name, x, fill in sources}
    ids = row.segment_ids
    for distance in range(1, min(depths, len(ids) - 1) + 1):
        same_document = (ids[distance:] > 0) & (ids[distance:] == ids[:-distance])
        for name, x, _ in sources:
            future = found[f"future_{name}"][distance - 1, :-distance]
            np.copyto(future, x[distance:], where=same_document)
    return found


def _as_batch(row: TokenArrays, audio: _Audio | None, perm: Int32[np.ndarray, " T"], depths: int) -> Batch:
    """Lays out the arrays, given in document order, by `perm`, and adds a dim for the row."""
    of_tokens = row._asdict() | _future(row, audio, depths)
    of_audio: dict[str, Any] = audio._asdict() if audio else dict.fromkeys(AUDIO_FIELDS)
    if audio:
        of_tokens["audio_slots"] = of_audio.pop("audio_slots")
    fields = of_audio | {name: x[..., perm] for name, x in of_tokens.items()}
    rows: dict[str, Any] = {name: x if x is None else x[None] for name, x in fields.items()}
    return Batch(**rows)
