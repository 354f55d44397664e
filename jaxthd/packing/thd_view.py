"""A packed batch as variable-length kernels of other toolkits describe one ("thd": tokens, heads, dim).

Key names and conventions are NeMo Automodel's, as in from_padded.py, and Transformer Engine's. Nothing in
jaxthd reads a view: its own layers take segment ids and positions.

Legend: R rows, T token slots of a row, D documents of a row (of several rows: of the one with most).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jaxthd.packing.batch import Batch

ABSENT = -1000
"""Fills up what has fewer documents than others."""


class ThdView(NamedTuple):
    """Where documents begin and end, of one row; of several rows each field has a leading dim R.

    cu_seqlens: sums of the documents' real lengths, from 0. cu_seqlens_padded: sums of their padded lengths,
        which are offsets in the buffer before the context layout. A row with fewer than D is filled up with
        ABSENT in both.
    max_seqlen: the longest padded length; 0 without a document.
    """

    cu_seqlens: Int32[np.ndarray, "*R D_plus_1"]
    cu_seqlens_padded: Int32[np.ndarray, "*R D_plus_1"]
    max_seqlen: Int32[np.ndarray, "*R"]
    qkv_format: str = "thd"


def thd_view(
    batch: Batch | Int[Any, "R T"] | Int[Any, " T"], *, round_to: int = 1, total_multiple: int = 1
) -> ThdView:
    """The view of a host batch, of its segment_ids, or of those of one row.

    The ids may be laid out over the context axis: lengths and offsets are those of the whole buffer, which is
    what Transformer Engine wants on every context rank.
    round_to: as the batch was packed with: 2 * context where a kernel divides each document over the context
        ranks.
    total_multiple: the last document's padded length grows, into the padding at the end of the buffer, until
        the padded lengths sum to a multiple of this: 2 * context * tensor, where a kernel divides the buffer.
    Lengths [11, 5] give cu_seqlens [0, 11, 16]; padded [0, 12, 20] with round_to 4, [0, 11, 18] with
    total_multiple 3. [5, 5] with round_to 4 and total_multiple 24 are padded [0, 8, 24].
    Of a batch with answers, its segments are viewed. Raises ValueError where the padded lengths exceed the
    row, and where answers share a prompt: variable-length kernels know no segments that continue others.
    """
    if isinstance(batch, Batch) and batch.prefixes is not None and np.any(batch.prefixes):
        raise ValueError(
            "segments of the batch continue others, which variable-length kernels cannot; expected segments "
            "that stand alone: pack with share_prompts=False"
        )
    ids = np.asarray(batch.segment_ids if isinstance(batch, Batch) else batch)
    if ids.ndim == 1:
        return _view_of_row(ids, round_to, total_multiple)
    rows = [_view_of_row(row, round_to, total_multiple) for row in ids]
    return ThdView(
        stack_filled([row.cu_seqlens for row in rows]),
        stack_filled([row.cu_seqlens_padded for row in rows]),
        np.array([row.max_seqlen for row in rows], np.int32),
    )


def _view_of_row(ids: Int[np.ndarray, " T"], round_to: int, total_multiple: int) -> ThdView:
    lengths = np.bincount(ids)[1:]
    padded = -(-lengths // round_to) * round_to
    padded[-1:] += -padded.sum() % total_multiple
    if padded.sum() > len(ids):
        raise ValueError(
            f"documents padded to multiples of {round_to}, in all to one of {total_multiple}, take "
            f"{padded.sum()} slots of a row of {len(ids)}; pack with that round_to, or raise the capacity"
        )
    return ThdView(cumulative(lengths), cumulative(padded), np.asarray(padded.max(initial=0), np.int32))


def cumulative(lengths: Int[np.ndarray, " D"]) -> Int32[np.ndarray, " D_plus_1"]:
    """[0, the first, the first two, ...]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def stack_filled(
    rows: Sequence[Int32[np.ndarray, " _"]], absent: int = ABSENT
) -> Int32[np.ndarray, "R D_plus_1"]:
    """The rows one above the other, each filled up with `absent` to the longest."""
    most = max(map(len, rows))
    return np.stack([np.pad(row, (0, most - len(row)), constant_values=absent) for row in rows])
