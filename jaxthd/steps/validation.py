"""The validation step: loss, accuracy, and a decoded answer for every document, in one program."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.decoding import answer
from jaxthd.objectives.sft import negative_log_likelihood
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds
from jaxthd.parallel.mesh import AXES, DATA, TOKEN_AXES, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree


class Scores(NamedTuple):
    """Sums over the supervised tokens of a batch: negative log-likelihood, correct ones, their number."""

    loss: Array
    correct: Array
    tokens: Array


def make_validation_step(
    blueprint: Blueprint, mesh: Mesh, *, stop_ids: tuple[int, ...], new_tokens: int
) -> Callable[[Tree, Tree, Batch, PromptEnds], tuple[Scores, Array]]:
    """(params, buffers, batch, prompts) -> (scores, decoded answers), with stored batch statistics; jitted.

    The answers, int32 [R * D, new_tokens], are in the order of the prompts. They end with one of stop_ids,
    the tokens that end an answer, unless they are cut off, and are filled up with the first of these.
    """

    def rank(params: Tree, buffers: Tree, batch: Batch, ends: PromptEnds) -> tuple[Scores, Array]:
        """Scores of the tokens of this rank, and the decoded answers."""
        model = nnx.merge(blueprint.graph, params, buffers)
        answered = answer(model, batch, ends, stop_ids=stop_ids, new_tokens=new_tokens, axes=AXES)
        logp_N, weights_N = answered.log_probs.reshape(-1), batch.weights.reshape(-1)
        loss = negative_log_likelihood(logp_N, weights_N)
        scores = Scores(loss, answered.correct.sum(), weights_N.sum())
        return jax.lax.psum(scores, TOKEN_AXES), answered.tokens

    everywhere, rows = PartitionSpec(), PartitionSpec(DATA)
    in_specs = (*blueprint.specs, batch_specs(), PromptEnds(rows, rows))
    scored = on_ranks(rank, mesh, in_specs, (everywhere, PartitionSpec(TOKEN_AXES)))
    # The answers go everywhere too: a process that has a row decodes all of its documents.
    return jit_for(blueprint.config, mesh, scored, out_shardings=NamedSharding(mesh, everywhere))
