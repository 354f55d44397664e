"""The contract of objectives: named sums over named counts, from the log-probabilities of a packed buffer.

An objective is a frozen dataclass whose fields are its settings (train.objective_options). The step divides
every sum by the count of the same name over the whole batch, so the result depends neither on the mesh nor on
microbatches nor on how documents share buffers. "loss" is what trains; all other names are metrics.

A document's supervised tokens are its answers: one, or several to one prompt (Document.answers). An answer is
a segment of its own in the buffer. Four kinds of objectives fit:

- of tokens: sums of a function of each position's log-probability (SFT, GRPO);
- of answers: functions of each answer's sum, which `Tokens.answer_sums` gives on every context rank (a
  sequence's mean, GSPO, KTO). Their sum over the answers goes through `Tokens.share`;
- of documents: the same with `Tokens.document_sums`, over all answers of a document (DPO, whose document is a
  pair). Where documents belong together, `Tokens.document_values` tells which;
- of unpacked answers: any function of an answer's log-probabilities (objectives/unpacked.py).

Legend: R rows (buffers) of a microbatch on this rank, T token slots of a row on this rank, D most segments of
a row (data.max_documents), which bounds its documents too.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.objectives.metric import LIKELIHOOD, Curve, Metric, Panel
from jaxthd.packing.batch import Batch

LOSS = "loss"
"""The name of the sum that trains, and of its count."""
REFERENCE = "reference"
"""Extra: the log-probability of each target under the reference policy."""
OLD = "old"
"""Extra: the log-probability of each target under the policy before the updates of the step."""


@dataclass(frozen=True)
class Tokens:
    """Facts of the tokens besides their log-probabilities, for objectives: this rank's part of a batch.

    weights: 1.0 where a position's target is supervised, else 0.0.
    segment_ids, document_ids: 0 in padding, else the number in the row of the position's segment and of its
        document, from 1. They differ only for documents with several answers.
    positions: index of the position in its segment.
    extras: numbers for each token (Objective.extras, Objective.scored), by name; each at the position that
        predicts the token it is about; 0.0 in padding, and of no meaning where weights is 0.
    max_documents: D. axis: the context axis, None on one device without a mesh.
    totals: Objective.totals of the whole batch; empty in `counts` and `totals`.
    """

    weights: Float[Array, "R T"]
    segment_ids: Int32[Array, "R T"]
    document_ids: Int32[Array, "R T"]
    positions: Int32[Array, "R T"]
    extras: Mapping[str, Float[Array, "R T"]]
    max_documents: int
    axis: str | None
    totals: Mapping[str, Float[Array, ""]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: Batch,
        max_documents: int,
        axis: str | None,
        totals: Mapping[str, Float[Array, ""]] | None = None,
    ) -> "Tokens":
        documents = batch.segment_ids if batch.document_ids is None else batch.document_ids
        whose = batch.segment_ids, documents, batch.positions
        return cls(batch.weights, *whose, batch.extras, max_documents, axis, totals or {})

    def answer_sums(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """The sum of x over each segment's positions, on whatever context ranks they lie; 0 where a row has
        no such segment. The same on all context ranks; differentiable.
        """
        return self._sums(x_RT, self.segment_ids)

    def document_sums(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """As answer_sums, over the positions of each document, with all its answers."""
        return self._sums(x_RT, self.document_ids)

    def answer_values(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """A number of each answer, which x holds at all of its supervised positions. 0 where a row has no
        such segment, or nothing of it is supervised. The same on all context ranks; not differentiable.
        """
        return self._values(x_RT, self.segment_ids)

    def document_values(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """As answer_values, of each document."""
        return self._values(x_RT, self.document_ids)

    def supervised_answers(self) -> Bool[Array, "R D"]:
        """Whether each segment has a supervised position. The same on all context ranks."""
        return self.answer_sums(self.weights) > 0

    def supervised_documents(self) -> Bool[Array, "R D"]:
        """As supervised_answers, of the documents."""
        return self.document_sums(self.weights) > 0

    def at_tokens(self, of_answers_RD: Float[Array, "R D"]) -> Float[Array, "R T"]:
        """Each answer's number at all of its positions; 0 in padding. Differentiable."""
        return jnp.take_along_axis(jnp.pad(of_answers_RD, ((0, 0), (1, 0))), self.segment_ids, axis=1)

    def share(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """This rank's share of a number that all context ranks compute alike."""
        return x if self.axis is None else x / jax.lax.axis_size(self.axis)

    def _sums(self, x_RT: Array, ids_RT: Array) -> Array:
        def of_row(x_T: Array, ids_T: Array) -> Array:
            """Sums of a row by document."""
            return jax.ops.segment_sum(x_T, ids_T, self.max_documents + 1)[1:]

        sums_RD = jax.vmap(of_row)(x_RT, ids_RT)
        return sums_RD if self.axis is None else jax.lax.psum(sums_RD, self.axis)

    def _values(self, x_RT: Array, ids_RT: Array) -> Array:
        def of_row(x_T: Array, ids_T: Array) -> Array:
            """Maxima of a row by document."""
            return jax.ops.segment_max(x_T, ids_T, self.max_documents + 1)[1:]

        known_RT = jnp.where(self.weights > 0, jax.lax.stop_gradient(x_RT), -jnp.inf)
        found_RD = jax.vmap(of_row)(known_RT, ids_RT)
        if self.axis is not None:
            found_RD = jax.lax.all_gather(found_RD, self.axis).max(0)
        return jnp.where(jnp.isfinite(found_RD), found_RD, 0)


class Objective(ABC):
    """See the module's docstring. Its methods run inside the step's shard_map."""

    is_policy: ClassVar[bool] = False
    """Whether the model is a policy, whose answers are compared: its forward pass is that of evaluation
    (stored batch statistics, no dither, no SpecAugment, routers' biases as they are), and its
    log-probabilities are those at rollout.temperature."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(LOSS, "", "the objective's loss", text="{:.4f}", shown="progress"),
    )
    """Its numbers as people see them: "loss", and its sums by their names. Those that are shown in
    "progress" begin the line of a step. One without an entry is in the files alone."""
    panels: ClassVar[tuple[Panel, ...]] = (
        Panel("Loss", "the objective's", (Curve(LOSS, "training"),)),
        LIKELIHOOD,
    )
    """The panels of curves.png about it, which come first. Panels of all runs follow: validation,
    optimization, speed."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the numbers for each token that documents bring for it (Document.extras)."""
        return ()

    @property
    def scored(self) -> tuple[str, ...]:
        """Names of the log-probabilities that the step computes and adds to the extras: REFERENCE, OLD."""
        return ()

    @abstractmethod
    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """This rank's part of each denominator, by name; LOSS is among them. Depends on data alone."""

    @abstractmethod
    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """This rank's part of each numerator, by name; LOSS is among them. One without a count of its name is
        divided by that of LOSS.

        log_probs_RT: natural log of the probability of each position's target, 0 where weights is 0.
        """

    def totals(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """This rank's part of sums over the whole batch that `sums` finds in Tokens.totals, by name. Depends
        on data alone, which includes what is scored before.
        """
        return {}

    def extremes(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Metrics that are the largest of a number over the whole batch: this rank's largest, by name. The
        number is 0 or more; 0 where there is none.
        """
        return {}
