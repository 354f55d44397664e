"""One tick of a rank in a pipeline schedule (parallel/schedule.py).

A tick has five parts, in this order, each of which runs only where the schedule asks for it: enter; a stage's
forward pass; leave and its gradient; a stage's backward pass; the gradient of enter. What backward passes
need of forward passes is kept in slots (parallel/stage_passes.py says what that is).

All ranks compute enter and leave together, so all take the same branch there. An idle rank skips its stage.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.pipeline_model import PipelinedModel, PipelinedParams, Tree
from jaxthd.parallel.schedule import Schedule, Tick, Work
from jaxthd.parallel.stage_passes import EnterPasses, StagePasses


class Carry(NamedTuple):
    """State of a rank between two ticks.

    kept: of its stages' forward passes for their backward passes, leaves [slots, ...].
    entered: of `enter` for its gradient, leaves [in flight, ...].
    bypass: one slot for each microbatch in flight, leaves [in flight, ...]. Until the microbatch leaves, its
        slot holds the bypass; after that, the bypass's gradient. The two are never needed at the same time.
    arrived: the activations that the previous rank has sent.
    returned: the gradient that the next rank has sent.
    The other fields are those of Accumulated, as accumulated so far.
    """

    kept: Tree
    entered: Tree
    bypass: Tree
    arrived: Array
    returned: Array
    gradients: PipelinedParams
    state: Tree
    share: Array
    extra: Tree
    out: Tree


class Largest(NamedTuple):
    """Numbers of at least 0, by name, of which `add` keeps the larger in the place of the sum."""

    numbers: dict[str, Array]


def _is_largest(x: Any) -> bool:
    return isinstance(x, Largest)


def add(total: Tree, more: Tree) -> Tree:
    """Sums of the leaves; of what is Largest, the larger."""

    def added(x: Any, y: Any) -> Any:
        """The sum of two leaves, or the larger of two Largest."""
        return jax.tree.map(jnp.maximum, x, y) if _is_largest(x) else jnp.add(x, y)

    return jax.tree.map(added, total, more, is_leaf=_is_largest)


def over_first_dim(trees: Tree) -> Tree:
    """The trees along the leaves' first dim, added up by `add`."""

    def over(x: Any) -> Any:
        """The sum over the first dim, or the largest along it."""
        return jax.tree.map(lambda each: each.max(0), x) if _is_largest(x) else x.sum(0)

    return jax.tree.map(over, trees, is_leaf=_is_largest)


def zeros(like: Tree) -> Tree:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def slots_of(count: int, like: Tree) -> Tree:
    """Zeros with room for `count` trees like this one: leaves [count, ...]."""
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)


class RankTick:
    """The parts of a tick on one rank. Each runs only where the schedule asks for it.

    x_like: the shape and dtype of a stage's input.
    bypass_like, extra_like: shapes and dtypes of the bypass, and of a stage's second result.
    """

    def __init__(
        self,
        model: PipelinedModel,
        schedule: Schedule,
        params: PipelinedParams,
        state: Tree,
        batches: Tree,
        extra_share: Callable[[Tree], Array] = lambda extra: jnp.zeros(()),
    ) -> None:
        self._model, self._schedule, self._params, self._batches = model, schedule, params, batches
        self._state, self._extra_share = state, extra_share
        self.rank: Array | int = jax.lax.axis_index(PIPELINE) if schedule.ranks > 1 else 0
        first = self.batch(0)
        self.x_like, self.bypass_like, _ = jax.eval_shape(partial(model.enter, params.enter), state, first)
        stage = partial(model.stage, model.stages.patterns[0], params.stage, 0)
        self.extra_like: Tree = jax.eval_shape(stage, self.x_like, first)[1]

    @cached_property
    def _passes(self) -> StagePasses:
        return StagePasses(self._model, self._params.stage, self.x_like, self.batch(0), self._extra_share)

    @cached_property
    def _entering(self) -> EnterPasses:
        return EnterPasses(self._model, self._params.enter, self._state, self.batch(0))

    def batch(self, micro: Array | int) -> Tree:
        """The arrays of a microbatch; of the first one for -1."""
        return jax.tree.map(lambda x: x[jnp.maximum(micro, 0)], self._batches)

    def is_first(self, chunk: Array) -> Array:
        """Whether this rank's chunk is the first of all stages."""
        return (self.rank == 0) & (chunk == 0)

    def is_last(self, chunk: Array) -> Array:
        """Whether this rank's chunk is the last of all stages."""
        return (self.rank == self._schedule.ranks - 1) & (chunk == self._schedule.chunks - 1)

    def send(self, x: Array, distance: int) -> Array:
        """Sends x `distance` ranks further around the ring; returns what arrives here."""
        ranks = self._schedule.ranks
        if ranks == 1:
            return x
        return jax.lax.ppermute(x, PIPELINE, [(r, (r + distance) % ranks) for r in range(ranks)])

    # --- the parts of a tick ---

    def start(self) -> Carry:
        """The carry before the first tick."""
        schedule = self._schedule
        share, out = jax.eval_shape(
            partial(self._model.leave, self._params.leave), self.x_like, self.bypass_like, self.batch(0)
        )
        return Carry(
            kept=slots_of(schedule.slots, self._passes.like),
            entered=slots_of(schedule.in_flight, self._entering.like),
            bypass=slots_of(schedule.in_flight, self.bypass_like),
            arrived=zeros(self.x_like),
            returned=zeros(self.x_like),
            gradients=jax.tree.map(jnp.zeros_like, self._params),
            state=self._state,
            share=zeros(share),
            extra=slots_of(schedule.chunks, self.extra_like),
            out=zeros(out),
        )

    def forward(self, carry: Carry, at: Tick) -> tuple[Carry, Array]:
        """Runs enter and a stage's forward pass. Also returns the stage's output."""
        x, bypass, state, entered = self.enter_if(at.enter, carry.state, keeps=True)
        bypass = self._put(carry.bypass, at.enter, bypass)
        entered = self._put(carry.entered, at.enter, entered)
        micro, chunk, slot = at.forward
        x = jnp.where(self.is_first(chunk), x, carry.arrived)
        y, extra, kept = self.stage_if(at.forward, x, keeps=True)
        slot = jnp.where(micro >= 0, slot, self._schedule.slots)
        kept = jax.tree.map(lambda all_, k: all_.at[slot].set(k, mode="drop"), carry.kept, kept)
        share = carry.share + jnp.where(micro >= 0, self._extra_share(extra), 0)
        extra = jax.tree.map(lambda e: jnp.where(micro >= 0, e, 0), extra)
        extra = jax.tree.map(lambda all_, e: all_.at[chunk].add(e, mode="drop"), carry.extra, extra)
        carry = carry._replace(kept=kept, entered=entered, bypass=bypass)
        return carry._replace(state=state, share=share, extra=extra), y

    def leave(self, carry: Carry, at: Tick, y: Array) -> tuple[Carry, Tree, Array]:
        """Runs leave and its gradient. Also returns the gradients of leave's parameters and of y."""
        y = jnp.where(self.is_last(at.forward.chunk), y, 0)
        bypass = self._taken(carry.bypass, at.leave)
        share, out, dleave, dy, dbypass = self._leave_gradient_if(at.leave, y, bypass)
        share, out = carry.share + share, add(carry.out, out)
        bypass = self._put(carry.bypass, at.leave, dbypass)
        return carry._replace(bypass=bypass, share=share, out=out), dleave, dy

    @jax.named_scope("stage_gradient")
    def backward(self, carry: Carry, at: Tick, dy: Array) -> tuple[Tree, Array]:
        """A stage's backward pass: the gradients of its parameters and of its input; 0 where the rank idles.

        dy: the gradient of the last stage's output, which only the last stage uses.
        """
        micro, chunk, slot = at.backward
        dy = jnp.where(self.is_last(chunk), dy, carry.returned)
        kept = jax.tree.map(lambda all_: all_[jnp.maximum(slot, 0)], carry.kept)
        return _if(
            micro >= 0,
            lambda: self._passes.backward(jnp.maximum(chunk, 0), kept, dy, self.batch(micro)),
            (self._params.stage, dy),
        )

    @jax.named_scope("enter_gradient")
    def enter_gradient(self, carry: Carry, at: Tick, dx: Array) -> Tree:
        """The gradient of enter's parameters. dx: the gradient of the input of this rank's stage."""
        if not jax.tree.leaves(self._params.enter):
            return self._params.enter
        dx = jnp.where(self.is_first(at.backward.chunk), dx, 0)
        entered, dbypass = self._taken(carry.entered, at.back), self._taken(carry.bypass, at.back)
        return _if(
            at.back >= 0,
            lambda: self._entering.gradient(entered, dx, dbypass, self.batch(at.back)),
            self._params.enter,
        )

    def _put(self, slots: Tree, micro: Array, found: Tree) -> Tree:
        """Puts what belongs to a microbatch in flight into its slot; -1 for none."""
        in_flight = self._schedule.in_flight
        slot = jnp.where(micro >= 0, micro % in_flight, in_flight)
        return jax.tree.map(lambda all_, b: all_.at[slot].set(b, mode="drop"), slots, found)

    def _taken(self, slots: Tree, micro: Array) -> Tree:
        return jax.tree.map(lambda all_: all_[micro % self._schedule.in_flight], slots)

    # --- the three functions, which run where the schedule asks for them and give zeros elsewhere ---

    @jax.named_scope("enter")
    def enter_if(self, micro: Array, state: Tree, *, keeps: bool) -> tuple[Array, Tree, Tree, Tree]:
        """The results of enter, and what is kept for its gradient; () without `keeps`."""

        def run() -> tuple[Array, Tree, Tree, Tree]:
            """Runs enter for the microbatch."""
            if keeps:
                return self._entering.forward(state, self.batch(micro))
            return *self._model.enter(self._params.enter, state, self.batch(micro)), ()

        x, bypass, entered = zeros((self.x_like, self.bypass_like, self._entering.like if keeps else ()))
        found: tuple[Array, Tree, Tree, Tree]
        found = jax.lax.cond(micro >= 0, run, lambda: (x, bypass, state, entered))
        return found

    @jax.named_scope("stage")
    def stage_if(self, forward: Work, x: Array, *, keeps: bool) -> tuple[Array, Tree, Tree]:
        """The results of a stage, and what is kept for its backward pass; () without `keeps`."""
        micro, chunk = forward.microbatch, jnp.maximum(forward.chunk, 0)

        def run() -> tuple[Array, Tree, Tree]:
            """Runs the stage of the rank's chunk."""

            def stage(pattern: str) -> tuple[Array, Tree]:
                """The stage's results, where nothing is kept."""
                return self._model.stage(pattern, self._params.stage, chunk, x, self.batch(micro))

            if keeps:
                return self._passes.forward(chunk, x, self.batch(micro))
            return *self._model.stages.switch(stage, chunk), ()

        found: tuple[Array, Tree, Tree]
        found = _if(micro >= 0, run, (self.x_like, self.extra_like, self._passes.like if keeps else ()))
        return found

    def leave_if(self, micro: Array, y: Array, out_like: Tree) -> Tree:
        """The second result of leave, of this shape."""
        return _if(
            micro >= 0, lambda: self._model.leave(self._params.leave, y, None, self.batch(micro))[1], out_like
        )

    @jax.named_scope("leave_gradient")
    def _leave_gradient_if(self, micro: Array, y: Array, bypass: Tree) -> Any:
        """This rank's share, leave's second result, and the gradients of leave's parameters, y and bypass."""

        def run() -> tuple[Array, Tree, Tree, Array, Tree]:
            """Runs leave and its gradient for the microbatch."""

            def leave(params: Tree, y: Array, bypass: Tree) -> tuple[Array, Tree]:
                """(share, out), to be differentiated."""
                return self._model.leave(params, y, bypass, self.batch(micro))

            share, pull, out = jax.vjp(leave, self._params.leave, y, bypass, has_aux=True)
            return share, out, *pull(jnp.ones_like(share))

        return _if(micro >= 0, run, jax.eval_shape(run))


def _if(runs: Array, run: Callable[[], Any], like: Tree) -> Any:
    """The result of `run`, or zeros of the shapes of `like`."""
    return jax.lax.cond(runs, run, lambda: zeros(like))
