"""Runs a schedule: one program for all ranks, a scan over ticks.

The model comes in three differentiable parts:

    enter(params, state, batch) -> (x, side, state)   embeddings; by all ranks together, for the first stage
    stage(params, chunk, x, batch) -> (x, extra)      the layers of one stage, on the rank that holds them
    leave(params, x, side, batch) -> (share, out)     the objective; by all ranks together, of the last stage

side: what goes past the stages, from enter to leave of a microbatch; a tree, which may be empty.

In a tick a rank does these in order, each if the schedule says so: enter, stage forward, leave with its
gradient, stage backward (which computes the stage again from its input), the gradient of enter. What all
ranks do together sits in branches that all take alike. Stages of one program run in such branches too, so
that collectives may name any rank; where stages differ a rank skips its idle turns.

Gradients are of the sum of all ranks' shares (see parallel/tensor.py for the convention), for the parameters
that the parts are given: where a part has none (all None), nothing is computed for them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.schedule import Schedule, Work
from jaxthd.parallel.stages import Stages

Tree = Any


class Parts(NamedTuple):
    """The model for one microbatch. `stage` gets its stage's pattern first.

    uniform_program: all ranks run one stage program, at the same time.
    """

    enter: Callable[[Tree, Tree, Tree], tuple[Array, Tree, Tree]]
    stage: Callable[[str, Tree, Array | int, Array, Tree], tuple[Array, Tree]]
    leave: Callable[[Tree, Array, Tree, Tree], tuple[Array, Tree]]
    stages: Stages
    uniform_program: bool


class Params(NamedTuple):
    """The parameters of the three parts."""

    enter: Tree
    stage: Tree
    leave: Tree


class Step(NamedTuple):
    """share: this rank's, over all microbatches, that of the stages' second results (extra_share) included.
    state: after the last microbatch. extra: the second results, leaves [chunks, ...], summed over
    microbatches. out: leave's second result, summed over microbatches.
    """

    share: Array
    gradients: Params
    state: Tree
    extra: Tree
    out: Tree


def accumulate(
    parts: Parts,
    schedule: Schedule,
    params: Params,
    state: Tree,
    batches: Tree,
    extra_share: Callable[[Tree], Array],
) -> Step:
    """Loss shares and gradients of a step. batches: leaves [microbatches, ...].

    extra_share: what a stage's second result adds to the rank's share of the objective.
    """
    if schedule.ranks * schedule.chunks == 1:
        return _one_stage(parts, params, state, batches, extra_share)
    run = _Run(parts, schedule, params, batches)
    first = run.batch(0)
    x_like, side_like, extra_like = run.shapes(state, first)
    zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    rank, in_flight = run.rank, schedule.in_flight

    def add(totals: Tree, more: Tree) -> Tree:
        return jax.tree.map(jnp.add, totals, more)

    def put(sides: Tree, micro: Array, side: Tree) -> Tree:
        place = jnp.where(micro >= 0, micro % in_flight, in_flight)
        return jax.tree.map(lambda all_, s: all_.at[place].set(s, mode="drop"), sides, side)

    def taken(sides: Tree, micro: Array) -> Tree:
        return jax.tree.map(lambda all_: all_[micro % in_flight], sides)

    def tick(carry: Any, at: Any) -> tuple[Any, None]:
        saved, sides, arrived, returned, gradients, state, share, extras, outs = carry
        forward, backward, busy_f, busy_b, entering, leaving, going_back = at
        x, side, state = run.enter_if(entering, state, (x_like, side_like))
        sides = put(sides, entering, side)
        f_micro, f_chunk, f_slot = (w[rank] for w in forward)
        is_first = (rank == 0) & (f_chunk == 0)
        x = jnp.where(is_first, x, arrived)
        slot = jnp.where(f_micro >= 0, f_slot, len(saved))
        saved = saved.at[slot].set(x, mode="drop")
        y, extra = run.stage_if(busy_f, f_micro, f_chunk, x, (x_like, extra_like))
        share += jnp.where(f_micro >= 0, extra_share(extra), 0)
        extra = jax.tree.map(lambda e: jnp.where(f_micro >= 0, e, 0), extra)
        extras = jax.tree.map(lambda all_, e: all_.at[f_chunk].add(e, mode="drop"), extras, extra)

        is_last = (rank == schedule.ranks - 1) & (f_chunk == schedule.chunks - 1)
        y_out = jnp.where(is_last, y, 0)
        more, out, dleave, dy, dside = run.leave_gradient_if(leaving, y_out, taken(sides, leaving))
        share, outs = share + more, add(outs, out)
        # From here to the microbatch's way back, the gradient of what went past.
        sides = put(sides, leaving, dside)

        b_micro, b_chunk, b_slot = (w[rank] for w in backward)
        is_last = (rank == schedule.ranks - 1) & (b_chunk == schedule.chunks - 1)
        dy = jnp.where(is_last, dy, returned)
        x = saved[jnp.maximum(b_slot, 0)]
        dstage, dx = run.stage_gradient_if(busy_b, b_micro, b_chunk, x, dy, extra_share)
        is_first = (rank == 0) & (b_chunk == 0)
        dx_in = jnp.where(is_first, dx, 0)
        denter = run.enter_gradient_if(going_back, state, dx_in, taken(sides, going_back))
        gradients = Params(
            add(gradients.enter, denter), add(gradients.stage, dstage), add(gradients.leave, dleave)
        )
        arrived, returned = run.send(y, 1), run.send(dx, -1)
        return (saved, sides, arrived, returned, gradients, state, share, extras, outs), None

    share_like, out_like = jax.eval_shape(partial(parts.leave, params.leave), x_like, side_like, first)
    start = (
        jnp.zeros((schedule.slots, *x_like.shape), x_like.dtype),
        jax.tree.map(lambda s: jnp.zeros((in_flight, *s.shape), s.dtype), side_like),
        zeros(x_like),
        zeros(x_like),
        jax.tree.map(jnp.zeros_like, params),
        state,
        zeros(share_like),
        jax.tree.map(lambda e: jnp.zeros((schedule.chunks, *e.shape), e.dtype), extra_like),
        zeros(out_like),
    )
    (*_, gradients, state, share, extras, outs), _ = jax.lax.scan(tick, start, _tables(schedule))
    return Step(share, gradients, state, extras, outs)


def score(parts: Parts, schedule: Schedule, params: Params, state: Tree, batches: Tree) -> Tree:
    """leave's second result for every microbatch, leaves [microbatches, ...], on all ranks: forward only.

    schedule: made with backward=False. Nothing goes past the stages: leave gets None.
    """
    run = _Run(parts, schedule, params, batches)
    first = run.batch(0)
    x_like, side_like, extra_like = run.shapes(state, first)
    out_like = jax.eval_shape(lambda x: parts.leave(params.leave, x, None, first)[1], x_like)

    def tick(carry: Any, at: Any) -> tuple[Any, None]:
        arrived, outs = carry
        forward, _, busy, _, entering, leaving, _ = at
        x, *_ = run.enter_if(entering, state, (x_like, side_like))
        micro, chunk, _ = (w[run.rank] for w in forward)
        x = jnp.where((run.rank == 0) & (chunk == 0), x, arrived)
        y, _ = run.stage_if(busy, micro, chunk, x, (x_like, extra_like))
        is_last = (run.rank == schedule.ranks - 1) & (chunk == schedule.chunks - 1)
        out = run.leave_if(leaving, jnp.where(is_last, y, 0), out_like)
        where = jnp.where(leaving >= 0, leaving, schedule.microbatches)
        outs = jax.tree.map(lambda all_, o: all_.at[where].set(o, mode="drop"), outs, out)
        return (run.send(y, 1), outs), None

    outs = jax.tree.map(lambda o: jnp.zeros((schedule.microbatches, *o.shape), o.dtype), out_like)
    start = (jnp.zeros(x_like.shape, x_like.dtype), outs)
    (_, outs), _ = jax.lax.scan(tick, start, _tables(schedule))
    return outs


def _one_stage(
    parts: Parts,
    params: Params,
    state: Tree,
    batches: Tree,
    extra_share: Callable[[Tree], Array],
) -> Step:
    """Plain gradient accumulation: nothing is computed twice but what remat asks for."""

    def share(params: Params, state: Tree, batch: Tree) -> tuple[Array, tuple[Tree, Tree, Tree]]:
        x, side, state = parts.enter(params.enter, state, batch)
        x, extra = parts.stage(parts.stages.patterns[0], params.stage, 0, x, batch)
        own, out = parts.leave(params.leave, x, side, batch)
        return own + extra_share(extra), (state, extra, out)

    share_and_gradient = jax.value_and_grad(share, has_aux=True)

    def one(carry: tuple[Params, Tree], batch: Tree) -> tuple[tuple[Params, Tree], tuple[Array, Tree, Tree]]:
        total, state = carry
        (share, (state, extra, out)), gradients = share_and_gradient(params, state, batch)
        return (jax.tree.map(jnp.add, total, gradients), state), (share, extra, out)

    microbatches = len(jax.tree.leaves(batches)[0])
    if microbatches == 1:
        (total, (state, extra, out)), gradients = share_and_gradient(
            params, state, jax.tree.map(lambda x: x[0], batches)
        )
        return Step(total, gradients, state, jax.tree.map(lambda e: e[None], extra), out)
    start = (jax.tree.map(jnp.zeros_like, params), state)
    (gradients, state), (shares, extras, outs) = jax.lax.scan(one, start, batches)
    extra, out = jax.tree.map(lambda x: x.sum(0), (extras, outs))
    return Step(shares.sum(), gradients, state, jax.tree.map(lambda e: e[None], extra), out)


def _tables(schedule: Schedule) -> Any:
    def work(w: Work) -> Work:
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), w)

    ticks = (
        schedule.forward.busy,
        schedule.backward.busy,
        schedule.enter,
        schedule.leave,
        schedule.back,
    )
    return work(schedule.forward), work(schedule.backward), *(jnp.asarray(x, jnp.int32) for x in ticks)


class _Run:
    """The parts, each behind the schedule's decision whether it runs in this tick."""

    def __init__(self, parts: Parts, schedule: Schedule, params: Params, batches: Tree) -> None:
        self._parts, self._params, self._batches = parts, params, batches
        self._ranks = schedule.ranks
        self.rank: Array | int = jax.lax.axis_index(PIPELINE) if schedule.ranks > 1 else 0

    def send(self, x: Array, distance: int) -> Array:
        """To the rank so far on, around the ring; what arrives."""
        if self._ranks == 1:
            return x
        moves = [(r, (r + distance) % self._ranks) for r in range(self._ranks)]
        return jax.lax.ppermute(x, PIPELINE, moves)

    def batch(self, micro: Array | int) -> Tree:
        return jax.tree.map(lambda x: x[jnp.maximum(micro, 0)], self._batches)

    def shapes(self, state: Tree, batch: Tree) -> tuple[Any, Any, Any]:
        """Of what goes from stage to stage, past them, and of a stage's second result."""
        x_like, side_like, _ = jax.eval_shape(self._parts.enter, self._params.enter, state, batch)
        stage = partial(self._parts.stage, self._parts.stages.patterns[0], self._params.stage, 0)
        return x_like, side_like, jax.eval_shape(stage, x_like, batch)[1]

    @jax.named_scope("enter")
    def enter_if(self, micro: Array, state: Tree, like: Any) -> tuple[Array, Tree, Tree]:
        """like: of what goes into the stages, and past them."""

        def run() -> tuple[Array, Tree, Tree]:
            return self._parts.enter(self._params.enter, state, self.batch(micro))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return jax.lax.cond(micro >= 0, run, lambda: (*zeros, state))

    @jax.named_scope("enter_gradient")
    def enter_gradient_if(self, micro: Array, state: Tree, dx: Array, dside: Tree) -> Tree:
        if not jax.tree.leaves(self._params.enter):
            return self._params.enter

        def run() -> Tree:
            def enter(params: Tree) -> tuple[Array, Tree]:
                return self._parts.enter(params, state, self.batch(micro))[:2]

            return jax.vjp(enter, self._params.enter)[1]((dx, dside))[0]

        return jax.lax.cond(micro >= 0, run, lambda: jax.tree.map(jnp.zeros_like, self._params.enter))

    def _if_busy(self, busy: Array, micro: Array, run: Callable[[], Tree], idle: Callable[[], Tree]) -> Tree:
        """Ranks in lockstep all run, or none; what an idle one computes is not used."""
        return jax.lax.cond(busy > 0 if self._parts.uniform_program else micro >= 0, run, idle)

    @jax.named_scope("stage")
    def stage_if(self, busy: Array, micro: Array, chunk: Array, x: Array, like: Any) -> tuple[Array, Tree]:
        chunk = jnp.maximum(chunk, 0)

        def run() -> tuple[Array, Tree]:
            def stage(pattern: str) -> tuple[Array, Tree]:
                return self._parts.stage(pattern, self._params.stage, chunk, x, self.batch(micro))

            return self._parts.stages.switch(stage, chunk)

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
        return self._if_busy(busy, micro, run, lambda: zeros)

    @jax.named_scope("stage_gradient")
    def stage_gradient_if(
        self,
        busy: Array,
        micro: Array,
        chunk: Array,
        x: Array,
        dy: Array,
        extra_share: Callable[[Tree], Array],
    ) -> tuple[Tree, Array]:
        """(gradients of the parameters, of the input); 0 where the rank idles."""
        chunk = jnp.maximum(chunk, 0)

        def run() -> tuple[Tree, Array]:
            def gradient(pattern: str) -> tuple[Tree, Array]:
                def stage(params: Tree, x: Array) -> tuple[Array, Array]:
                    y, extra = self._parts.stage(pattern, params, chunk, x, self.batch(micro))
                    return y, jnp.asarray(extra_share(extra), y.dtype)

                (_, more), pull = jax.vjp(stage, self._params.stage, x)
                return pull((dy, jnp.ones_like(more)))

            found = self._parts.stages.switch(gradient, chunk)
            return jax.tree.map(lambda g: jnp.where(micro >= 0, g, 0), found)

        def idle() -> tuple[Tree, Array]:
            return jax.tree.map(jnp.zeros_like, self._params.stage), jnp.zeros_like(x)

        return self._if_busy(busy, micro, run, idle)

    def leave_if(self, micro: Array, y: Array, out_like: Any) -> Tree:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out_like)
        run = partial(self._parts.leave, self._params.leave)
        return jax.lax.cond(micro >= 0, lambda: run(y, None, self.batch(micro))[1], lambda: zeros)

    @jax.named_scope("leave_gradient")
    def leave_gradient_if(self, micro: Array, y: Array, side: Tree) -> tuple[Array, Tree, Tree, Array, Tree]:
        """(this rank's share, leave's second result, gradients of the parameters, of y, of side)."""

        def run() -> tuple[Array, Tree, Tree, Array, Tree]:
            def leave(params: Tree, y: Array, side: Tree) -> tuple[Array, Tree]:
                return self._parts.leave(params, y, side, self.batch(micro))

            share, pull, out = jax.vjp(leave, self._params.leave, y, side, has_aux=True)
            return share, out, *pull(jnp.ones_like(share))

        def idle() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))

        return jax.lax.cond(micro >= 0, run, idle)
