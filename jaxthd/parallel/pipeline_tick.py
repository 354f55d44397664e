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
import numpy as np
from jax import Array

from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.pipeline_model import PipelinedModel, PipelinedParams, Tree
from jaxthd.parallel.schedule import Schedule
from jaxthd.parallel.stage_passes import EnterPasses, StagePasses


class Pass(NamedTuple):
    """A forward or backward pass of a stage: arrays [ranks], or scalars for one rank; -1 where a rank idles.

    slot: where what the stage keeps lies from its forward pass to its backward pass.
    """

    microbatch: Array
    chunk: Array
    slot: Array


class Tick(NamedTuple):
    """One tick of the schedule.

    enter, leave, back: the microbatch that enters the first stage, leaves the last stage, or finishes its
        backward pass through the first stage; -1 for none.
    """

    forward: Pass
    backward: Pass
    enter: Array
    leave: Array
    back: Array

    @classmethod
    def all_of(cls, schedule: Schedule) -> "Tick":
        """Every tick of the schedule, for a scan over the first dim of the leaves."""
        forward, backward = schedule.forward, schedule.backward

        def table(x: np.ndarray) -> Array:
            return jnp.asarray(x, jnp.int32)

        return cls(
            forward=Pass(*map(table, forward)),
            backward=Pass(*map(table, backward)),
            enter=table(schedule.enter),
            leave=table(schedule.leave),
            back=table(schedule.back),
        )

    def on(self, rank: Array | int) -> "Tick":
        """This tick with the passes of one rank only."""
        forward, backward = (Pass(*(x[rank] for x in of_all)) for of_all in (self.forward, self.backward))
        return self._replace(forward=forward, backward=backward)


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
    def added(x: Any, y: Any) -> Any:
        return jax.tree.map(jnp.maximum, x, y) if _is_largest(x) else jnp.add(x, y)

    return jax.tree.map(added, total, more, is_leaf=_is_largest)


def over_first_dim(trees: Tree) -> Tree:
    """The trees along the leaves' first dim, added up by `add`."""

    def over(x: Any) -> Any:
        return jax.tree.map(lambda each: each.max(0), x) if _is_largest(x) else x.sum(0)

    return jax.tree.map(over, trees, is_leaf=_is_largest)


def zeros(like: Tree) -> Tree:
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
        return jax.tree.map(lambda x: x[jnp.maximum(micro, 0)], self._batches)

    def is_first(self, chunk: Array) -> Array:
        """Whether this rank's chunk is the first of all stages."""
        return (self.rank == 0) & (chunk == 0)

    def is_last(self, chunk: Array) -> Array:
        return (self.rank == self._schedule.ranks - 1) & (chunk == self._schedule.chunks - 1)

    def send(self, x: Array, distance: int) -> Array:
        """Sends x `distance` ranks further around the ring; returns what arrives here."""
        ranks = self._schedule.ranks
        if ranks == 1:
            return x
        return jax.lax.ppermute(x, PIPELINE, [(r, (r + distance) % ranks) for r in range(ranks)])

    # --- the parts of a tick ---

    def start(self) -> Carry:
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
        x, bypass, state, entered = self._enter_if(at.enter, carry.state)
        bypass = self._put(carry.bypass, at.enter, bypass)
        entered = self._put(carry.entered, at.enter, entered)
        micro, chunk, slot = at.forward
        x = jnp.where(self.is_first(chunk), x, carry.arrived)
        y, extra, kept = self._stage_if(at.forward, x)
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
        share, out, dleave, dy, dbypass = self.leave_gradient_if(at.leave, y, bypass)
        share, out = carry.share + share, add(carry.out, out)
        bypass = self._put(carry.bypass, at.leave, dbypass)
        return carry._replace(bypass=bypass, share=share, out=out), dleave, dy

    def backward(self, carry: Carry, at: Tick, dy: Array) -> tuple[Tree, Array]:
        """A stage's backward pass: the gradients of its parameters and of its input.

        dy: the gradient of the last stage's output, which only the last stage uses.
        """
        dy = jnp.where(self.is_last(at.backward.chunk), dy, carry.returned)
        kept = jax.tree.map(lambda all_: all_[jnp.maximum(at.backward.slot, 0)], carry.kept)
        return self._stage_gradient_if(at.backward, kept, dy)

    def enter_gradient(self, carry: Carry, at: Tick, dx: Array) -> Tree:
        """The gradient of enter's parameters. dx: the gradient of the input of this rank's stage."""
        dx = jnp.where(self.is_first(at.backward.chunk), dx, 0)
        return self._enter_gradient_if(carry, at.back, dx)

    def _put(self, slots: Tree, micro: Array, found: Tree) -> Tree:
        """Puts what belongs to a microbatch in flight into its slot; -1 for none."""
        in_flight = self._schedule.in_flight
        slot = jnp.where(micro >= 0, micro % in_flight, in_flight)
        return jax.tree.map(lambda all_, b: all_.at[slot].set(b, mode="drop"), slots, found)

    def _taken(self, slots: Tree, micro: Array) -> Tree:
        return jax.tree.map(lambda all_: all_[micro % self._schedule.in_flight], slots)

    # --- the three functions, which run where the schedule asks for them and give zeros elsewhere ---

    @jax.named_scope("enter")
    def enter_if(self, micro: Array, state: Tree) -> tuple[Array, Tree, Tree]:
        def run() -> tuple[Array, Tree, Tree]:
            return self._model.enter(self._params.enter, state, self.batch(micro))

        idle = zeros((self.x_like, self.bypass_like))
        return jax.lax.cond(micro >= 0, run, lambda: (*idle, state))

    @jax.named_scope("enter")
    def _enter_if(self, micro: Array, state: Tree) -> tuple[Array, Tree, Tree, Tree]:
        """As enter_if, and what is kept for the gradient."""

        def run() -> tuple[Array, Tree, Tree, Tree]:
            return self._entering.forward(state, self.batch(micro))

        def idle() -> tuple[Array, Tree, Tree, Tree]:
            x, bypass, entered = zeros((self.x_like, self.bypass_like, self._entering.like))
            return x, bypass, state, entered

        found: tuple[Array, Tree, Tree, Tree] = jax.lax.cond(micro >= 0, run, idle)
        return found

    @jax.named_scope("enter_gradient")
    def _enter_gradient_if(self, carry: Carry, micro: Array, dx: Array) -> Tree:
        if not jax.tree.leaves(self._params.enter):
            return self._params.enter
        entered, dbypass = self._taken(carry.entered, micro), self._taken(carry.bypass, micro)

        def run() -> Tree:
            return self._entering.gradient(entered, dx, dbypass, self.batch(micro))

        return jax.lax.cond(micro >= 0, run, lambda: jax.tree.map(jnp.zeros_like, self._params.enter))

    @jax.named_scope("stage")
    def stage_if(self, forward: Pass, x: Array) -> tuple[Array, Tree]:
        micro, chunk = forward.microbatch, jnp.maximum(forward.chunk, 0)

        def run() -> tuple[Array, Tree]:
            def stage(pattern: str) -> tuple[Array, Tree]:
                return self._model.stage(pattern, self._params.stage, chunk, x, self.batch(micro))

            return self._model.stages.switch(stage, chunk)

        idle = zeros((self.x_like, self.extra_like))
        return jax.lax.cond(micro >= 0, run, lambda: idle)

    @jax.named_scope("stage")
    def _stage_if(self, forward: Pass, x: Array) -> tuple[Array, Tree, Tree]:
        """As stage_if, and what is kept for the backward pass."""
        micro, chunk = forward.microbatch, jnp.maximum(forward.chunk, 0)

        def run() -> tuple[Array, Tree, Tree]:
            return self._passes.forward(chunk, x, self.batch(micro))

        idle = zeros((self.x_like, self.extra_like, self._passes.like))
        found: tuple[Array, Tree, Tree] = jax.lax.cond(micro >= 0, run, lambda: idle)
        return found

    @jax.named_scope("stage_gradient")
    def _stage_gradient_if(self, backward: Pass, kept: Tree, dy: Array) -> tuple[Tree, Array]:
        """The gradients of the parameters and of the input; 0 where the rank idles."""
        micro, chunk = backward.microbatch, jnp.maximum(backward.chunk, 0)

        def run() -> tuple[Tree, Array]:
            return self._passes.backward(chunk, kept, dy, self.batch(micro))

        def idle() -> tuple[Tree, Array]:
            return jax.tree.map(jnp.zeros_like, self._params.stage), jnp.zeros_like(dy)

        return jax.lax.cond(micro >= 0, run, idle)

    def leave_if(self, micro: Array, y: Array, out_like: Tree) -> Tree:
        idle = zeros(out_like)

        def run() -> Tree:
            return self._model.leave(self._params.leave, y, None, self.batch(micro))[1]

        return jax.lax.cond(micro >= 0, run, lambda: idle)

    @jax.named_scope("leave_gradient")
    def leave_gradient_if(
        self, micro: Array, y: Array, bypass: Tree
    ) -> tuple[Array, Tree, Tree, Array, Tree]:
        """This rank's share, leave's second result, and the gradients of leave's parameters, y and bypass."""

        def run() -> tuple[Array, Tree, Tree, Array, Tree]:
            def leave(params: Tree, y: Array, bypass: Tree) -> tuple[Array, Tree]:
                return self._model.leave(params, y, bypass, self.batch(micro))

            share, pull, out = jax.vjp(leave, self._params.leave, y, bypass, has_aux=True)
            return share, out, *pull(jnp.ones_like(share))

        def idle() -> Any:
            return zeros(jax.eval_shape(run))

        return jax.lax.cond(micro >= 0, run, idle)
