"""Evaluates a model: loss, token accuracy and word error rate over a data set."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.checkpoints.weights import Weights
from jaxthd.data.loader import BatchAndReport, BatchReport
from jaxthd.data.text.answers import answer_form
from jaxthd.data.text.prompt import answer_of
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.inference.wer import Normaliser, errors_of, make_normaliser, merges_compounds, summed
from jaxthd.objectives.metric import measured
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import PromptEnds, find_prompts
from jaxthd.parallel.mesh import DATA, local_rows, put_batch, put_rows
from jaxthd.parallel.processes import exchange
from jaxthd.run.metrics import VALIDATION_METRICS, ValidationFacts
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState
from jaxthd.steps.validation import make_validation_step


class Hypothesis(NamedTuple):
    """A document's hypothesis and reference.

    audio_seconds: seconds of its recordings. ended: whether the hypothesis ended by itself; otherwise it was
    cut off at train.max_new_tokens.
    """

    key: str
    reference: str
    hypothesis: str
    audio_seconds: float
    ended: bool


class Evaluation(NamedTuple):
    """The results over a data set.

    scores: the metrics of jaxthd.run.metrics.VALIDATION_METRICS by name; empty if nothing is supervised.
    hypotheses: one for each document with an answer, in the data set's order of rows.
    audio_seconds: seconds of all documents.
    seconds: the devices' time from batches on the host to answers on the host, without compilation.
    """

    scores: dict[str, float]
    hypotheses: list[Hypothesis]
    audio_seconds: float
    seconds: float


class Evaluator:
    """Evaluates states of one model on batches of a fixed shape; compiled once.

    stop_ids: the tokens that end an answer (PromptTemplate.stop_ids). With train.max_new_tokens 0 nothing is
    decoded. Raises UserError as ModelConfig.require_tokens.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, stop_ids: tuple[int, ...]) -> None:
        config = blueprint.config
        config.model.require_tokens()
        self._config, self._mesh, self._stop_ids = config, mesh, stop_ids
        new_tokens = config.train.max_new_tokens
        self._step: Any = make_validation_step(blueprint, mesh, stop_ids=stop_ids, new_tokens=new_tokens)
        self._compiled: Any = None
        self._tokenizer, self._form = load_tokenizer(config.data.tokenizer), answer_form(config.data.answer)

    def __call__(self, state: TrainState | Weights, batches: Iterable[BatchAndReport]) -> Evaluation:
        """Evaluates over all supervised tokens of a loader's batches. state: in its device layout.

        All processes call it, with equally many batches (jaxthd.data.loader.Loader), and get the
        same result.
        """
        sums, documents, audio_seconds, seconds, decoded = np.zeros(3), 0, 0.0, 0.0, []
        for number, (batch, report) in enumerate(batches):
            layout, max_documents = ContextLayout.of(self._config), self._config.data.max_documents
            ends, answers = find_prompts(batch, layout, max_documents)
            (scores, tokens), spent = self._run(state, batch, ends)
            seconds += spent
            sums += np.array(scores, float)
            documents += report.documents
            audio_seconds += report.audio_seconds
            if tokens.size:
                texts = self._texts(report, ends, answers, tokens)
                decoded += [(number, *rest) for rest in texts]
        nll, correct, count = sums
        if not count:
            return Evaluation({}, [], audio_seconds, seconds)
        # A row that several processes hold was decoded by each of them.
        told = sorted({tuple(x) for x in chain(*exchange(decoded))})
        hypotheses = [Hypothesis(*fields) for _, _, _, *fields in told]
        wer = word_error_rate(hypotheses, self._config.train.normaliser)
        facts = ValidationFacts(nll, correct, count, documents, hypotheses, wer)
        return Evaluation(measured(VALIDATION_METRICS, facts), hypotheses, audio_seconds, seconds)

    def _texts(
        self,
        report: BatchReport,
        ends: PromptEnds,
        answers: Sequence[Sequence[int]],
        tokens: np.ndarray,
    ) -> Iterator[tuple[int, int, str, str, str, float, bool]]:
        """Yields (row, document's number in it, *fields of its Hypothesis) for each document with an answer.

        answers, tokens: token ids of references and hypotheses, [rows * documents, ...].
        """
        documents = ends.last.shape[1]
        tokens_RDm = tokens.reshape(len(tokens) // documents, documents, tokens.shape[1])
        rows = local_rows(self._mesh, len(tokens_RDm))
        for own, (keys, seconds) in enumerate(zip(report.keys, report.seconds, strict=True)):
            for number, key in enumerate(keys):
                if ends.last[own, number] >= 0:
                    ids, ended = answer_of(tokens_RDm[rows[own], number].tolist(), self._stop_ids)
                    read = (answers[own * documents + number], ids)
                    reference, hypothesis = (self._form.read(self._tokenizer.decode(x)) for x in read)
                    yield rows[own], number, key, reference, hypothesis, seconds[number], ended

    def _run(self, state: TrainState | Weights, batch: Batch, ends: PromptEnds) -> tuple[Any, float]:
        """The step's results on the host, and the seconds that they took."""

        def arguments() -> tuple[Any, ...]:
            on_mesh = put_rows(ends, PromptEnds(*[PartitionSpec(DATA)] * 2), self._mesh)
            return state.params, state.buffers, put_batch(batch, self._mesh), on_mesh

        if self._compiled is None:
            self._compiled = self._step.lower(*arguments()).compile()
        start = time.perf_counter()
        found = jax.tree.map(np.asarray, self._compiled(*arguments()))
        return found, time.perf_counter() - start


def word_error_rate(hypotheses: Sequence[Hypothesis], normaliser: Normaliser = "basic") -> float:
    """Substitutions, deletions and insertions over the words of all references, after the normaliser.

    References without words are not counted. The rate is NaN if there are no others.
    """
    normalise = make_normaliser(normaliser)
    references = [normalise(h.reference) for h in hypotheses]
    texts = [normalise(h.hypothesis) for h in hypotheses]
    return summed(errors_of(references, texts, compounds=merges_compounds(normaliser))).rate
