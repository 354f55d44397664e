"""From the groups of a step to the batches of its updates, with the log-probabilities that these need."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.data.packer import pack_documents
from jaxthd.errors import UserError
from jaxthd.kernels.programs import ProgramCount
from jaxthd.objectives.grpo import ADVANTAGE, DRAWN, RECORDED
from jaxthd.objectives.objective import OLD
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import local_rows, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_with_scores
from jaxthd.steps.scoring import shared_scoring_step
from jaxthd.steps.state import TrainState

EXTRAS = (ADVANTAGE, RECORDED, DRAWN)
"""Names of the numbers for each token that a group's documents bring."""
BOUNDS = {"float64": 1e-5, "float32": 1e-2, "bfloat16": 0.5}
"""Largest difference of a log-probability between drawing and training, by compute dtype. The numbers that
are compared are stored in float32."""


class Agreement(NamedTuple):
    """Differences of the drawn tokens' log-probabilities between drawing and training, in nats.

    largest, mean: of the absolute differences. tokens: their number.
    """

    largest: float
    mean: float
    tokens: int


class Update(NamedTuple):
    """The batches of an update on the mesh, what they hold, and how drawing and training agree on them."""

    batches: list[Batch]
    report: BatchReport
    agreement: Agreement

    @property
    def is_empty(self) -> bool:
        """Nothing is trained on, because too few groups are left of what the step drew."""
        return not self.report.supervised_tokens


class UpdateMaker:
    """(state, documents) -> the updates of a step: the documents, evenly divided in their order, each part in
    as many batches of data.rows rows as it fills, with the log-probabilities that they are compared with.

    Raises UserError where the policy's log-probabilities are not those recorded while drawing, by more than
    BOUNDS has. An update without documents has one batch of padding.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh) -> None:
        self._config, self._mesh = blueprint.config, mesh
        self._pack = pack_documents(self._config, extras=EXTRAS, answers=True)
        self._scores: Any = shared_scoring_step(blueprint, mesh, self._config.rollout.temperature)
        self._with_scores = make_with_scores(blueprint, mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._difference = jax.jit(_difference, out_shardings=everywhere)

    @property
    def programs(self) -> ProgramCount:
        """The programs so far for the policy's log-probabilities."""
        found: ProgramCount = self._scores.count
        return found

    def __call__(self, state: TrainState, documents: Sequence[Document]) -> list[Update]:
        rollout = self._config.rollout
        made = []
        for part in np.array_split(np.arange(len(documents)), rollout.updates):
            packed, report = self._packed([documents[i] for i in part])
            batches, agreement = self._with_old(state, packed)
            require_agreement(agreement, self._config.compute.dtype)
            made.append(Update([self._with_scores(state, batch) for batch in batches], report, agreement))
        return made

    def _packed(self, documents: Sequence[Document]) -> tuple[list[Batch], BatchReport]:
        pack, count = self._pack, self._config.data.rows
        rows = list(grain.MapDataset.source(documents).pipe(pack)) if documents else []
        rows += [pack.row([])] * (-len(rows) % count if rows else count)
        room = pack.capacity, pack.limits.seconds
        reports = tuple(RowReport.of(number, row.report, *room) for number, row in enumerate(rows))
        own = local_rows(self._mesh, count)
        batches = [
            put_batch(concatenate_rows([rows[first + row].batch for row in own]), self._mesh)
            for first in range(0, len(rows), count)
        ]
        return batches, BatchReport(reports, tuple(row.report.keys for row in rows))

    def _with_old(self, state: TrainState, batches: Sequence[Batch]) -> tuple[list[Batch], Agreement]:
        """The batches with the policy's log-probabilities before the updates, and how these agree with what
        was recorded while drawing.
        """
        found, differences = [], []
        for batch in batches:
            old = self._scores(state.params, state.buffers, batch).log_probs
            differences.append(self._difference(old, batch.extras[RECORDED], batch.weights))
            found.append(batch._replace(extras={**batch.extras, OLD: old}))
        largest, total, tokens = np.array(differences, float).T
        count = int(tokens.sum())
        return found, Agreement(float(largest.max()), float(total.sum()) / max(count, 1), count)


def _difference(old: Array, recorded: Array, weights: Array) -> tuple[Array, Array, Array]:
    """(largest, sum, number) of the absolute differences where weights is not 0."""
    difference = jnp.where(weights > 0, jnp.abs(old - recorded), 0)
    return difference.max(), difference.sum(), (weights > 0).sum()


def require_agreement(found: Agreement, dtype: str) -> None:
    """Raises UserError where drawing and training differ by more than BOUNDS has for the compute dtype."""
    if not found.largest <= BOUNDS[dtype]:
        raise UserError(
            f"the log-probability of a token differs by {found.largest:.3g} between drawing and training; "
            f"expected at most {BOUNDS[dtype]:g} in {dtype}. The same weights should give the same: please "
            "report it; compute.attention_backend xla rules the kernels out"
        )
