"""Evaluates preferences: an objective's loss, its margin and accuracy over a data set of answers.

Legend: N rows of all batches, T token slots of a row.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from jaxthd.data.loader import BatchAndReport
from jaxthd.objectives.dpo import DPO
from jaxthd.objectives.kto import KTO
from jaxthd.objectives.metric import measured
from jaxthd.objectives.objective import LOSS, OLD, REFERENCE, Objective, Tokens
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import put_batch
from jaxthd.run.metrics import PREFERENCE_METRICS, PreferenceFacts
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of, policy_temperature
from jaxthd.steps.reference_scores import make_with_scores
from jaxthd.steps.scoring import shared_scoring_step
from jaxthd.steps.state import TrainState


class PreferenceEvaluator:
    """Evaluates states of a run that compares answers. The programs are those that score its training."""

    def __init__(self, blueprint: Blueprint, mesh: Mesh) -> None:
        self._mesh, self._objective = mesh, objective_of(blueprint.config)
        self._max_documents = blueprint.config.data.max_documents
        self._with_scores = make_with_scores(blueprint, mesh)
        self._scores = shared_scoring_step(blueprint, mesh, policy_temperature(blueprint.config))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._everywhere: Any = jax.jit(lambda tree: tree, out_shardings=everywhere)

    def __call__(self, state: TrainState, batches: Iterable[BatchAndReport]) -> dict[str, float]:
        """PREFERENCE_METRICS over all batches, whose means are over the whole set; {} without a batch.

        state: in its device layout. All processes call it, and get the same.
        """
        found, documents = [], 0
        for batch, report in batches:
            found.append(self._scored(state, batch))
            documents += report.documents
        if not found:
            return {}
        own, known = jax.tree.map(lambda *rows: jnp.concatenate(rows), *found)
        tokens = self._tokens(known)
        results = quotients(self._objective, own, tokens)
        pairs = results if isinstance(self._objective, DPO) else self._pairs(own, tokens)
        loss = results.get("preference_loss", results[LOSS])
        facts = PreferenceFacts(loss, pairs.get("accuracy"), pairs.get("margin"), documents)
        return {name: float(value) for name, value in measured(PREFERENCE_METRICS, facts).items()}

    def _scored(self, state: TrainState, batch: Batch) -> tuple[np.ndarray, dict[str, Any]]:
        """(the policy's log-probabilities [R, T], what Tokens needs of the batch), on the host."""
        on_mesh = put_batch(batch, self._mesh)
        extras = dict(self._with_scores(state, on_mesh).extras)
        if OLD not in extras:
            extras[OLD] = self._scores(state.params, state.buffers, on_mesh).log_probs
        documents = on_mesh.segment_ids if on_mesh.document_ids is None else on_mesh.document_ids
        known = {
            "weights": on_mesh.weights,
            "segment_ids": on_mesh.segment_ids,
            "document_ids": documents,
            "positions": on_mesh.positions,
            "extras": extras,
        }
        return jax.tree.map(np.asarray, self._everywhere((extras[OLD], known)))

    def _tokens(self, known: dict[str, Any]) -> Tokens:
        """The rows of all batches as one batch that no rank shares."""
        tokens = Tokens(**known, max_documents=self._max_documents, axis=None)
        return replace(tokens, totals=self._objective.totals(tokens))

    def _pairs(self, own: Float[Array, "N T"], tokens: Tokens) -> dict[str, float]:
        """accuracy and margin of the documents that are pairs; {} where none is, or without a reference."""
        beta = self._objective.beta if isinstance(self._objective, KTO) else 1.0
        dpo = DPO(beta=beta)
        if REFERENCE not in tokens.extras or not float(dpo.counts(tokens)[LOSS]):
            return {}
        return quotients(dpo, own, tokens)


def quotients(objective: Objective, own: Float[Array, "N T"], tokens: Tokens) -> dict[str, float]:
    """The objective's sums over its counts, by name; 0 where a count is 0."""
    counts, sums = objective.counts(tokens), objective.sums(own, tokens)
    return {name: float(x / jnp.maximum(counts.get(name, counts[LOSS]), 1)) for name, x in sums.items()}
