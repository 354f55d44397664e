"""Log-probabilities of given documents' tokens, packed and on any mesh.

Legend: R rows, T token slots of a row.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int, Int32

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.data.loader import Loader
from jaxthd.kernels.xla_options import jit_for
from jaxthd.ops.cross_entropy import TokenScores
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document, document_segments
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import put_batch
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.scoring import make_scoring_step


@runtime_checkable
class _HasKey(Protocol):
    """A result for a document. key: the document's."""

    @property
    def key(self) -> str: ...


Keyed = TypeVar("Keyed", bound=_HasKey)


class DocumentScores(NamedTuple):
    """The scores of a document of n tokens, s of which were scored.

    tokens: the document's tokens, with placeholders for its audio. positions: those of the scored tokens,
    ascending. log_probs: natural log-probabilities of the scored tokens, given all tokens before.
    top_ids, top_log_probs: the k likeliest tokens at each position, the likeliest first; ties by lowest id.
    answers: how many of the scored tokens each of several answers has, in order; () for one sequence. A
        Scorer gives the tokens of such a document segment by segment (packing/document.py).
    """

    key: str
    tokens: Int32[np.ndarray, " n"]
    positions: Int[np.ndarray, " s"]
    log_probs: Float[np.ndarray, " s"]
    top_ids: Int32[np.ndarray, "s k"]
    top_log_probs: Float[np.ndarray, "s k"]
    answers: tuple[int, ...] = ()


class Scorer:
    """Scores the documents of packed batches; compiled once.

    top_k: likeliest tokens to find at each position, at most model.llm.vocab_size (else ValueError).
    every_token: score every text token but each document's first; otherwise the supervised ones.
    Raises UserError as ModelConfig.require_tokens.
    """

    def __init__(
        self, blueprint: Blueprint, mesh: Mesh, *, top_k: int = 0, every_token: bool = False
    ) -> None:
        config = blueprint.config
        config.model.require_tokens()
        self._config, self._mesh, self._every_token = config, mesh, every_token
        scores = make_scoring_step(blueprint, mesh, top_k)

        def run(params: Tree, buffers: Tree, batch: Batch) -> tuple[TokenScores, tuple[Any, ...]]:
            whose = batch.tokens, batch.weights, batch.segment_ids, batch.documents, batch.splits
            return scores(params, buffers, batch), whose

        # Every process gets all rows' scores, and the tokens of rows that it did not read.
        self._step = jit_for(config, mesh, run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, weights: Weights, batches: Loader) -> Iterator[DocumentScores]:
        """Yields the scores of all documents, in packed order. weights: in their device layout.

        All processes call it, and get the same.
        """
        for batch, report in batches:
            batch = supervising_every_token(batch, self._config) if self._every_token else batch
            on_mesh = put_batch(batch, self._mesh)
            found = jax.tree.map(np.asarray, self._step(weights.params, weights.buffers, on_mesh))
            scores, (tokens_RT, weights_RT, ids_RT, documents_RT, splits_RC) = found
            for row, keys in enumerate(batches.keys(report)):
                splits = None if splits_RC is None else splits_RC[row]
                slots_of_documents = _slots(ids_RT[row], self._config, splits, documents_RT[row])
                for key, slots in zip(keys, slots_of_documents, strict=True):
                    at = np.flatnonzero(weights_RT[row][slots])
                    here = [x[row][slots[at]] for x in jax.tree.leaves(scores)]
                    answers: tuple[int, ...] = ()
                    if batch.document_ids is not None:
                        segments = ids_RT[row][slots[at]]
                        answers = tuple(np.unique(segments, return_counts=True)[1].tolist())
                    of_tokens = DocumentScores(key, tokens_RT[row][slots], at + 1, *here)
                    yield of_tokens._replace(answers=answers)


def _slots(
    segment_ids: Int32[np.ndarray, " T"],
    config: Config,
    splits: Int32[np.ndarray, " C"] | None,
    document_ids: Int32[np.ndarray, " T"] | None = None,
) -> list[Int[np.ndarray, "..."]]:
    """The slots of each document's tokens, or of each segment's, in the laid-out row."""
    return ContextLayout.of(config).document_slots(segment_ids, document_ids, splits)


def of_document(scores: DocumentScores, document: Document, share_prompts: bool) -> DocumentScores:
    """The scores of a document with several answers, whose tokens a Scorer gives segment by segment: by the
    document's own tokens.
    """
    segments = document_segments(document, share_prompts)
    indices = np.concatenate([segment.indices for segment in segments])
    return scores._replace(tokens=document.tokens, positions=indices[scores.positions])


def supervising_every_token(batch: Batch, config: Config) -> Batch:
    """The host batch, with every position supervised whose next token is text of the same document."""
    targets, weights = np.zeros_like(batch.targets), np.zeros_like(batch.weights)
    for row, ids in enumerate(batch.segment_ids):
        for slots in _slots(ids, config, batch.splits_of(row)):
            at, after = slots[:-1], slots[1:]
            is_text = ~batch.is_audio[row, after]
            weights[row, at] = is_text
            targets[row, at] = np.where(is_text, batch.tokens[row, after], 0)
    return batch._replace(targets=targets, weights=weights)


def in_order(
    keys: Iterable[str], found: Iterable[Keyed], is_skipped: Callable[[str], bool]
) -> Iterator[Keyed]:
    """Yields what was found for documents in the order of `keys`. is_skipped: whether this key has nothing.

    Packing changes the order within a few buffers, so the results of that many documents are held back here.
    """
    rest = iter(keys)
    wanted, waiting = next(rest, None), dict[str, Keyed]()
    for scores in found:
        waiting[scores.key] = scores
        while wanted is not None and (wanted in waiting or is_skipped(wanted)):
            if wanted in waiting:
                yield waiting.pop(wanted)
            wanted = next(rest, None)
    for key in (wanted, *rest):
        if key in waiting:
            yield waiting.pop(key)
