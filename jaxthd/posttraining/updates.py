"""From the groups of a step to the batches of its updates, with the log-probabilities that these need."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.data.packer import PackDocuments
from jaxthd.errors import UserError
from jaxthd.objectives.grpo import RECORDED
from jaxthd.objectives.objective import OLD
from jaxthd.ops.cross_entropy import TokenScores
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import put_batch

BOUNDS = {"float64": 1e-5, "float32": 1e-2, "bfloat16": 0.5}
"""Largest difference of a log-probability between drawing and training, by compute dtype, where
rollout.max_logprob_difference is 0. The numbers that are compared are stored in float32."""


class Packed(NamedTuple):
    """The batches of an update on the mesh, and what they hold."""

    batches: list[Batch]
    report: BatchReport


def pack_updates(
    documents: Sequence[Document], pack: PackDocuments, rows: int, updates: int, mesh: Mesh
) -> list[Packed]:
    """Divides the documents evenly into updates, in their order, and packs each into as many batches of
    `rows` rows as it fills. An update without documents has one batch of padding.
    """
    parts = np.array_split(np.arange(len(documents)), updates)
    return [_pack([documents[i] for i in part], pack, rows, mesh) for part in parts]


def _pack(documents: Sequence[Document], pack: PackDocuments, rows: int, mesh: Mesh) -> Packed:
    packed = list(grain.MapDataset.source(documents).pipe(pack)) if documents else []
    packed += [pack.row([])] * (-len(packed) % rows if packed else rows)
    reports = tuple(RowReport.of(number, row.report, pack.capacity) for number, row in enumerate(packed))
    batches = [
        put_batch(concatenate_rows([row.batch for row in packed[first : first + rows]]), mesh)
        for first in range(0, len(packed), rows)
    ]
    return Packed(batches, BatchReport(reports, tuple(row.report.keys for row in packed)))


class Agreement(NamedTuple):
    """How far drawing and training differ in the log-probabilities of the drawn tokens, in nats.

    largest, mean: of the absolute differences. tokens: their number.
    """

    largest: float
    mean: float
    tokens: int


def with_old(
    batches: Sequence[Batch], scores: Callable[[Batch], TokenScores]
) -> tuple[list[Batch], Agreement]:
    """The batches with the trainer's log-probabilities before the updates, and how these agree with what was
    recorded while drawing. scores: of the policy, at the temperature that draws.
    """
    found, largest, total, tokens = [], [], [], []
    for batch in batches:
        old = scores(batch).log_probs
        difference = jnp.where(batch.weights > 0, jnp.abs(old - batch.extras[RECORDED]), 0)
        largest.append(difference.max())
        total.append(difference.sum())
        tokens.append((batch.weights > 0).sum())
        found.append(batch._replace(extras={**batch.extras, OLD: old}))
    count = int(sum(map(int, tokens)))
    return found, Agreement(max(map(float, largest)), sum(map(float, total)) / max(count, 1), count)


def require_agreement(found: Agreement, bound: float, dtype: str) -> None:
    """Raises UserError where drawing and training differ by more than `bound`; 0: than BOUNDS has."""
    most = bound or BOUNDS[dtype]
    if not found.largest <= most:
        raise UserError(
            f"the log-probability of a token differs by {found.largest:.3g} between drawing and training; "
            f"expected at most {most:g} (rollout.max_logprob_difference). The same weights should give the "
            "same: please report it; a larger bound lets the run go on"
        )
