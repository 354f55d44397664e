"""How good a model is: loss, token accuracy and word error rate over a data set."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config, ValidationSet
from jaxthd.data.loader import BatchAndReport
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.inference.wer import Normaliser, errors_of, make_normaliser, summed
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.prompts import PromptEnds, find_prompts
from jaxthd.parallel.mesh import DATA, local_rows, put_batch, put_rows
from jaxthd.parallel.processes import exchange
from jaxthd.run.metrics import VALIDATION
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState
from jaxthd.steps.validation import make_validation_step


class Hypothesis(NamedTuple):
    """What was decoded for a document, next to what it should be.

    audio_seconds: of its recordings. ended: by itself, not cut off at train.max_new_tokens.
    """

    key: str
    reference: str
    hypothesis: str
    audio_seconds: float
    ended: bool


class Evaluation(NamedTuple):
    """Over a data set.

    scores: "loss", natural log, a token; "accuracy", 0 to 1, given the true tokens before; "wer", see
        word_error_rate, if anything was decoded that has words; "documents". None where nothing is
        supervised.
    hypotheses: each document's decoded last answer. audio_seconds: of all documents.
    seconds: that the devices took, from a batch on the host to answers on the host, without compiling.
    """

    scores: dict[str, float]
    hypotheses: list[Hypothesis]
    audio_seconds: float
    seconds: float


class Evaluator:
    """Evaluates states of one model on batches of a fixed shape; compiled once.

    end_id: the token that ends an answer. config.train.max_new_tokens 0 decodes nothing.
    """

    def __init__(self, config: Config, mesh: Mesh, end_id: int) -> None:
        self._config, self._mesh, self._end_id = config, mesh, end_id
        new_tokens = config.train.max_new_tokens
        self._step: Any = make_validation_step(Blueprint(config), mesh, end_id=end_id, new_tokens=new_tokens)
        self._compiled: Any = None
        self._tokenizer = load_tokenizer(config.data.tokenizer)

    def __call__(self, state: TrainState | Weights, batches: Iterable[BatchAndReport]) -> Evaluation:
        """Over all supervised tokens of the Loader's batches. state: in its training form.

        Of several processes all call it, with as many batches (SynchronizedLoader), and get the same.
        """
        sums, documents, audio_seconds, seconds, decoded = np.zeros(3), 0, 0.0, 0.0, []
        for at, (batch, report) in enumerate(batches):
            ends, answers = find_prompts(
                batch,
                self._config.mesh.context,
                self._config.data.max_documents,
                layout=self._config.compute.context_layout,
                round_to=self._config.data.round_to,
            )
            (scores, tokens), spent = self._run(state, batch, ends)
            seconds += spent
            sums += np.array(scores, float)
            documents += report.documents
            audio_seconds += report.audio_seconds
            places = ends.last.shape[1]
            tokens_RDm = tokens.reshape(len(tokens) // places, places, tokens.shape[1])
            rows = local_rows(self._mesh, len(tokens_RDm))
            for own, keys in enumerate(report.keys if tokens.size else ()):
                heard = seconds_of_documents(batch, own)
                for number, key in enumerate(keys):
                    if ends.last[own, number] >= 0:
                        ids, said = tokens_RDm[rows[own], number].tolist(), answers[own * places + number]
                        texts = map(self._tokenizer.decode, (said, ids))
                        fields = key, *texts, heard[number], self._end_id in ids
                        decoded.append((at, rows[own], number, *fields))
        loss, correct, count = sums
        if not count:
            return Evaluation({}, [], audio_seconds, seconds)
        # A row that several processes hold was decoded by each.
        told = sorted({tuple(x) for x in chain(*exchange(decoded))})
        hypotheses = [Hypothesis(*fields) for _, _, _, *fields in told]
        found = {"loss": loss / count, "accuracy": correct / count, "documents": float(documents)}
        wer = word_error_rate(hypotheses, self._config.train.normaliser)
        if not math.isnan(wer):
            found["wer"] = wer
        return Evaluation(found, hypotheses, audio_seconds, seconds)

    def _run(self, state: TrainState | Weights, batch: Batch, ends: PromptEnds) -> tuple[Any, float]:
        """What the step gives, on the host; and how long it took."""

        def arguments() -> tuple[Any, ...]:
            on_mesh = put_rows(ends, PromptEnds(*[PartitionSpec(DATA)] * 2), self._mesh)
            return state.params, state.buffers, put_batch(batch, self._mesh), on_mesh

        if self._compiled is None:
            self._compiled = self._step.lower(*arguments()).compile()
        start = time.perf_counter()
        found = jax.tree.map(np.asarray, self._compiled(*arguments()))
        return found, time.perf_counter() - start


def seconds_of_documents(batch: Batch, row: int) -> list[float]:
    """Of a row of a host batch: seconds of audio of each document."""
    if not batch.has_audio:
        return [0.0] * int(batch.segment_ids[row].max())
    valid_E = batch.mel_mask[row].reshape(-1, SUBSAMPLING).sum(-1)
    slots, ids = batch.audio_slots[row], batch.segment_ids[row]
    frames = np.bincount(ids[slots >= 0], valid_E[slots[slots >= 0]], minlength=ids.max() + 1)
    return (frames[1:] / 100).tolist()


def word_error_rate(hypotheses: Sequence[Hypothesis], normaliser: Normaliser = "basic") -> float:
    """Substitutions, deletions and insertions over words of the references, after the normaliser, over all.

    References without a word are left out; NaN if no other is there.
    """
    normalise = make_normaliser(normaliser)
    said = [normalise(h.reference) for h in hypotheses]
    return summed(errors_of(said, [normalise(h.hypothesis) for h in hypotheses])).rate


def validation_metrics(
    sets: Sequence[ValidationSet], scores: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """As a metrics line has them: validation_loss, ..., the means over the sets that have one, each counting
    as much (documents: their sum); and of sets with names validation_NAME_loss, ...
    """
    line = {}
    for name in dict.fromkeys(chain(*scores)):
        found = [of_set[name] for of_set in scores if name in of_set]
        line[VALIDATION + name] = sum(found) / (1 if name == "documents" else len(found))
    for each, of_set in zip(sets, scores, strict=True):
        if each.is_named:
            line |= {f"{VALIDATION}{each.name}_{name}": score for name, score in of_set.items()}
    return line
