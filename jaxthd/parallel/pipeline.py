"""Runs a pipeline schedule: one program for all ranks, a scan over ticks.

The model is three functions (parallel/pipeline_model.py); parallel/pipeline_tick.py runs one tick. The
objective is the sum of all ranks' shares (parallel/tensor.py gives the convention). Gradients are computed
for the parameters that each function is given. If it is given none (all None), its gradient is skipped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.parallel.pipeline_model import PipelinedModel, PipelinedParams, Tree
from jaxthd.parallel.pipeline_tick import Carry, RankTick, add, over_first_dim, slots_of, zeros
from jaxthd.parallel.schedule import Schedule, Tick


class Accumulated(NamedTuple):
    """Sums over a step's microbatches.

    share: this rank's share of the objective, including that of its stages (extra_share).
    state: the state after the last microbatch (not a sum).
    extra: the stages' second results, leaves [chunks, ...].
    out: the second results of `head`; of what is Largest in them, the largest.
    """

    local_loss: Array
    gradients: PipelinedParams
    state: Tree
    extra: Tree
    out: Tree


def accumulate(
    model: PipelinedModel,
    schedule: Schedule,
    params: PipelinedParams,
    state: Tree,
    batches: Tree,
    extra_share: Callable[[Tree], Array],
) -> Accumulated:
    """Sums the objective's shares and their gradients over a step's microbatches. Call it inside shard_map.

    batches: leaves [microbatches, ...].
    extra_share: takes a stage's second result; returns what it adds to this rank's share of the objective.
    """
    if schedule.ranks * schedule.chunks == 1:
        return _one_stage(model, params, state, batches, extra_share)
    run = RankTick(model, schedule, params, state, batches, extra_share)

    def tick(carry: Carry, at: Tick) -> tuple[Carry, None]:
        """All parts of a tick, and the exchange at its end."""
        at = at.on(run.rank)
        carry, y = run.forward(carry, at)
        carry, dhead, dy = run.head(carry, at, y)
        dstage, dx = run.backward(carry, at, dy)
        dembed = run.embed_gradient(carry, at, dx)
        gradients = add(carry.gradients, PipelinedParams(dembed, dstage, dhead))
        arrived, returned = run.send(y, 1), run.send(dx, -1)
        return carry._replace(arrived=arrived, returned=returned, gradients=gradients), None

    end, _ = jax.lax.scan(tick, run.start(), schedule.table)
    return Accumulated(end.local_loss, end.gradients, end.state, end.extra, end.out)


def score(
    model: PipelinedModel, schedule: Schedule, params: PipelinedParams, state: Tree, batches: Tree
) -> Tree:
    """The second result of `head` for every microbatch, on all ranks: leaves [microbatches, ...].

    schedule: made with backward=False. No gradients are computed, and `head` gets None as its skip state.
    """
    run = RankTick(model, schedule, params, state, batches)
    out_like = jax.eval_shape(lambda x: model.head(params.head, x, None, run.batch(0))[1], run.x_like)

    def tick(carry: tuple[Array, Tree], at: Tick) -> tuple[tuple[Array, Tree], None]:
        """The forward parts of a tick, and the exchange at its end."""
        at, (arrived, outs) = at.on(run.rank), carry
        x, *_ = run.embed_if(at.embed, state, keeps=False)
        x = jnp.where(run.is_first(at.forward.chunk), x, arrived)
        y, *_ = run.stage_if(at.forward, x, keeps=False)
        out = run.head_if(at.head, jnp.where(run.is_last(at.forward.chunk), y, 0), out_like)
        where = jnp.where(at.head >= 0, at.head, schedule.microbatches)
        outs = jax.tree.map(lambda all_, o: all_.at[where].set(o, mode="drop"), outs, out)
        return (run.send(y, 1), outs), None

    start = zeros(run.x_like), slots_of(schedule.microbatches, out_like)
    return jax.lax.scan(tick, start, schedule.table)[0][1]


def _one_stage(
    model: PipelinedModel,
    params: PipelinedParams,
    state: Tree,
    batches: Tree,
    extra_share: Callable[[Tree], Array],
) -> Accumulated:
    """Plain gradient accumulation. Only remat recomputes anything."""

    def local_loss(
        params: PipelinedParams, state: Tree, batch: Tree
    ) -> tuple[Array, tuple[Tree, Tree, Tree]]:
        """This rank's share of a microbatch's objective; (state, extra, out) beside it."""
        x, skip, state = model.embed(params.embed, state, batch)
        x, extra = model.stage(model.stages.patterns[0], params.stage, 0, x, batch)
        own, out = model.head(params.head, x, skip, batch)
        return own + extra_share(extra), (state, extra, out)

    loss_and_gradient = jax.value_and_grad(local_loss, has_aux=True)

    def one(
        carry: tuple[PipelinedParams, Tree], batch: Tree
    ) -> tuple[tuple[PipelinedParams, Tree], tuple[Array, Tree, Tree]]:
        """Adds the gradients of a microbatch."""
        total, state = carry
        (local_loss, (state, extra, out)), gradients = loss_and_gradient(params, state, batch)
        return (add(total, gradients), state), (local_loss, extra, out)

    microbatches = len(jax.tree.leaves(batches)[0])
    if microbatches == 1:
        batch = jax.tree.map(lambda x: x[0], batches)
        (total, (state, extra, out)), gradients = loss_and_gradient(params, state, batch)
        return Accumulated(total, gradients, state, jax.tree.map(lambda e: e[None], extra), out)
    start = (jax.tree.map(jnp.zeros_like, params), state)
    (gradients, state), (shares, extras, outs) = jax.lax.scan(one, start, batches)
    extra, out = over_first_dim((extras, outs))
    return Accumulated(shares.sum(), gradients, state, jax.tree.map(lambda e: e[None], extra), out)
