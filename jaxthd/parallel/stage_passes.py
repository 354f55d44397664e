"""A stage's forward and backward pass, which run in different ticks: what is kept in between.

jax.vjp runs a function and returns a second one, which computes the gradients. The second one is a tree of
arrays: its leaves are what the backward pass needs of the forward pass. So a rank keeps these leaves, and the
backward pass begins where the forward pass ended, without running it again. What blocks recompute is theirs
to say (jax.checkpoint): with it the leaves are the inputs of blocks, without it all of their activations.

Leaves that are at hand again in the backward pass are not kept: weights, and what follows from the batch.
They are known by identity. If one is missed, it is kept in vain; the result is the same.

If stages differ, so do the leaves. Then they are kept as one flat array for each dtype, as long as the
longest of all stages needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.parallel.pipeline_model import PipelinedModel, PreparedStage, Tree

ExtraShare = Callable[[Tree], Array]
"""Takes a stage's second result; returns what it adds to this rank's share of the objective."""
PullAgain = Callable[[Sequence[Array], Tree], Callable[[Tree], Any]]
"""(the arrays that were kept, those at hand, of the same structure and values as before) -> the second result
of jax.vjp."""


def split_pull(pull: Any, at_hand: Tree) -> tuple[list[Array], PullAgain]:
    """Divides the second result of jax.vjp: the arrays to keep of it, and what makes it of them again.

    The latter holds no arrays, which belong to the trace that made them.
    """
    leaves, tree = jax.tree.flatten(pull)
    numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(at_hand))}
    others = {id(leaf): leaf for leaf in leaves if id(leaf) not in numbers}
    places = {identity: place for place, identity in enumerate(others)}
    found_at = [(numbers.get(id(leaf)), places.get(id(leaf), 0)) for leaf in leaves]

    def again(kept: Sequence[Array], at_hand: Tree) -> Callable[[Tree], Any]:
        """Makes jax.vjp's second result of the arrays that were kept and those at hand."""
        known = jax.tree.leaves(at_hand)
        leaves = [kept[place] if number is None else known[number] for number, place in found_at]
        whole: Callable[[Tree], Any] = jax.tree.unflatten(tree, leaves)
        return whole

    return [jnp.asarray(leaf) for leaf in others.values()], again


class StagePasses:
    """The forward and the backward pass of this rank's stages, each by its `chunk`.

    like: shapes and dtypes of what is kept of a forward pass for the backward pass.
    """

    def __init__(
        self, model: PipelinedModel, params: Tree, x_like: Tree, batch: Tree, extra_share: ExtraShare
    ) -> None:
        self._model, self._params, self._extra_share = model, params, extra_share
        self._again: dict[str, PullAgain] = {}
        kinds = sorted(set(model.stages.patterns))

        def kept_of(pattern: str) -> list[Array]:
            """What is kept of a stage of this pattern."""
            x = jnp.zeros(x_like.shape, x_like.dtype)
            return self._forward(pattern, jnp.zeros((), jnp.int32), x, batch)[2]

        likes = {pattern: jax.eval_shape(lambda p=pattern: kept_of(p)) for pattern in kinds}
        self._buffer = ResidualBuffer(likes)
        self.like = self._buffer.like

    def forward(self, chunk: Array, x: Array, batch: Tree) -> tuple[Array, Tree, Tree]:
        """The stage's results, and what is kept."""

        def run(pattern: str) -> tuple[Array, Tree, Tree]:
            """The forward pass of a stage of this pattern."""
            y, extra, kept = self._forward(pattern, chunk, x, batch)
            return y, extra, self._buffer.put(kept)

        found: tuple[Array, Tree, Tree] = self._model.stages.switch(run, chunk)
        return found

    def backward(self, chunk: Array, kept: Tree, dy: Array, batch: Tree) -> tuple[Tree, Array]:
        """The gradients of the stage's parameters and of its input."""

        def gradient(pattern: str) -> tuple[Tree, Array]:
            """The backward pass of a stage of this pattern."""
            prepared, pull_params = self._prepared(pattern, chunk, batch)
            pull = self._again[pattern](self._buffer.take(pattern, kept), prepared)
            dtrained, dx = pull((dy, jnp.ones((), dy.dtype)))
            return pull_params(dtrained)[0], dx

        found: tuple[Tree, Array] = self._model.stages.switch(gradient, chunk)
        return found

    def _prepared(self, pattern: str, chunk: Array, batch: Tree) -> tuple[PreparedStage, Callable[..., Any]]:
        """And what takes the gradients of its trained weights to those of the parameters."""

        def prepare(params: Tree) -> tuple[Tree, Tree]:
            """(trained, fixed): the stage's arguments."""
            return self._model.prepare(pattern, params, chunk, batch)

        trained, pull, fixed = jax.vjp(prepare, self._params, has_aux=True)
        return PreparedStage(trained, fixed), pull

    def _forward(self, pattern: str, chunk: Array, x: Array, batch: Tree) -> tuple[Array, Tree, list[Array]]:
        prepared = PreparedStage(*self._model.prepare(pattern, self._params, chunk, batch))

        def stage(trained: Tree, x: Array) -> tuple[tuple[Array, Array], Tree]:
            """((the output, the share of the stage), its second result), to be differentiated."""
            y, extra = self._model.run(pattern, PreparedStage(trained, prepared.fixed), x)
            return (y, jnp.asarray(self._extra_share(extra), y.dtype)), extra

        (y, _), pull, extra = jax.vjp(stage, prepared.trained, x, has_aux=True)
        kept, self._again[pattern] = split_pull(pull, prepared)
        return y, extra, kept


class ResidualBuffer:
    """One form for what different stages keep. likes: shapes and dtypes of what each kind of stage keeps."""

    def __init__(self, likes: dict[str, list[jax.ShapeDtypeStruct]]) -> None:
        self._likes = likes
        self._is_single = len(likes) == 1
        sizes: dict[Any, int] = {}
        for of_kind in likes.values():
            for dtype in {x.dtype for x in of_kind}:
                size = sum(x.size for x in of_kind if x.dtype == dtype)
                sizes[dtype] = max(sizes.get(dtype, 0), size)
        self._sizes = {dtype: sizes[dtype] for dtype in sorted(sizes, key=str)}
        flat = [jax.ShapeDtypeStruct((size,), dtype) for dtype, size in self._sizes.items()]
        self.like: Tree = next(iter(likes.values())) if self._is_single else flat

    def put(self, kept: list[Array]) -> Tree:
        """What is kept of a stage, in the one form."""
        if self._is_single:
            return kept
        flat = []
        for dtype, size in self._sizes.items():
            parts = [x.reshape(-1) for x in kept if x.dtype == dtype]
            whole = jnp.concatenate(parts) if parts else jnp.zeros(0, dtype)
            flat.append(jnp.pad(whole, (0, size - len(whole))))
        return flat

    def take(self, pattern: str, kept: Tree) -> list[Array]:
        """The inverse of put, for a stage of this pattern."""
        if self._is_single:
            found: list[Array] = kept
            return found
        flat, begin = dict(zip(self._sizes, kept, strict=True)), dict.fromkeys(self._sizes, 0)
        leaves = []
        for like in self._likes[pattern]:
            first = begin[like.dtype]
            leaves.append(flat[like.dtype][first : first + like.size].reshape(like.shape))
            begin[like.dtype] = first + like.size
        return leaves


class EmbedPasses:
    """`embed` and its gradient. like: as in StagePasses."""

    def __init__(self, model: PipelinedModel, params: Tree, state: Tree, batch: Tree) -> None:
        self._model, self._params = model, params
        self._again: PullAgain | None = None
        self.like: Tree = jax.eval_shape(self.forward, state, batch)[3]

    def forward(self, state: Tree, batch: Tree) -> tuple[Array, Tree, Tree, Tree]:
        """The results of `embed`, and what is kept."""

        def embed(params: Tree) -> tuple[tuple[Array, Tree], Tree]:
            """((embeddings, skip state), the state after), to be differentiated."""
            x, skip, after = self._model.embed(params, state, batch)
            return (x, skip), after

        (x, skip), pull, after = jax.vjp(embed, self._params, has_aux=True)
        kept, self._again = split_pull(pull, self._at_hand(batch))
        return x, skip, after, kept

    def gradient(self, kept: Tree, dx: Array, dskip: Tree, batch: Tree) -> Tree:
        """The gradient of its parameters."""
        assert self._again is not None
        return self._again(kept, self._at_hand(batch))((dx, dskip))[0]

    def _at_hand(self, batch: Tree) -> Tree:
        return self._params, self._model.constants, batch
