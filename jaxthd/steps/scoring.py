"""The scoring step: log-probabilities of given tokens, and the likeliest tokens at each position."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxthd.kernels.programs import Program
from jaxthd.ops.cross_entropy import TokenScores
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import CONTEXT, DATA, batch_specs, on_ranks
from jaxthd.parallel.pipeline import score
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import Forward, microbatches, split_params


def make_scoring_step(
    blueprint: Blueprint,
    mesh: Mesh,
    top_k: int = 0,
    *,
    temperature: float = 1.0,
) -> Callable[[Tree, Tree, Batch], TokenScores]:
    """(params, buffers, batch) -> TokenScores of every supervised position, [R, T, ...], 0 elsewhere; jitted.

    In the batch's layout and sharding, with stored batch statistics, by the pipeline's schedule.
    top_k: number of likeliest tokens. temperature: of the softmax.
    Raises ValueError unless top_k lies in 0..model.llm.vocab_size.
    """
    config, schedule = blueprint.config, blueprint.forward_schedule
    if not 0 <= top_k <= config.model.llm.vocab_size:
        raise ValueError(
            f"top_k is {top_k}; expected 0 to {config.model.llm.vocab_size}, the entries of the vocabulary"
        )

    def rank(params: Tree, buffers: Tree, batch: Batch) -> TokenScores:
        """Scores of the tokens of this rank."""
        forward = Forward(blueprint, params, buffers, None, batch_statistics=False)

        def head(head: Tree, x_nD: Array, skip: None, batch: Batch) -> tuple[Array, TokenScores]:
            """Scores in place of a loss, which is 0."""
            model = forward.model(buffers, head=head)
            scores = model.top_k_scores(x_nD, batch, top_k, temperature=temperature)
            return jnp.zeros(()), jax.tree.map(lambda x: x.reshape(*batch.tokens.shape, *x.shape[1:]), scores)

        batches = microbatches(batch, schedule.microbatches)
        model, encoder = forward.pipelined._replace(head=head), buffers.get("encoder", {})
        scores = score(model, schedule, split_params(params), encoder, batches)
        return jax.tree.map(lambda x: x.reshape(*batch.tokens.shape, *x.shape[3:]), scores)

    by_token: Any = PartitionSpec(DATA, CONTEXT)
    out_specs = TokenScores(by_token, by_token, by_token)
    return Program(jax.jit(on_ranks(rank, mesh, (*blueprint.specs, batch_specs()), out_specs)))


@functools.lru_cache(maxsize=4)
def shared_scoring_step(
    blueprint: Blueprint, mesh: Mesh, temperature: float
) -> Callable[[Tree, Tree, Batch], TokenScores]:
    """make_scoring_step, made once: the policy and a reference of the same shapes share one program."""
    return make_scoring_step(blueprint, mesh, temperature=temperature)
