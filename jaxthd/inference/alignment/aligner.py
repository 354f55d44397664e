"""Word times of given documents, packed and on any mesh, by the CTC of a model that trained with it."""

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Int32

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.data.loader import Loader
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.errors import UserError
from jaxthd.inference.alignment.viterbi import align, frames_needed
from jaxthd.inference.alignment.words import Frames, TimedWord, timed_words
from jaxthd.kernels.xla_options import jit_for
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import put_batch
from jaxthd.steps.aligning import make_aligning_step
from jaxthd.steps.blueprint import Blueprint, Tree


class AlignedDocument(NamedTuple):
    """A document's words in time. key: the document's. seconds: of its recording, in whole outputs of the
    encoder. log_prob: of the likeliest path. reason: why it has no words; "" if it has."""

    key: str
    words: tuple[TimedWord, ...] = ()
    seconds: float = 0.0
    log_prob: float = 0.0
    reason: str = ""


class _Scored(NamedTuple):
    """FrameScores of a batch, or of a row of it, and the fields that say whose they are."""

    blank: Any
    label: Any
    loudness: Any
    segment_ids: Any
    targets: Any
    weights: Any
    audio_slots: Any
    frame_mask: Any
    splits: Any


class Aligner:
    """Aligns the documents of packed batches; compiled once.

    Raises UserError for a model that was not trained to align.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, tokenizer: Tokenizer) -> None:
        config = blueprint.config
        require_ctc(config)
        self._config, self._mesh, self._tokenizer = config, mesh, tokenizer
        scores = make_aligning_step(blueprint, mesh)

        def run(params: Tree, buffers: Tree, batch: Batch) -> _Scored:
            found, tokens = scores(params, buffers, batch), (batch.segment_ids, batch.targets, batch.weights)
            return _Scored(*found, *tokens, batch.audio_slots, batch.frame_mask, batch.splits)

        # Every process gets all rows' scores, and the labels of rows that it did not read.
        self._step = jit_for(config, mesh, run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, weights: Weights, batches: Loader) -> Iterator[AlignedDocument]:
        """Yields the words of all documents, in packed order. weights: in their device layout.

        All processes call it, and get the same.
        """
        for batch, report in batches:
            on_mesh = put_batch(batch, self._mesh)
            found = jax.tree.map(np.asarray, self._step(weights.params, weights.buffers, on_mesh))
            for row, keys in enumerate(batches.keys(report)):
                of_row = jax.tree.map(operator.itemgetter(row), found)
                layout = ContextLayout.of(self._config)
                documents = layout.document_slots(of_row.segment_ids, None, of_row.splits)
                for key, slots in zip(keys, documents, strict=True):
                    yield self._aligned(key, slots, of_row)

    def _aligned(self, key: str, slots: Int[np.ndarray, " tokens"], row: _Scored) -> AlignedDocument:
        """A document of a row. slots: of its tokens, in order."""
        labels = row.targets[slots][row.weights[slots] > 0]
        is_audio = row.audio_slots[slots] >= 0
        reason = self._why_not(labels, is_audio)
        if reason:
            return AlignedDocument(key, reason=reason)
        at = slots[is_audio]
        found = align(row.blank[at], row.label[at][:, : len(labels)], labels)
        frames = self._frames(row.audio_slots[at], row.frame_mask, row.loudness)
        words = timed_words(self._tokenizer, labels.tolist(), found, frames)
        return AlignedDocument(key, tuple(words), float(frames.begins[-1] * frames.seconds), found.log_prob)

    def _frames(
        self,
        outputs: Int[np.ndarray, " outputs"],
        mask_A: Bool[np.ndarray, " A"],
        loudness_A: Float[np.ndarray, " A"],
    ) -> Frames:
        """The frames of a recording. outputs: its outputs' indices in the row, whose frames these are."""
        front_end = self._config.model.audio_encoder
        bounds = zip(front_end.frame_of_output(outputs), front_end.frame_of_output(outputs + 1), strict=True)
        own = [np.arange(a, b)[mask_A[a:b]] for a, b in bounds]
        begins = np.cumsum([0, *map(len, own)])
        loudness = loudness_A[np.concatenate(own)] if front_end.bands else None
        return Frames(begins, loudness, front_end.seconds(1))

    def _why_not(self, labels: Int32[np.ndarray, " labels"], is_audio: Bool[np.ndarray, " tokens"]) -> str:
        """Why a document cannot be aligned; "" if it can."""
        most, frames = self._config.train.ctc_max_labels, int(is_audio.sum())
        if not frames or not len(labels):
            return "it has no recording, or no text of the assistant's; expected one of each"
        if np.diff(np.flatnonzero(is_audio)).max(initial=1) > 1:
            return "it has several recordings, and a text does not say whose it is; expected one"
        if len(labels) > most:
            return f"its text is {len(labels)} tokens; expected at most {most} (train.ctc_max_labels)"
        needed = frames_needed(labels)
        if needed > frames:
            return (
                f"its text is {len(labels)} tokens, which need {needed} outputs of the encoder, and its "
                f"recording makes {frames}; expected a text that belongs to it, or a tokenizer of longer "
                "tokens"
            )
        return ""


def require_ctc(config: Config) -> None:
    """Raises UserError for a model that was not trained to align texts with recordings."""
    if config.model.encoder is None or not config.train.ctc_loss:
        raise UserError(
            f"train.ctc_loss is {config.train.ctc_loss:g}: the model was not trained to align texts with "
            "recordings; expected one that was: train it with train.ctc_loss 0.3 or more (docs/word_times.md)"
        )
