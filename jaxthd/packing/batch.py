"""The batch: what the loader hands to the step. Every array has a fixed shape; its first dim is rows.

Legend: R rows (buffers, sharded over the data axis), T token slots of a row (sharded over the context axis,
in context-layout order), K depths of multi-token prediction (0: none, and no data), D model dim, A slots of
audio frames of a row over all its audio ranks, W numbers of a frame, E outputs of these frames (A / E is the
front end's unit), C most split documents of a row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, UInt32

AUDIO_FIELDS = ("audio_slots", "features", "frame_mask", "piece_ids", "piece_positions", "future_audio_slots")
"""Fields of Batch that are None in a batch packed without room for audio."""


class Batch(NamedTuple):
    """One step's data: NumPy arrays on the host, jax arrays (sharded) on devices. A pytree.

    A row by itself, as PackDocuments yields it, has no dim R, and None for fields without depths.

    AUDIO_FIELDS are None in a batch packed without room for audio, as for a model without an encoder.

    tokens: token ids; 0 in padding.
    targets: the id to predict at each position; 0 where weights is 0.
    weights: 1.0 where the next token of the same document is a supervised text token, else 0.0.
    segment_ids: 0 in padding, else the segment's number in the row, from 1, rising along the row. A segment
        is a document, or one of the parts of a document with several answers.
    positions: index of the token in its segment (0 in padding).
    audio_slots: index into the row's E outputs of audio frames (rank-major: rank * E / ranks + output of the
        rank's frames), or -1 where the embedding is the token's alone.
    features: what the front end reads; every piece of audio starts at a unit of the front end, and may go on
        in the shares of the next ranks where it is divisible; 0.0 where frame_mask is False.
    frame_mask: True on valid frames.
    piece_ids: 0 on unused outputs, else the piece's number in the row, from 1, rising over all ranks.
    piece_positions: index of the output in its piece (0 where unused).
    future_tokens, future_audio_slots: at depth k, tokens and audio_slots of the token k + 1 positions later
        in the same document; -1 where the document has ended.
    future_targets, future_weights: at depth k, targets and weights of that token; 0 where the document has
        ended.
    extras: the objective's own numbers for each token, float32 [R, T], by name (objectives/objective.py);
        each lies at the position that predicts the token. 0.0 in padding.
    document_ids: 0 in padding, else the document's number in the row, from 1, rising along the row. None
        where every document is one segment, and so has the number of its segment.
    prefixes: the id of the segment that the token's segment continues, as an answer continues its prompt; 0
        for a segment that stands alone. None where all do.
    embeddings: of the tokens, in place of those that the model has for their ids; 0.0 in padding. None where
        the ids are embedded.
    draws: what dropout draws for the token (ops/dropout.py). None where nothing is dropped; the step adds it.
    splits: under the layout "whole" (packing/layout.py), the slots of a context chunk of each document that
        is split over the context ranks, 0 for none; all of these ranks hold it. None under other layouts, or
        if no document may be split.
    recording_ids: 0 on unused outputs, else the recording's number in the row, from 1, in the order of its
        slots. recording_positions: index p of the output among the recording's audio tokens; -2 - p where
        another piece gives the token, or would if it were one; -1 on unused outputs. None for a front end
        that does not read them.
    recording_labels: labels of the output's recording, in order, so many at each of its audio tokens; -1
        where there is none. None for a front end without labels.

    A document with several answers (Document.answers) is several segments. Where its prompt is shared, one
    segment holds the prompt without its last token, and each answer's segment begins with that token again,
    which predicts the answer's first one. Else each answer's segment holds the whole prompt.
    """

    tokens: Int32[Any, "R T"]
    targets: Int32[Any, "R T"]
    weights: Float32[Any, "R T"]
    segment_ids: Int32[Any, "R T"]
    positions: Int32[Any, "R T"]
    audio_slots: Int32[Any, "R T"]
    features: Float32[Any, "R A W"]
    frame_mask: Bool[Any, "R A"]
    piece_ids: Int32[Any, "R E"]
    piece_positions: Int32[Any, "R E"]
    future_tokens: Int32[Any, "R K T"]
    future_audio_slots: Int32[Any, "R K T"]
    future_targets: Int32[Any, "R K T"]
    future_weights: Float32[Any, "R K T"]
    extras: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    document_ids: Int32[Any, "R T"] | None = None
    prefixes: Int32[Any, "R T"] | None = None
    embeddings: Float[Any, "R T D"] | None = None
    draws: UInt32[Any, "R T"] | None = None
    splits: Int32[Any, "R C"] | None = None
    recording_ids: Int32[Any, "R E"] | None = None
    recording_positions: Int32[Any, "R E"] | None = None
    recording_labels: Int32[Any, "R E labels"] | None = None

    @property
    def has_audio(self) -> bool:
        """Whether the audio fields are arrays."""
        return self.features is not None

    @property
    def is_audio(self) -> Bool[Any, "R T"]:
        """True where the embedding comes from the encoder."""
        return self.tokens < 0 if self.audio_slots is None else self.audio_slots >= 0

    def splits_of(self, row: int) -> Int32[np.ndarray, " C"] | None:
        """A row's splits, of a host batch."""
        return None if self.splits is None else np.asarray(self.splits[row])

    @property
    def documents(self) -> Int32[Any, "R T"]:
        """The number of the token's document in the row, from 1; 0 in padding."""
        return self.segment_ids if self.document_ids is None else self.document_ids


def with_rows(batch: Batch) -> Batch:
    """The batch as the step takes it, from rows that grain has batched, or from a row by itself.

    Adds the dim of rows where there is none, and arrays for no depths of multi-token prediction.
    """
    if np.ndim(batch.tokens) == 1:
        batch = _of_arrays(batch, lambda x: x[None])
    if batch.future_tokens is not None:
        return batch
    rows, tokens = batch.tokens.shape
    ids = np.zeros((rows, 0, tokens), np.int32)
    slots = ids if batch.has_audio else None
    weights = ids.astype(np.float32)
    return batch._replace(
        future_tokens=ids, future_audio_slots=slots, future_targets=ids, future_weights=weights
    )


def without_rows(batch: Batch) -> Batch:
    """The only row of a batch, by itself: arrays without the dim R, and None for those without an element,
    which grain cannot share between processes.
    """
    return _of_arrays(batch, lambda x: x[0] if x.size else None)


def _of_arrays(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """Changes every array. Without jax, which worker processes do not import."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(x) for name, x in value.items()}
        return None if value is None else change(value)

    return Batch(*map(changed, batch))


def concatenate_rows(batches: Sequence[Batch]) -> Batch:
    """One host batch with the rows of all of these, in order; each is a batch, or a row by itself.

    Raises ValueError for none, and where a field is None in some of them only: they were packed with
    different settings.
    """
    if not batches:
        raise ValueError("there is no batch; expected one row or more: pack a document")

    def joined(values: tuple[Any, ...]) -> Any:
        absent = sum(value is None for value in values)
        if absent == len(values):
            return None
        if absent:
            raise ValueError(
                f"a field is None in {absent} of {len(values)} batches; expected batches that were packed "
                "with the same settings: pack all of them with room for audio, for answers, or none"
            )
        if isinstance(values[0], dict):
            return {name: np.concatenate([each[name] for each in values]) for name in values[0]}
        return np.concatenate(values)

    return Batch(*map(joined, zip(*map(with_rows, batches), strict=True)))
