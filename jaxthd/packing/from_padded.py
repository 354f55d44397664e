"""Converts padded rows of other toolkits to one packed ("thd") buffer, and shards it over context ranks.

The key names and shapes are those of NeMo Automodel's context-parallel batches (behaviour of its cp_utils and
thd_utils). One thing differs: here the lengths alone decide what is padding. Automodel once used
token == pad id, which masks real tokens if a tokenizer's pad id is its end-of-sequence id.

Legend: B rows, S slots of a row, P packs of a row, H embedding dim, D documents, N tokens of the result
(B * S, or B * S / num_chunks).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxthd.packing.layout import DualChunkSwap
from jaxthd.packing.thd_view import ABSENT, cumulative, stack_filled

TOKEN_KEYS = ("input_ids", "labels", "position_ids", "padding_mask")
OFFSET_KEYS = ("cu_seqlens", "cu_seqlens_padded")


def packed_from_padded(
    batch: Mapping[str, np.ndarray], num_chunks: int = 1, qkv_format: str = "thd", *, absent: int = ABSENT
) -> dict[str, Any]:
    """Collapses padded rows into packed buffers, one per chunk of B / num_chunks rows.

    batch: input_ids [B, S] ids or [B, S, H] embeddings; labels [B, S]; optional position_ids [B, S];
        seq_lens and seq_lens_padded [B, P], the real and the padded length of every document of a row,
        `absent` where a row holds fewer than P. Other keys are ignored.
    Returns, without the leading dim when num_chunks is 1:
        input_ids [chunks, N] or [chunks, N, H], labels [chunks, N]: dtypes kept;
        position_ids [chunks, N]: the given ones, else int32, restarting at every document, 0 in padding;
        padding_mask [chunks, N] bool: True where there is NO document token;
        cu_seqlens, cu_seqlens_padded int32 [chunks, most documents of a chunk + 1]: sums of the real lengths,
        and offsets in the buffer; rows with fewer documents are filled up with `absent`;
        max_seqlen int32 [chunks]: the longest padded length;
        qkv_format: "thd".
    Slots of a row beyond its padded lengths move behind the chunk's last document, as padding, so that
    cu_seqlens_padded are true offsets.
    Example: seq_lens [[3, 2], [6, -1000]], padded [[4, 2], [6, -1000]] give cu_seqlens [0, 3, 5, 11],
    padded [0, 4, 6, 12].
    Raises KeyError naming a missing key; ValueError for another qkv_format, for B not divisible by num_chunks
    and for shapes or lengths that contradict each other.
    """
    if qkv_format != "thd":
        raise ValueError(f'qkv_format {qkv_format!r} is unknown; the only packed format is "thd"')
    for key in ("input_ids", "labels", "seq_lens", "seq_lens_padded"):
        if key not in batch:
            raise KeyError(f"{key!r} is missing from the padded batch; it has {sorted(batch)}")
    batch = {key: np.asarray(value) for key, value in batch.items()}
    input_ids, seq_lens, seq_lens_padded = batch["input_ids"], batch["seq_lens"], batch["seq_lens_padded"]
    rows, slots = input_ids.shape[:2]
    if num_chunks < 1 or rows % num_chunks:
        raise ValueError(
            f"{rows} rows cannot be divided into num_chunks = {num_chunks}; expected a divisor of {rows}"
        )
    for key in ("labels", "position_ids"):
        if key in batch and batch[key].shape != (rows, slots):
            raise ValueError(f"{key} has shape {batch[key].shape}, expected {(rows, slots)} as input_ids")
    if seq_lens.ndim != 2 or not seq_lens.shape == seq_lens_padded.shape == (rows, seq_lens.shape[1]):
        raise ValueError(
            f"seq_lens {seq_lens.shape} and seq_lens_padded {seq_lens_padded.shape} must be [{rows}, packs]"
        )
    _check_lengths(seq_lens, seq_lens_padded, slots, absent)

    chunks = []
    for rows_of_chunk in np.arange(rows).reshape(num_chunks, -1):
        part = {
            k: batch[k][rows_of_chunk] for k in (*TOKEN_KEYS[:3], "seq_lens", "seq_lens_padded") if k in batch
        }
        chunks.append(_collapse(part, absent))
    if num_chunks == 1:
        return {**chunks[0], "qkv_format": qkv_format}
    of_key = {key: [chunk[key] for chunk in chunks] for key in chunks[0]}
    packed = {k: stack_filled(x, absent) if k in OFFSET_KEYS else np.stack(x) for k, x in of_key.items()}
    return {**packed, "qkv_format": qkv_format}


def shard_packed(
    packed: Mapping[str, Any], context: int | None, rank: int, *, absent: int = ABSENT
) -> Mapping[str, Any]:
    """The tokens that context rank `rank` holds of a packed batch, under per-document DualChunkSwap.

    packed: what packed_from_padded returns, with or without chunks. input_ids, labels, position_ids and
        padding_mask shrink to N / context; every other key stays as it is (lengths remain global, as
        Transformer Engine wants them). Padding behind the last document is divided like one more document.
    Example: of [[1, 2, 3, 4], [5, 6, 7, 8]] in 2 chunks, with context 2, rank 0 gets [[1, 4], [5, 8]], rank 1
    [[2, 3], [6, 7]].
    context 1 or None returns `packed` itself.
    Raises ValueError when a padded length is not a multiple of 2 * context.
    """
    if context is None or context == 1:
        return packed
    offsets = np.asarray(packed["cu_seqlens_padded"])
    tokens = packed["labels"].shape[-1]

    def indices(cu: np.ndarray) -> np.ndarray:
        """The rank's slots of a buffer with these offsets, padding behind the last document included."""
        cu = cu[cu != absent]
        return DualChunkSwap(context).tokens_of_rank(np.append(cu, tokens) if cu[-1] < tokens else cu, rank)

    shard = dict(packed)
    for key in TOKEN_KEYS:
        if offsets.ndim == 1:
            shard[key] = packed[key][indices(offsets)]
        else:
            shard[key] = np.stack([x[indices(cu)] for x, cu in zip(packed[key], offsets, strict=True)])
    return shard


def _check_lengths(seq_lens: np.ndarray, seq_lens_padded: np.ndarray, slots: int, absent: int) -> None:
    present = seq_lens_padded != absent
    real, padded = np.where(present, seq_lens, 0), np.where(present, seq_lens_padded, 0)
    wrong = ((seq_lens != absent) != present) | (real < 0) | (padded < real)
    if wrong.any():
        row, pack = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"row {row}, document {pack}: seq_lens {int(seq_lens[row, pack])} and seq_lens_padded "
            f"{int(seq_lens_padded[row, pack])}; expected 0 <= real <= padded, or {absent} in both"
        )
    totals = padded.sum(1)
    if (totals > slots).any():
        row = int(np.argmax(totals))
        raise ValueError(f"row {row}: seq_lens_padded sum to {int(totals[row])}, but a row has {slots} slots")


def _collapse(part: Mapping[str, np.ndarray], absent: int) -> dict[str, np.ndarray]:
    """Packs some rows into one buffer: first the documents, then the slots that no document covers."""
    present = part["seq_lens_padded"] != absent
    real, padded = part["seq_lens"][present], part["seq_lens_padded"][present]
    cu, cu_padded = cumulative(real), cumulative(padded)
    rows, slots = part["labels"].shape
    covered = np.where(present, part["seq_lens_padded"], 0).sum(1)
    order = np.argsort((np.arange(slots) >= covered[:, None]).ravel(), kind="stable")

    at = np.arange(rows * slots)
    document = np.searchsorted(cu_padded, at, side="right") - 1
    position = (at - cu_padded[document]).astype(np.int32)
    padding = position >= np.append(real, 0)[document]
    out = {k: part[k].reshape(rows * slots, *part[k].shape[2:])[order] for k in TOKEN_KEYS[:3] if k in part}
    out.setdefault("position_ids", np.where(padding, np.int32(0), position))
    return {
        **out,
        "padding_mask": padding,
        "cu_seqlens": cu,
        "cu_seqlens_padded": cu_padded,
        "max_seqlen": np.asarray(padded.max(initial=0), np.int32),
    }
