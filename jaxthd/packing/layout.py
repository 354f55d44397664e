"""Where tokens live over the context axis: DualChunkSwap, of the whole buffer or of each document.

A stretch of tokens is cut into 2 * context equal chunks; rank r holds chunk r and chunk 2 * context - 1 - r.
Under causal attention an early chunk is cheap and a late one dear, so each rank gets one of both. The default
is the whole-buffer layout, which asks nothing of document lengths; the per-document one is what Transformer
Engine's THD ring expects (its `thd_get_partitioned_indices`) and needs every length to be a multiple of
2 * context.
"""

from collections.abc import Sequence
from math import lcm
from typing import Literal

import numpy as np
from jaxtyping import Int, Int32


def row_permutation(
    segment_ids: Int[np.ndarray, " T"], context: int, layout: Literal["buffer", "document"], round_to: int
) -> Int32[np.ndarray, " T"]:
    """How a row is laid out over the context axis, rank-major: permuted[i] = original[perm[i]], int32 [T].

    segment_ids: of the row, in any order. layout: of the whole buffer, or of each document, whose padding
        behind the last document is cut as one document more. round_to: as the row was packed with.
    Raises ValueError where the layout cannot cut the buffer, or a document.
    """
    if layout == "buffer" or context == 1:
        return context_permutation(len(segment_ids), context)
    lengths = np.bincount(segment_ids)[1:]
    ends = np.cumsum(-(-lengths // round_to) * round_to)
    cu_seqlens = np.concatenate([[0], ends, [len(segment_ids)]]).astype(int)
    return np.concatenate([document_chunk_indices(cu_seqlens, context, rank) for rank in range(context)])


def context_permutation(length: int, context: int) -> Int32[np.ndarray, " length"]:
    """The whole-buffer layout: permuted[i] = original[perm[i]], int32 [length].

    Rank-major: rank r's tokens are permuted[r * length / context : (r + 1) * length / context], so a plain
    PartitionSpec over "context" hands them out. context 1 is the identity.
    Raises ValueError when length is not a multiple of 2 * context (context 1: any length).
    """
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    if context == 1:
        return np.arange(length, dtype=np.int32)
    if length % (2 * context):
        raise ValueError(
            f"a buffer of {length} tokens cannot be cut into 2 * context = {2 * context} equal chunks; "
            f"make the capacity a multiple of {2 * context}"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * context, -1)
    return chunks[[c for r in range(context) for c in (r, 2 * context - 1 - r)]].ravel()


def document_slots(
    segment_ids: Int[np.ndarray, " T"], context: int, layout: Literal["buffer", "document"], round_to: int
) -> list[Int[np.ndarray, " _"]]:
    """Where each document's tokens lie in a laid-out row, in their order; documents by segment id.

    Arguments and errors: as row_permutation.
    """
    order = inverse_permutation(row_permutation(segment_ids, context, layout, round_to))
    ids = segment_ids[order]
    return [order[ids == segment] for segment in range(1, ids.max() + 1)]


def inverse_permutation(perm: Int[np.ndarray, " length"]) -> Int32[np.ndarray, " length"]:
    """The permutation that undoes `perm`: original = permuted[inverse], int32 [length]."""
    inverse = np.empty(len(perm), np.int32)
    inverse[perm] = np.arange(len(perm), dtype=np.int32)
    return inverse


def document_chunk_indices(
    cu_seqlens: Int[np.ndarray, " documents_plus_1"], context: int, rank: int
) -> Int32[np.ndarray, " tokens_of_rank"]:
    """The per-document layout: the tokens that context rank `rank` holds, document by document.

    cu_seqlens: offsets of the documents in the buffer, from 0, padding included.
    Returns int32 [cu_seqlens[-1] / context]. cu_seqlens [0, 8, 12], context 2: rank 0 holds
    [0, 1, 6, 7, 8, 11], rank 1 [2, 3, 4, 5, 9, 10]. context 1 returns every index, whatever the lengths.
    Raises ValueError when a document's length is not a multiple of 2 * context, or rank is not below context.
    """
    if not 0 <= rank < context:
        raise ValueError(f"rank must lie in 0..{context - 1} (context {context}), got {rank}")
    lengths = np.diff(cu_seqlens)
    if len(cu_seqlens) == 0 or cu_seqlens[0] != 0 or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must start at 0 and never fall, got {list(map(int, cu_seqlens))}")
    if context == 1:
        return np.arange(cu_seqlens[-1], dtype=np.int32)
    unit = 2 * context
    if (lengths % unit).any():
        bad = int(np.flatnonzero(lengths % unit)[0])
        raise ValueError(
            f"document {bad} takes {int(lengths[bad])} tokens, not a multiple of 2 * context = {unit}; "
            "round every document up (padded_lengths)"
        )
    pieces = [np.empty(0, np.int32)]
    for start, length in zip(cu_seqlens[:-1], lengths, strict=True):
        chunk = length // unit
        for c in (rank, unit - 1 - rank):
            pieces.append(np.arange(start + c * chunk, start + (c + 1) * chunk, dtype=np.int32))
    return np.concatenate(pieces)


def padded_lengths(lengths: Sequence[int], context: int, tensor: int) -> list[int]:
    """Lengths after padding for the per-document layout and for a sequence split over `tensor` ranks.

    Each document is rounded up to a multiple of 2 * context (context 1: left as it is), then the last one
    grows until the total divides by `tensor`, staying a multiple of 2 * context. [11, 5]: context 2 gives
    [12, 8], tensor 3 gives [11, 7]; [5, 5] with context 2 and tensor 6 gives [8, 16].
    Raises ValueError when context or tensor is below 1.
    """
    if context < 1 or tensor < 1:
        raise ValueError(f"context and tensor must be at least 1, got {context} and {tensor}")
    unit = 2 * context if context > 1 else 1
    padded = [-(-n // unit) * unit for n in lengths]
    if padded:
        padded[-1] += -sum(padded) % lcm(unit, tensor)
    return padded
