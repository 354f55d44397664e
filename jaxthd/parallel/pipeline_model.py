"""The form in which a pipeline runs a model: three differentiable functions.

    embed(params, state, batch) -> (x, skip, state)         the embeddings; all ranks compute them together
    stage(pattern, params, chunk, x, batch) -> (x, extra)   one stage's layers, on the rank that holds them
    head(params, x, skip, batch) -> (local_loss, out)       the objective; all ranks compute it together

A stage is made of two functions: `prepare` takes what it needs from parameters and batch, and `run` computes.

skip: a tree, maybe empty, that goes from a microbatch's embed directly to its head, past the stages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from jaxthd.parallel.stages import Stages

Tree = Any


class PreparedStage(NamedTuple):
    """A stage's arguments beside its input. trained: the weights that are differentiated, a linear function
    of the parameters. fixed: other weights, and what follows from the batch.
    """

    trained: Tree
    fixed: Tree


class PipelinedModel(NamedTuple):
    """The functions for one microbatch.

    prepare: (pattern, params, chunk, batch) -> PreparedStage. run: (pattern, prepared, x) -> (x, extra).
    stages: how the layers are divided into stages.
    constants: arrays that `embed` uses beside its arguments, the same in every tick.
    """

    embed: Callable[[Tree, Tree, Tree], tuple[Array, Tree, Tree]]
    prepare: Callable[[str, Tree, Array | int, Tree], PreparedStage]
    run: Callable[[str, PreparedStage, Array], tuple[Array, Tree]]
    head: Callable[[Tree, Array, Tree, Tree], tuple[Array, Tree]]
    stages: Stages
    constants: Tree

    def stage(
        self, pattern: str, params: Tree, chunk: Array | int, x: Array, batch: Tree
    ) -> tuple[Array, Tree]:
        """A stage's output and its second result: `run` of what `prepare` gives."""
        return self.run(pattern, self.prepare(pattern, params, chunk, batch), x)


class PipelinedParams(NamedTuple):
    """The parameters of the three functions, or their gradients."""

    embed: Tree
    stage: Tree
    head: Tree
