"""One tick of a rank in a pipeline schedule (parallel/schedule.py).

A tick has five parts, in this order, each of which runs only where the schedule asks for it: embed; a stage's
forward pass; head and its gradient; a stage's backward pass; the gradient of embed. What backward passes
need of forward passes is kept in slots (parallel/stage_passes.py says what that is).

All ranks compute embed and head together, so all take the same branch there. An idle rank skips its stage.
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
from jaxthd.parallel.stage_passes import EmbedPasses, StagePasses


class Carry(NamedTuple):
    """State of a rank between two ticks.

    kept: of its stages' forward passes for their backward passes, leaves [slots, ...].
    embed_kept: of `embed` for its gradient, leaves [in flight, ...].
    skip: one slot for each microbatch in flight, leaves [in flight, ...]. Until the microbatch's head, its
        slot holds the skip state; after that, its gradient. The two are never needed at the same time.
    arrived: the activations that the previous rank has sent.
    returned: the gradient that the next rank has sent.
    The other fields are those of Accumulated, as accumulated so far.
    """

    kept: Tree
    embed_kept: Tree
    skip: Tree
    arrived: Array
    returned: Array
    gradients: PipelinedParams
    state: Tree
    local_loss: Array
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
    skip_like, extra_like: shapes and dtypes of the skip state, and of a stage's second result.
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
        self.x_like, self.skip_like, _ = jax.eval_shape(partial(model.embed, params.embed), state, first)
        stage = partial(model.stage, model.stages.patterns[0], params.stage, 0)
        self.extra_like: Tree = jax.eval_shape(stage, self.x_like, first)[1]

    @cached_property
    def _passes(self) -> StagePasses:
        return StagePasses(self._model, self._params.stage, self.x_like, self.batch(0), self._extra_share)

    @cached_property
    def _embedding(self) -> EmbedPasses:
        return EmbedPasses(self._model, self._params.embed, self._state, self.batch(0))

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
        local_loss, out = jax.eval_shape(
            partial(self._model.head, self._params.head), self.x_like, self.skip_like, self.batch(0)
        )
        return Carry(
            kept=slots_of(schedule.slots, self._passes.like),
            embed_kept=slots_of(schedule.in_flight, self._embedding.like),
            skip=slots_of(schedule.in_flight, self.skip_like),
            arrived=zeros(self.x_like),
            returned=zeros(self.x_like),
            gradients=jax.tree.map(jnp.zeros_like, self._params),
            state=self._state,
            local_loss=zeros(local_loss),
            extra=slots_of(schedule.chunks, self.extra_like),
            out=zeros(out),
        )

    def forward(self, carry: Carry, at: Tick) -> tuple[Carry, Array]:
        """Runs embed and a stage's forward pass. Also returns the stage's output."""
        x, skip, state, embed_kept = self.embed_if(at.embed, carry.state, keeps=True)
        skip = self._put(carry.skip, at.embed, skip)
        embed_kept = self._put(carry.embed_kept, at.embed, embed_kept)
        micro, chunk, slot = at.forward
        x = jnp.where(self.is_first(chunk), x, carry.arrived)
        y, extra, kept = self.stage_if(at.forward, x, keeps=True)
        slot = jnp.where(micro >= 0, slot, self._schedule.slots)
        kept = jax.tree.map(lambda all_, k: all_.at[slot].set(k, mode="drop"), carry.kept, kept)
        local_loss = carry.local_loss + jnp.where(micro >= 0, self._extra_share(extra), 0)
        extra = jax.tree.map(lambda e: jnp.where(micro >= 0, e, 0), extra)
        extra = jax.tree.map(lambda all_, e: all_.at[chunk].add(e, mode="drop"), carry.extra, extra)
        carry = carry._replace(kept=kept, embed_kept=embed_kept, skip=skip)
        return carry._replace(state=state, local_loss=local_loss, extra=extra), y

    def head(self, carry: Carry, at: Tick, y: Array) -> tuple[Carry, Tree, Array]:
        """Runs head and its gradient. Also returns the gradients of head's parameters and of y."""
        y = jnp.where(self.is_last(at.forward.chunk), y, 0)
        skip = self._taken(carry.skip, at.head)
        local_loss, out, dhead, dy, dskip = self._head_gradient_if(at.head, y, skip)
        local_loss, out = carry.local_loss + local_loss, add(carry.out, out)
        skip = self._put(carry.skip, at.head, dskip)
        return carry._replace(skip=skip, local_loss=local_loss, out=out), dhead, dy

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

    @jax.named_scope("embed_gradient")
    def embed_gradient(self, carry: Carry, at: Tick, dx: Array) -> Tree:
        """The gradient of embed's parameters. dx: the gradient of the input of this rank's stage."""
        if not jax.tree.leaves(self._params.embed):
            return self._params.embed
        dx = jnp.where(self.is_first(at.backward.chunk), dx, 0)
        embed_kept, dskip = self._taken(carry.embed_kept, at.back), self._taken(carry.skip, at.back)
        return _if(
            at.back >= 0,
            lambda: self._embedding.gradient(embed_kept, dx, dskip, self.batch(at.back)),
            self._params.embed,
        )

    def _put(self, slots: Tree, micro: Array, found: Tree) -> Tree:
        """Puts what belongs to a microbatch in flight into its slot; -1 for none."""
        in_flight = self._schedule.in_flight
        slot = jnp.where(micro >= 0, micro % in_flight, in_flight)
        return jax.tree.map(lambda all_, b: all_.at[slot].set(b, mode="drop"), slots, found)

    def _taken(self, slots: Tree, micro: Array) -> Tree:
        return jax.tree.map(lambda all_: all_[micro % self._schedule.in_flight], slots)

    # --- the three functions, which run where the schedule asks for them and give zeros elsewhere ---

    @jax.named_scope("embed")
    def embed_if(self, micro: Array, state: Tree, *, keeps: bool) -> tuple[Array, Tree, Tree, Tree]:
        """The results of embed, and what is kept for its gradient; () without `keeps`."""

        def run() -> tuple[Array, Tree, Tree, Tree]:
            """Runs embed for the microbatch."""
            if keeps:
                return self._embedding.forward(state, self.batch(micro))
            return *self._model.embed(self._params.embed, state, self.batch(micro)), ()

        x, skip, embed_kept = zeros((self.x_like, self.skip_like, self._embedding.like if keeps else ()))
        found: tuple[Array, Tree, Tree, Tree]
        found = jax.lax.cond(micro >= 0, run, lambda: (x, skip, state, embed_kept))
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

    def head_if(self, micro: Array, y: Array, out_like: Tree) -> Tree:
        """The second result of head, of this shape."""
        return _if(
            micro >= 0, lambda: self._model.head(self._params.head, y, None, self.batch(micro))[1], out_like
        )

    @jax.named_scope("head_gradient")
    def _head_gradient_if(self, micro: Array, y: Array, skip: Tree) -> Any:
        """This rank's share, head's second result, and the gradients of head's parameters, y and skip."""

        def run() -> tuple[Array, Tree, Tree, Array, Tree]:
            """Runs head and its gradient for the microbatch."""

            def head(params: Tree, y: Array, skip: Tree) -> tuple[Array, Tree]:
                """(local_loss, out), to be differentiated."""
                return self._model.head(params, y, skip, self.batch(micro))

            local_loss, pull, out = jax.vjp(head, self._params.head, y, skip, has_aux=True)
            return local_loss, out, *pull(jnp.ones_like(local_loss))

        return _if(micro >= 0, run, jax.eval_shape(run))


def _if(runs: Array, run: Callable[[], Any], like: Tree) -> Any:
    """The result of `run`, or zeros of the shapes of `like`."""
    return jax.lax.cond(runs, run, lambda: zeros(like))
