"""An auxiliary CTC loss on the encoder (Graves et al., 2006), without parameters of its own.

A frame is the embedding of an audio slot, as it enters the decoder. Its logits are those that the head gives
to this embedding after the decoder's final norm. A document's labels are its supervised targets. The blank is
the audio placeholder, which is no document's target.

Only the blank and the labels of a frame's own document have a part in the loss. So the vocabulary is passed
once, for the log-probability of the blank; a label's differs from it by the difference of their logits.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, M = R * tokens of a row on all context
ranks, D most documents of a row, G = R * D documents, L most labels of a document, H model dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.ops.ctc import Alignable, ctc_log_probs
from jaxthd.ops.grouped_matmul import dispatch, expert_layout, grouped_matmul
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.batch import Batch

FRAME_BLOCK = 32
"""Frames of one document multiplied at a time."""


class Transcripts(NamedTuple):
    """Frames and labels of the documents in these rows, the same on all context ranks.

    documents: those that the loss covers. They have labels, at most L, and an alignment.
    label_ids: 0 behind a document's last label. blank: the blank's id.
    has_audio, is_covered: of each document.
    """

    documents: Alignable
    label_ids: Int32[Array, "G L"]
    blank: Int32[Array, ""]
    has_audio: Bool[Array, " G"]
    is_covered: Bool[Array, " G"]


class _Runs(NamedTuple):
    """Slots by document: document g's are slots[first[g] : first[g] + number[g]], in its order."""

    slots: Array
    first: Array
    number: Array


def _runs(chosen_M: Array, document_M: Array, positions_M: Array, documents: int) -> _Runs:
    key_M = jnp.where(chosen_M, document_M, documents)
    slot_M = jnp.arange(len(key_M), dtype=jnp.int32)
    key_M, _, slots_M = jax.lax.sort((key_M, positions_M, slot_M), num_keys=2)
    bounds = jnp.searchsorted(key_M, jnp.arange(documents + 1, dtype=key_M.dtype)).astype(jnp.int32)
    return _Runs(jnp.where(key_M < documents, slots_M, len(slots_M)), bounds[:-1], jnp.diff(bounds))


def transcripts(batch: Batch, max_documents: int, max_labels: int, axis: str | None) -> Transcripts:
    """axis: the context axis, None on one device without a mesh. The batch has audio."""
    fields = (
        batch.segment_ids,
        batch.positions,
        batch.is_audio,
        batch.weights > 0,
        batch.targets,
        batch.tokens,
    )
    whole = jnp.stack([x.astype(jnp.int32) for x in fields])
    if axis is not None:
        whole = jax.lax.all_gather(whole, axis, axis=2, tiled=True)
    rows = whole.shape[1]
    ids_M, positions_M, is_audio_M, supervised_M, targets_M, tokens_M = whole.reshape(len(whole), -1)
    document_M = _document_numbers(whole[0], max_documents)
    documents = rows * max_documents

    def runs_of(flags_M: Array) -> _Runs:
        return _runs((flags_M > 0) & (ids_M > 0), document_M, positions_M, documents)

    frames, labels = runs_of(is_audio_M), runs_of(supervised_M)
    k_L = jnp.arange(max_labels, dtype=jnp.int32)
    is_label_GL = k_L < labels.number[:, None]
    slots_GL = labels.slots.at[labels.first[:, None] + k_L].get(mode="clip")
    ids_GL = jnp.where(is_label_GL, targets_M.at[slots_GL].get(mode="clip"), 0)
    repeats_GL = jnp.pad(ids_GL[:, 1:] == ids_GL[:, :-1], ((0, 0), (1, 0))) & is_label_GL
    is_covered_G = (
        (labels.number > 0)
        & (labels.number <= max_labels)
        & (labels.number + repeats_GL.sum(1) <= frames.number)
    )
    return Transcripts(
        Alignable(
            slots=frames.slots,
            first=frames.first,
            frames=jnp.where(is_covered_G, frames.number, 0),
            labels=jnp.where(is_covered_G, labels.number, 0),
            repeats=repeats_GL,
            document=jnp.where((is_audio_M > 0) & is_covered_G[document_M], document_M, documents),
        ),
        label_ids=ids_GL,
        blank=jnp.where(is_audio_M > 0, tokens_M, 0).max(),
        has_audio=frames.number > 0,
        is_covered=is_covered_G,
    )


def _document_numbers(ids_RT: Array, max_documents: int) -> Array:
    """The document of each slot, 0 to G - 1; any number in padding."""
    row_R1 = jnp.arange(len(ids_RT), dtype=jnp.int32)[:, None]
    return (row_R1 * max_documents + jnp.maximum(ids_RT - 1, 0)).reshape(-1)


def _of_slots(batch: Batch, found: Transcripts) -> Array:
    return _document_numbers(batch.segment_ids, len(found.is_covered) // len(batch.tokens))


def covered_frames(batch: Batch, found: Transcripts) -> Bool[Array, "R T"]:
    """Mask of this rank's slots that have a frame of a document that the loss covers."""
    return batch.is_audio & found.is_covered[_of_slots(batch, found)].reshape(batch.tokens.shape)


def label_scores(
    h_NH: Float[Array, "N H"],
    blank_N: Float[Array, " N"],
    head_rows_LH: Float[Array, "labels H"],
    batch: Batch,
    found: Transcripts,
) -> Float[Array, "N L"]:
    """Log-probabilities, at this rank's slots, of the labels of their documents; 0 where covered_frames says
    that there is no frame.

    h: the head's inputs. blank: log-probabilities of the blank where covered_frames says so, else 0.
    head_rows: the head's rows for all of found.label_ids, flat, then for the blank. found: see transcripts.
    """
    rows_GLH = head_rows_LH[:-1].reshape(*found.label_ids.shape, -1)
    frames = _of_slots(batch, found), covered_frames(batch, found).reshape(-1)
    return label_log_probs(h_NH, blank_N, rows_GLH, head_rows_LH[-1], *frames)


def document_log_probs(
    blank_N: Float[Array, " N"],
    label_NL: Float[Array, "N L"],
    batch: Batch,
    found: Transcripts,
    axis: str | None,
) -> Float[Array, " G"]:
    """log p(labels) of each document, 0 for one that is not covered; the same on all context ranks.

    blank, label: as label_scores takes and gives them. found, axis: see transcripts.
    """
    each_RTK = jnp.concatenate([blank_N[:, None], label_NL], axis=1).reshape(*batch.tokens.shape, -1)
    if axis is not None:
        each_RTK = jax.lax.all_gather(each_RTK, axis, axis=1, tiled=True)
    blank_M, label_ML = each_RTK[..., 0].reshape(-1), each_RTK[..., 1:].reshape(-1, label_NL.shape[1])
    return ctc_log_probs(blank_M, label_ML, found.documents)


def label_log_probs(
    h_NH: Float[Array, "N H"],
    blank_N: Float[Array, " N"],
    rows_GLH: Float[Array, "G L H"],
    blank_row_H: Float[Array, " H"],
    document_N: Int32[Array, " N"],
    is_frame_N: Bool[Array, " N"],
) -> Float[Array, "N L"]:
    """Log-probabilities of the labels of each frame's document; 0 where there is no frame.

    h: the head's inputs. blank: log-probabilities of the blank. rows, blank_row: the head's, for each
    document's labels and for the blank. document: of each frame. A block of one document's frames is
    multiplied with its labels' rows.
    """
    acc = accumulation_dtype(h_NH)
    layout = expert_layout(document_N[:, None], is_frame_N, len(rows_GLH), FRAME_BLOCK)
    # Not rounded to the compute dtype: these are logits.
    x_BH, w_GHL = dispatch(h_NH, layout).astype(acc), rows_GLH.swapaxes(1, 2).astype(acc)
    logits_BL = grouped_matmul(x_BH, w_GHL, layout.expert, layout.used)
    logits_NL = jnp.take(logits_BL, layout.rows[:, 0], axis=0, mode="fill", fill_value=0)
    blank_logit_N = jnp.einsum("nh,h->n", h_NH, blank_row_H, preferred_element_type=acc)
    return jnp.where(is_frame_N[:, None], (blank_N - blank_logit_N)[:, None] + logits_NL, 0)
