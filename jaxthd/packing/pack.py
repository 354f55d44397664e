"""Packs documents into one row of a Batch, laid out over the context ranks and the audio ranks.

Legend: T token slots, A mel frame slots (BufferLimits.array_frames), E = A / 8, M mel bands, R = 1 row, K
depths of multi-token prediction.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from jaxthd.errors import UserError
from jaxthd.packing.balance import attention_work, imbalance, order_documents
from jaxthd.packing.batch import AUDIO_FIELDS, Batch
from jaxthd.packing.document import SUBSAMPLING, Document, encoder_frames
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout


class PackReport(NamedTuple):
    """Statistics of a row.

    keys: the documents' keys, in buffer order: keys[s - 1] names segment s.
    real_tokens: token slots that are not padding. supervised_tokens: positions with weight 1.
    audio_seconds: valid mel frames / 100. imbalance: attention work of the busiest context rank / mean.
    """

    keys: tuple[str, ...]
    real_tokens: int
    supervised_tokens: int
    audio_seconds: float
    imbalance: float


class _Tokens(NamedTuple):
    """A row's token arrays in document order, named as in Batch."""

    tokens: Int32[np.ndarray, " T"]
    targets: Int32[np.ndarray, " T"]
    weights: Float32[np.ndarray, " T"]
    segment_ids: Int32[np.ndarray, " T"]
    positions: Int32[np.ndarray, " T"]


class _Audio(NamedTuple):
    """A row's audio arrays, named as in Batch; audio_slots in document order."""

    audio_slots: Int32[np.ndarray, " T"]
    mels: Float32[np.ndarray, "A M"]
    mel_mask: Bool[np.ndarray, " A"]
    chunk_ids: Int32[np.ndarray, " E"]
    chunk_positions: Int32[np.ndarray, " E"]


def pack_row(
    documents: Sequence[Document],
    *,
    capacity: int,
    audio_capacity: int,
    num_mels: int,
    max_documents: int,
    context: int = 1,
    audio_ranks: int = 1,
    round_to: int = 1,
    longest_chunk: int = 0,
    order_seed: int | None = 0,
    layout: Literal["buffer", "document"] = "buffer",
    depths: int = 0,
    extras: Sequence[str] = (),
) -> tuple[Batch, PackReport]:
    """Packs documents into one buffer (Batch with R = 1). Without documents the row is all padding.

    capacity: token slots T, a multiple of 2 * context. audio_capacity: the most mel frames of the documents.
        `audio_ranks` ranks share them; each holds whole encoder chunks. 0: the Batch's audio fields are None.
    longest_chunk: mel frames that each rank has room for, where that is more than its even share.
    round_to: each document's slots are rounded up to a multiple of this, with padding slots behind it.
    order_seed: seeds the search for the order that balances attention (order_documents); None keeps the
        given order.
    layout: what is divided over the context axis (packing/layout.py). "document" needs a round_to that is a
        multiple of 2 * context, and keeps the given order, which changes no rank's work there.
    depths: depths of multi-token prediction, K. extras: names of the Document.extras that the Batch gets;
        each number is stored at the position before its token.
    Position i is supervised (weight 1, target the next token) iff token i + 1 of the same document is:
    labels are masked first and shifted after, and never reach into another document.
    Raises ValueError if something does not fit; the message says which setting to increase.
    """
    limits = BufferLimits(capacity, audio_capacity, max_documents, audio_ranks, round_to, longest_chunk)
    ranks, slots = limits.assign(documents), list(map(limits.slots, documents))
    order = list(range(len(documents)))
    if order_seed is not None and layout == "buffer":
        order, _ = order_documents([len(d) for d in documents], capacity, context, order_seed, slots)

    documents, ranks = [documents[d] for d in order], [ranks[d] for d in order]
    starts = np.cumsum([0, *(slots[d] for d in order)])[:-1].tolist()
    row = _write_tokens(documents, starts, capacity)
    audio = None
    if audio_capacity:
        audio = _write_audio(documents, starts, ranks, limits, num_mels)
    perm = ContextLayout(layout, context, round_to).permutation(row.segment_ids)
    report = PackReport(
        keys=tuple(d.key for d in documents),
        real_tokens=sum(len(d) for d in documents),
        supervised_tokens=int(row.weights.sum()),
        audio_seconds=int(audio.mel_mask.sum()) / 100 if audio else 0.0,
        imbalance=imbalance(attention_work(row.positions[perm], row.segment_ids[perm], context)),
    )
    batch = _as_batch(row, audio, _future(row, audio, depths), perm)
    return batch._replace(extras=_write_extras(documents, starts, capacity, extras, perm)), report


def _write_extras(
    documents: Sequence[Document],
    starts: Sequence[int],
    capacity: int,
    names: Sequence[str],
    perm: Int32[np.ndarray, " T"],
) -> dict[str, Float32[np.ndarray, "R T"]]:
    """Batch.extras. Raises UserError for a document that lacks one."""
    extras = {name: np.zeros(capacity, np.float32) for name in names}
    for document, start in zip(documents, starts, strict=True):
        missing = [name for name in names if name not in document.extras]
        if missing:
            raise UserError(
                f"document {document.key!r} has no extras {', '.join(missing)}, which the objective reads; "
                "expected a number for each token: give them in Document.extras"
            )
        for name, x in extras.items():
            x[start : start + len(document) - 1] = document.extras[name][1:]
    return {name: x[perm][None] for name, x in extras.items()}


def _write_tokens(documents: Sequence[Document], starts: Sequence[int], capacity: int) -> _Tokens:
    """starts: the first slot of each document."""
    tokens, targets, segment_ids, positions = np.zeros((4, capacity), np.int32)
    weights = np.zeros(capacity, np.float32)
    for segment, (document, start) in enumerate(zip(documents, starts, strict=True), 1):
        end = start + len(document)
        tokens[start:end] = document.tokens
        segment_ids[start:end] = segment
        positions[start:end] = np.arange(len(document))
        weights[start : end - 1] = document.supervised[1:]
        targets[start : end - 1] = np.where(document.supervised[1:], document.tokens[1:], 0)
    return _Tokens(tokens, targets, weights, segment_ids, positions)


def _write_audio(
    documents: Sequence[Document],
    starts: Sequence[int],
    ranks: Sequence[Sequence[int]],
    limits: BufferLimits,
    num_mels: int,
) -> _Audio:
    """Writes every encoder chunk behind the ones that its rank already holds.

    starts: the first token slot of each document. ranks: the audio rank of each of its chunks.
    Raises ValueError for a chunk with another number of mel bands.
    """
    frames = limits.array_frames
    audio_slots = np.full(limits.capacity, -1, np.int32)
    mels, mel_mask = np.zeros((frames, num_mels), np.float32), np.zeros(frames, bool)
    chunk_ids, chunk_positions = np.zeros((2, frames // SUBSAMPLING), np.int32)
    next_frame = [rank * limits.rank_frames for rank in range(limits.audio_ranks)]
    chunks_of_rank = [0] * limits.audio_ranks
    for document, start, ranks_of_document in zip(documents, starts, ranks, strict=True):
        slots = [np.empty(0, np.int32)]
        for chunk, rank in zip(document.chunks, ranks_of_document, strict=True):
            if chunk.shape[1] != num_mels:
                raise ValueError(
                    f"document {document.key!r} has {chunk.shape[1]} mel bands, expected {num_mels}"
                )
            first, count = next_frame[rank], encoder_frames(len(chunk))
            mels[first : first + len(chunk)] = chunk
            mel_mask[first : first + len(chunk)] = True
            at = first // SUBSAMPLING + np.arange(count, dtype=np.int32)
            chunks_of_rank[rank] += count > 0
            chunk_ids[at], chunk_positions[at] = chunks_of_rank[rank], np.arange(count)
            next_frame[rank] += SUBSAMPLING * count
            slots.append(at)
        audio_slots[start : start + len(document)][document.is_audio] = np.concatenate(slots)
    return _Audio(audio_slots, mels, mel_mask, chunk_ids, chunk_positions)


def _future(row: _Tokens, audio: _Audio | None, depths: int) -> dict[str, Shaped[np.ndarray, "K T"]]:
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


def _as_batch(
    row: _Tokens,
    audio: _Audio | None,
    future: dict[str, Shaped[np.ndarray, "K T"]],
    perm: Int32[np.ndarray, " T"],
) -> Batch:
    """Lays out the arrays, given in document order, by `perm`, and adds a dim for the row."""
    of_tokens = row._asdict() | future
    of_audio = audio._asdict() if audio else dict.fromkeys(AUDIO_FIELDS)
    if audio:
        of_tokens["audio_slots"] = of_audio.pop("audio_slots")
    laid_out = {name: x[..., perm] for name, x in of_tokens.items()}
    fields: dict[str, Any] = of_audio | laid_out
    rows: dict[str, Any] = {name: x if x is None else x[None] for name, x in fields.items()}
    return Batch(**rows)
