"""What an objective is: named sums over named counts, from the log-probabilities of a packed buffer.

An objective is a frozen dataclass whose fields are its settings (train.objective_options). The step divides
every sum by the count of the same name over the whole batch, so the result depends neither on the mesh nor on
microbatches nor on how documents share buffers. "loss" is what trains; all other names are metrics.

Three kinds of objectives fit:

- of tokens: sums of a function of each position's log-probability (SFT, GRPO);
- of documents: functions of each document's sum, which `Tokens.document_sums` gives on every context rank
  (a sequence's mean, GSPO). Their sum over the documents goes through `Tokens.share`;
- of pairs of documents: the same, where `Tokens.document_values` tells which documents belong together
  (DPO).

Legend: R rows (buffers) of a microbatch on this rank, T token slots of a row on this rank, D most documents
of a row.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.packing.batch import Batch

LOSS = "loss"
"""The name of the sum that trains, and of its count."""


@dataclass(frozen=True)
class Tokens:
    """What an objective may know of the tokens besides their log-probabilities: this rank's part of a batch.

    weights: 1.0 where a position's target is supervised, else 0.0.
    segment_ids: 0 in padding, else the number of the position's document in its row, from 1.
    extras: the objective's own numbers (Objective.extras), by name; each at the position that predicts the
        token it is about; 0.0 in padding.
    max_documents: D. axis: the context axis, None on one device without a mesh.
    """

    weights: Float[Array, "R T"]
    segment_ids: Int32[Array, "R T"]
    extras: dict[str, Float[Array, "R T"]]
    max_documents: int
    axis: str | None

    @classmethod
    def of(cls, batch: Batch, max_documents: int, axis: str | None) -> "Tokens":
        return cls(batch.weights, batch.segment_ids, batch.extras, max_documents, axis)

    def document_sums(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """The sum of x over each document's positions, on whatever context ranks they lie; 0 where a row has
        no such document. The same on all context ranks; differentiable.
        """

        def of_row(x_T: Array, ids_T: Array) -> Array:
            return jax.ops.segment_sum(x_T, ids_T, self.max_documents + 1)[1:]

        sums_RD = jax.vmap(of_row)(x_RT, self.segment_ids)
        return sums_RD if self.axis is None else jax.lax.psum(sums_RD, self.axis)

    def document_values(self, x_RT: Float[Array, "R T"]) -> Float[Array, "R D"]:
        """A number of each document, which x holds at all of its supervised positions. 0 where a row has no
        such document, or nothing of it is supervised. The same on all context ranks; not differentiable.
        """

        def of_row(x_T: Array, ids_T: Array) -> Array:
            return jax.ops.segment_max(x_T, ids_T, self.max_documents + 1)[1:]

        known_RT = jnp.where(self.weights > 0, jax.lax.stop_gradient(x_RT), -jnp.inf)
        found_RD = jax.vmap(of_row)(known_RT, self.segment_ids)
        if self.axis is not None:
            found_RD = jax.lax.all_gather(found_RD, self.axis).max(0)
        return jnp.where(jnp.isfinite(found_RD), found_RD, 0)

    def supervised_documents(self) -> Bool[Array, "R D"]:
        """Which documents have a supervised position. The same on all context ranks."""
        return self.document_sums(self.weights) > 0

    def share(self, x: Float[Array, ""]) -> Float[Array, ""]:
        """This rank's share of a number that all context ranks compute alike."""
        return x if self.axis is None else x / jax.lax.axis_size(self.axis)


@runtime_checkable
class Objective(Protocol):
    """See the module's docstring. Runs inside the step's shard_map."""

    extras: ClassVar[tuple[str, ...]]
    """Names of the numbers for each token that documents bring for it (Document.extras)."""

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """This rank's part of each denominator, by name; LOSS is among them. Depends on data alone."""

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """This rank's part of each numerator, by name; LOSS is among them. One without a count of its name is
        divided by that of LOSS.

        log_probs_RT: natural log of the probability of each position's target, 0 where weights is 0.
        """
