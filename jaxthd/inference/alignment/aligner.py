"""Word times of given documents, packed and on any mesh, by the CTC of a model that trained with it, or of
its front end's own head."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.config.front_end import Labeller
from jaxthd.data.loader import Loader
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.errors import UserError
from jaxthd.inference.alignment.viterbi import align, frames_needed
from jaxthd.inference.alignment.words import (
    Frames,
    LabelledWord,
    TimedWord,
    label_spans,
    timed_words,
    words_in_order,
    words_of_tokens,
)
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
    recording_labels: Any


class _Evidence(NamedTuple):
    """Labels and frames of a document. at: where the frames' scores stand in the row."""

    labels: Int[np.ndarray, " L"]
    words: Sequence[LabelledWord]
    at: Int[np.ndarray, " F"]


def each_document(
    step: Callable[..., Any], weights: Weights, batches: Loader, mesh: Mesh, layout: ContextLayout
) -> Iterator[tuple[str, Int[np.ndarray, " tokens"], Any]]:
    """Yields (key, slots of its tokens in order, its row of the step's result) of all documents, in packed
    order. step: (params, buffers, batch) -> a tuple of arrays by row, with segment_ids and splits."""
    for batch, report in batches:
        found = jax.tree.map(np.asarray, step(weights.params, weights.buffers, put_batch(batch, mesh)))
        for number, keys in enumerate(batches.keys(report)):
            row = jax.tree.map(operator.itemgetter(number), found)
            documents = layout.document_slots(row.segment_ids, None, row.splits)
            for key, slots in zip(keys, documents, strict=True):
                yield key, slots, row


class Aligner:
    """Aligns the documents of packed batches; compiled once.

    The labels are those of the front end's own head for word times, where it has one, else the text's tokens.
    config: with what aligns switched on; the documents of the batches are made and packed by it, with labels.
    Raises UserError for a model that was not trained to align.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, tokenizer: Tokenizer) -> None:
        self.config = config = aligning_config(blueprint.config)
        self._mesh, self._tokenizer = mesh, tokenizer
        self._frames_of_output, self._most = 1, config.train.ctc_max_labels
        self._labeller: Labeller | None = None
        front_end = config.model.audio_encoder
        if front_end.label_loss:
            blueprint = blueprint if blueprint.config is config else Blueprint(config)
            self._labeller = front_end.labeller(config.data.tokenizer)
            self._frames_of_output = front_end.labels_per_output
        scores = make_aligning_step(blueprint, mesh)

        def run(params: Tree, buffers: Tree, batch: Batch) -> _Scored:
            found, tokens = scores(params, buffers, batch), (batch.segment_ids, batch.targets, batch.weights)
            audio = batch.audio_slots, batch.frame_mask, batch.splits, batch.recording_labels
            return _Scored(*found, *tokens, *audio)

        # Every process gets all rows' scores, and the labels of rows that it did not read.
        self._step = jit_for(config, mesh, run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, weights: Weights, batches: Loader) -> Iterator[AlignedDocument]:
        """Yields the words of all documents, in packed order. weights: in their device layout.

        All processes call it, and get the same.
        """
        for document in each_document(
            self._step, weights, batches, self._mesh, ContextLayout.of(self.config)
        ):
            yield self._aligned(*document)

    def _aligned(self, key: str, slots: Int[np.ndarray, " tokens"], row: _Scored) -> AlignedDocument:
        """A document of a row. slots: of its tokens, in order."""
        tokens = row.targets[slots][row.weights[slots] > 0].tolist()
        is_audio = row.audio_slots[slots] >= 0
        outputs = row.audio_slots[slots[is_audio]]
        found = self._evidence(tokens, slots[is_audio], outputs)
        reason = _no_alignment(tokens, is_audio) or self._misfit(found)
        if not reason and self._labeller is not None:
            packed = row.recording_labels[outputs].reshape(-1)
            reason = _other_labels(found.labels, packed[packed >= 0])
        if reason:
            return AlignedDocument(key, reason=reason)
        path = align(row.blank[found.at], row.label[found.at][:, : len(found.labels)], found.labels)
        frames = self._frames(outputs, row.frame_mask, row.loudness)
        words = timed_words(found.words, path, frames)
        return AlignedDocument(key, tuple(words), float(frames.begins[-1] * frames.seconds), path.log_prob)

    def _evidence(
        self, tokens: list[int], slots: Int[np.ndarray, " outputs"], outputs: Int[np.ndarray, " outputs"]
    ) -> _Evidence:
        """Labels and frames of a document. tokens: the supervised ones. slots, outputs: of its recording's
        outputs, the tokens' slots and where they stand among the row's outputs."""
        if self._labeller is None:
            return _Evidence(np.array(tokens, int), words_of_tokens(self._tokenizer, tokens), slots)
        text, _ = label_spans(self._tokenizer, tokens)
        words = self._labeller.words(text)
        labels = np.array([label for word in words for label in word.labels], int)
        inside = np.arange(self._frames_of_output)
        at = (self._frames_of_output * outputs[:, None] + inside).reshape(-1)
        return _Evidence(labels, words_in_order(words), at)

    def _frames(
        self,
        outputs: Int[np.ndarray, " outputs"],
        mask_A: Bool[np.ndarray, " A"],
        loudness_A: Float[np.ndarray, " A"],
    ) -> Frames:
        """The frames of a recording. outputs: its outputs' indices in the row, whose frames these are."""
        front_end, parts = self.config.model.audio_encoder, self._frames_of_output
        begin, end = front_end.frame_of_output(outputs), front_end.frame_of_output(outputs + 1)
        inside = np.arange(parts + 1) / parts
        bounds = np.ceil(begin[:, None] + (end - begin)[:, None] * inside).astype(int)
        each = zip(bounds[:, :-1].reshape(-1).tolist(), bounds[:, 1:].reshape(-1).tolist(), strict=True)
        own = [np.arange(a, b)[mask_A[a:b]] for a, b in each]
        begins = np.cumsum([0, *map(len, own)])
        loudness = loudness_A[np.concatenate(own)] if front_end.bands else None
        return Frames(begins, loudness, front_end.seconds(1))

    def _misfit(self, found: _Evidence) -> str:
        """Why labels cannot be aligned with frames; "" if they can."""
        labels, frames, needed = len(found.labels), len(found.at), frames_needed(found.labels)
        most, setting = self.config.train.ctc_max_labels, "train.ctc_max_labels"
        what, of, fits = "tokens", "outputs of the encoder", ", or a tokenizer of longer tokens"
        if self._labeller is not None:
            (most, setting), fits = self._labeller.most, ""
            what, of = "pieces of words", "frames of the head for word times"
        if not labels:
            return "its text has no words; expected one or more"
        if labels > most:
            return f"its text is {labels} {what}; expected at most {most} ({setting})"
        if needed > frames:
            return (
                f"its text is {labels} {what}, which need {needed} {of}, and its recording makes {frames}; "
                f"expected a text that belongs to it{fits}"
            )
        return ""


def _no_alignment(tokens: list[int], is_audio: Bool[np.ndarray, " tokens"]) -> str:
    """Why no document of this form has words in time; "" if it has."""
    if not is_audio.any() or not tokens:
        return "it has no recording, or no text of the assistant's; expected one of each"
    if np.diff(np.flatnonzero(is_audio)).max(initial=1) > 1:
        return "it has several recordings, and a text does not say whose it is; expected one"
    return ""


def _other_labels(own: Int[np.ndarray, " L"], packed: Int[np.ndarray, " L"]) -> str:
    """Why the labels that the batch brought are not those of the document's text; "" if they are."""
    if np.array_equal(own, packed):
        return ""
    return (
        f"its text as tokens reads otherwise than as it is written: {len(own)} pieces of words, not "
        f"{len(packed)}; expected a text that the tokenizer gives back (data.tokenizer)"
    )


def aligning_config(config: Config) -> Config:
    """The config with what aligns switched on. Raises UserError for a model that was not trained to align
    texts with recordings."""
    encoder = config.model.encoder
    own = encoder and encoder.aligning
    if own:
        return config if own is encoder else replace(config, model=replace(config.model, encoder=own))
    if config.model.marks.classes:
        return config
    if encoder is None or not config.train.ctc_loss:
        raise UserError(
            f"train.ctc_loss is {config.train.ctc_loss:g}: the model was not trained to align texts with "
            "recordings; expected one that was: train it with train.ctc_loss 0.3 or more (docs/word_times.md)"
        )
    return config
