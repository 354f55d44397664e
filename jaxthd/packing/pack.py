"""Documents -> one row of a Batch, laid out over the context axis and over the ranks that encode its audio.

Legend: T token slots, A mel frame slots, E = A / 8, M mel bands, R = 1 row, K depths of multi-token
prediction.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Shaped

from jaxthd.packing.balance import assign_chunks, attention_work, imbalance, order_documents
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING, Document, encoder_frames
from jaxthd.packing.layout import row_permutation


class PackReport(NamedTuple):
    """What a row holds.

    keys: of the documents, in buffer order: keys[s - 1] names segment s.
    real_tokens: token slots that are not padding. supervised_tokens: positions with weight 1.
    audio_seconds: valid mel frames / 100. imbalance: attention work of the worst context rank / mean.
    cu_seqlens, cu_seqlens_padded: int32 [max_documents + 1], sums of the documents' lengths in buffer order,
        without and with round_to's padding; the latter are offsets in the buffer before the context layout.
    supervised_slots: int32 [T], where in the laid-out row weights is 1, filled up with T.
    """

    keys: tuple[str, ...]
    real_tokens: int
    supervised_tokens: int
    audio_seconds: float
    imbalance: float
    cu_seqlens: Int32[np.ndarray, " D_plus_1"]
    cu_seqlens_padded: Int32[np.ndarray, " D_plus_1"]
    supervised_slots: Int32[np.ndarray, " T"]


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
    order_seed: int | None = 0,
    layout: Literal["buffer", "document"] = "buffer",
    depths: int = 0,
) -> tuple[Batch, PackReport]:
    """Packs documents into one buffer (Batch with R = 1); no documents give an all-padding row.

    capacity: token slots T, a multiple of 2 * context. audio_capacity: mel frames A over all `audio_ranks`
        ranks that share the row's audio; each rank's share A / audio_ranks is a multiple of 8 and holds whole
        chunks.
    round_to: each document's slots are rounded up to a multiple of this, with padding slots behind it.
    order_seed: seeds the choice of the order that evens out attention (order_documents); None
        keeps the given one.
    layout: what is cut over the context axis (packing/layout.py). "document" needs a round_to that is a
        multiple of 2 * context, and keeps the given order: there it evens out nothing.
    depths: of multi-token prediction, K.
    Position i is supervised (weight 1, target the next token) iff token i + 1 of the same document is:
    labels are masked first, shifted after, and never reach into another document.
    Raises ValueError when something does not fit; the message says what to raise.
    """
    share = rank_share(audio_capacity, audio_ranks)
    if len(documents) > max_documents:
        raise ValueError(f"{len(documents)} documents in a row, at most {max_documents} (max_documents)")
    rounded = [-(-len(d) // round_to) * round_to for d in documents]
    if sum(rounded) > capacity:
        raise ValueError(f"documents take {sum(rounded)} token slots, the buffer has {capacity} (capacity)")
    placed = _place_chunks(documents, audio_ranks, share)
    order = list(range(len(documents)))
    if order_seed is not None and layout == "buffer":
        order, _ = order_documents([len(d) for d in documents], capacity, context, order_seed, rounded)

    tokens, targets, segment_ids, positions = np.zeros((4, capacity), np.int32)
    weights = np.zeros(capacity, np.float32)
    audio_slots = np.full(capacity, -1, np.int32)
    mels = np.zeros((audio_capacity, num_mels), np.float32)
    mel_mask = np.zeros(audio_capacity, bool)
    chunk_ids, chunk_positions = np.zeros((2, audio_capacity // SUBSAMPLING), np.int32)

    used, chunks_of_rank, start = [0] * audio_ranks, [0] * audio_ranks, 0
    for segment, d in enumerate(order, 1):
        document, end = documents[d], start + len(documents[d])
        tokens[start:end] = document.tokens
        segment_ids[start:end] = segment
        positions[start:end] = np.arange(len(document))
        weights[start : end - 1] = document.supervised[1:]
        targets[start : end - 1] = np.where(document.supervised[1:], document.tokens[1:], 0)
        frames_of_document = [np.empty(0, np.int32)]
        for chunk, rank in zip(document.chunks, placed[d], strict=True):
            if chunk.shape[1] != num_mels:
                raise ValueError(
                    f"document {document.key!r} has {chunk.shape[1]} mel bands, expected {num_mels}"
                )
            first, frames = rank * share + used[rank], encoder_frames(len(chunk))
            mels[first : first + len(chunk)] = chunk
            mel_mask[first : first + len(chunk)] = True
            at = np.arange(first // SUBSAMPLING, first // SUBSAMPLING + frames, dtype=np.int32)
            chunks_of_rank[rank] += frames > 0
            chunk_ids[at], chunk_positions[at] = chunks_of_rank[rank], np.arange(frames)
            used[rank] += SUBSAMPLING * frames
            frames_of_document.append(at)
        audio_slots[start:end][document.is_audio] = np.concatenate(frames_of_document)
        start += rounded[d]

    perm = row_permutation(segment_ids, context, layout, round_to)
    of_tokens = (tokens, targets, weights, segment_ids, positions, audio_slots)
    of_depths = _ahead(tokens, targets, weights, segment_ids, audio_slots, depths)
    laid_out, ahead = ([x[..., perm] for x in arrays] for arrays in (of_tokens, of_depths))
    batch = Batch(*(x[None] for x in (*laid_out, mels, mel_mask, chunk_ids, chunk_positions, *ahead)))
    return batch, PackReport(
        keys=tuple(documents[d].key for d in order),
        real_tokens=sum(len(d) for d in documents),
        supervised_tokens=int(weights.sum()),
        audio_seconds=int(mel_mask.sum()) / 100,
        imbalance=imbalance(attention_work(positions[perm], segment_ids[perm], context)),
        cu_seqlens=cu_seqlens(segment_ids, max_documents),
        cu_seqlens_padded=cu_seqlens(segment_ids, max_documents, round_to),
        supervised_slots=supervised_slots(weights[perm]),
    )


def _ahead(
    tokens: Int32[np.ndarray, " T"],
    targets: Int32[np.ndarray, " T"],
    weights: Float32[np.ndarray, " T"],
    segment_ids: Int32[np.ndarray, " T"],
    audio_slots: Int32[np.ndarray, " T"],
    depths: int,
) -> tuple[Shaped[np.ndarray, "K T"], ...]:
    """What the batch has of the tokens ahead, of a row in document order."""
    found = [
        np.full((depths, len(tokens)), fill, x.dtype)
        for x, fill in zip((tokens, audio_slots, targets, weights), (-1, -1, 0, 0), strict=True)
    ]
    for depth in range(min(depths, len(tokens) - 1)):
        distance = depth + 1
        same = (segment_ids[distance:] > 0) & (segment_ids[distance:] == segment_ids[:-distance])
        for all_depths, x in zip(found, (tokens, audio_slots, targets, weights), strict=True):
            np.copyto(all_depths[depth, :-distance], x[distance:], where=same)
    return tuple(found)


def rank_share(audio_capacity: int, audio_ranks: int) -> int:
    """Mel frames each audio rank holds of a row.

    Raises ValueError unless audio_capacity cuts into audio_ranks shares of a multiple of 8 frames.
    """
    if audio_ranks < 1 or audio_capacity % (SUBSAMPLING * audio_ranks):
        raise ValueError(
            f"audio_capacity {audio_capacity} does not cut over {audio_ranks} audio ranks in encoder frames; "
            f"make it a multiple of {SUBSAMPLING} * {max(audio_ranks, 1)} mel frames"
        )
    return audio_capacity // audio_ranks


def document_frames(documents: Sequence[Document]) -> list[int]:
    """Mel frames each encoder chunk takes in the audio buffer, in order: rounded up to multiples of 8."""
    return [SUBSAMPLING * encoder_frames(len(c)) for d in documents for c in d.chunks]


def cu_seqlens(
    segment_ids: Int[np.ndarray, " T"], max_documents: int, round_to: int = 1
) -> Int32[np.ndarray, " max_documents_plus_1"]:
    """Sums of the document lengths, from 0, int32 [max_documents + 1], filled up with the total.

    segment_ids: of one row, its tokens in any order.
    round_to: as the row was packed with: offsets of the documents in the buffer before the context layout.
        1: sums of the real lengths.
    Raises ValueError when a segment id exceeds max_documents.
    """
    counts = np.bincount(segment_ids[segment_ids > 0], minlength=max_documents + 1)
    if len(counts) > max_documents + 1:
        raise ValueError(f"segment id {len(counts) - 1} exceeds max_documents {max_documents}")
    return np.cumsum(-(-counts // round_to) * round_to).astype(np.int32)


def supervised_slots(weights: Float32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
    """Indices of the supervised positions, rising, int32 [T], filled up with T."""
    slots = np.full(len(weights), len(weights), np.int32)
    found = np.flatnonzero(weights)
    slots[: len(found)] = found
    return slots


def _place_chunks(
    documents: Sequence[Document], ranks: int, share: int
) -> list[Shaped[np.ndarray, " chunks"]]:
    """The audio rank of every chunk of every document."""
    frames = document_frames(documents)
    assigned = assign_chunks(frames, ranks, share)
    if assigned is None:
        raise ValueError(
            f"encoder chunks of {sorted(frames, reverse=True)} mel frames do not fit {ranks} audio ranks of "
            f"{share} each; raise audio_capacity, or pack fewer documents a row"
        )
    ends = np.cumsum([len(d.chunks) for d in documents], dtype=int)
    return np.split(np.asarray(assigned, int), ends[:-1]) if documents else []
