"""Word times of given documents, packed and on any mesh, by a model whose head tells times at marks
(config.model.MarksConfig).

The head gives each mark a time by itself, so that times may go backwards. Those of a longest sequence that
does not stay; the others take or share out the times around them, as Qwen's own aligner has it
(qwen_asr/inference/qwen3_forced_aligner.py).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from jaxthd.checkpoints.weights import Weights
from jaxthd.data.loader import Loader
from jaxthd.data.text.marks import Marks
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.errors import UserError
from jaxthd.inference.alignment.aligner import AlignedDocument, each_document
from jaxthd.inference.alignment.words import TimedWord
from jaxthd.kernels.xla_options import jit_for
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import ContextLayout
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.scoring import make_scoring_step

SHORT = 2
"""Times in a row that take the nearest that stays; more are spread between those around them."""


class _Told(NamedTuple):
    """The likeliest class of each mark of a batch, or of a row of it, its log-probability, and the fields
    that say whose they are."""

    classes: Any
    log_probs: Any
    tokens: Any
    segment_ids: Any
    audio_slots: Any
    frame_mask: Any
    splits: Any


class MarkAligner:
    """Aligns the documents of packed batches, which the template "marks" has written; compiled once.

    Raises UserError where the tokenizer's mark is not the model's.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, tokenizer: Tokenizer) -> None:
        config = blueprint.config
        self.config, self._mesh, self._tokenizer = config, mesh, tokenizer
        self._mark, (mark, recording) = config.model.marks.token, Marks.of(tokenizer)
        if mark != self._mark or config.data.template != "marks":
            raise UserError(
                f'model.marks.token is {self._mark} with data.template "{config.data.template}" and a '
                f'tokenizer whose mark is {mark}; expected {mark} and "marks": correct them, or let '
                "data.tokenizer be the model's"
            )
        self._after = len(recording) - recording.index(tokenizer.audio_id)
        scores = make_scoring_step(blueprint, mesh, top_k=1)

        def run(params: Tree, buffers: Tree, batch: Batch) -> _Told:
            """The likeliest class of every mark: the head's entry, where it scores tokens by other models."""
            weights = (batch.tokens == self._mark).astype(batch.weights.dtype)
            asked = batch._replace(targets=jnp.zeros_like(batch.targets), weights=weights)
            found = scores(params, buffers, asked)
            return _Told(
                found.top_ids[..., 0],
                found.top_log_probs[..., 0],
                *(batch.tokens, batch.segment_ids, batch.audio_slots, batch.frame_mask, batch.splits),
            )

        self._step = jit_for(config, mesh, run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, weights: Weights, batches: Loader) -> Iterator[AlignedDocument]:
        """Yields the words of all documents, in packed order. weights: in their device layout.

        All processes call it, and get the same.
        """
        for document in each_document(
            self._step, weights, batches, self._mesh, ContextLayout.of(self.config)
        ):
            yield self._aligned(*document)

    def _aligned(self, key: str, slots: Int[np.ndarray, " tokens"], row: _Told) -> AlignedDocument:
        """A document of a row. slots: of its tokens, in order."""
        tokens, outputs = row.tokens[slots], row.audio_slots[slots]
        (marks,), (audio,) = np.nonzero(tokens == self._mark), np.nonzero(outputs >= 0)
        if not len(marks) or not len(audio):
            return AlignedDocument(key, reason="it has no recording, or no words; expected one with its text")
        told, seconds = self.config.model.marks, self._seconds(outputs[audio], row)
        if seconds > told.classes * told.seconds:
            return AlignedDocument(
                key,
                reason=f"its recording has {seconds:.1f} s, and the model tells times up to "
                f"{told.classes * told.seconds:g} s; expected a shorter one",
            )
        log_probs = row.log_probs[slots[marks]]
        times = told.seconds * np.reshape(repaired(row.classes[slots[marks]].tolist()), (-1, 2))
        bounds = zip([audio[-1] + self._after, *(marks[1:-1:2] + 1)], marks[::2], strict=True)
        texts = (self._tokenizer.decode(tokens[a:b].tolist()) for a, b in bounds)
        scores = np.exp(log_probs.reshape(-1, 2).mean(1)).tolist()
        each = zip(texts, times[:, 0].tolist(), times[:, 1].tolist(), scores, strict=True)
        words = tuple(TimedWord(*word) for word in each)
        return AlignedDocument(key, words, seconds, float(log_probs.sum()))

    def _seconds(self, outputs: Int[np.ndarray, " outputs"], row: _Told) -> float:
        """Seconds of a recording. outputs: its outputs' indices in the row."""
        front_end = self.config.model.audio_encoder
        bounds = zip(front_end.frame_of_output(outputs), front_end.frame_of_output(outputs + 1), strict=True)
        return front_end.seconds(int(sum(row.frame_mask[a:b].sum() for a, b in bounds)))


def repaired(classes: Sequence[int]) -> list[float]:
    """Classes in an order that does not go backwards.

    Those of a longest sequence that does not go backwards stay: of all of them the one that ends first, each
    member of which is the first that can be. Of up to SHORT others in a row each takes the nearer time that
    stays, of equals the one before; more are spread evenly between the two, or take the only one.
    """
    stays, found = _longest(classes), list(map(float, classes))
    at = 0
    for does_stay, group in groupby(stays):
        count = len(list(group))
        begin, end = at, at + count
        at = end
        if does_stay:
            continue
        # One of the two stays, since a sequence has a member.
        before = found[begin - 1] if begin else found[end]
        after = found[end] if end < len(found) else before
        for number in range(1, count + 1):
            share = number / (count + 1)
            is_short = count <= SHORT
            found[begin + number - 1] = (
                (before if share <= 0.5 else after) if is_short else before + share * (after - before)
            )
    return found


def _longest(classes: Sequence[int]) -> list[bool]:
    """A bool for each class: whether it is in the sequence that `repaired` keeps."""
    lengths: list[int] = []
    least: list[int] = []  # of the sequences of each length so far, the least last member
    for value in classes:
        length = bisect_right(least, value)
        least[length : length + 1] = [value]
        lengths.append(length)
    stays = [False] * len(classes)
    at, length = len(classes), max(lengths, default=-1)
    if length >= 0:
        at = lengths.index(length)
        stays[at] = True
    while length > 0:
        length -= 1
        at = next(i for i in range(at) if lengths[i] == length and classes[i] <= classes[at])
        stays[at] = True
    return stays
