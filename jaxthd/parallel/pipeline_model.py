"""The form in which a pipeline runs a model: three differentiable functions.

    enter(params, state, batch) -> (x, bypass, state)       the embeddings; all ranks compute them together
    stage(pattern, params, chunk, x, batch) -> (x, extra)   one stage's layers, on the rank that holds them
    leave(params, x, bypass, batch) -> (share, out)         the objective; all ranks compute it together

bypass: a tree, maybe empty, that goes from a microbatch's enter directly to its leave, past the stages.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from jaxthd.parallel.stages import Stages

Tree = Any


class PipelinedModel(NamedTuple):
    """The three functions for one microbatch.

    stages: how the layers are divided into stages.
    uniform_program: whether all ranks run one stage program, at the same time.
    """

    enter: Callable[[Tree, Tree, Tree], tuple[Array, Tree, Tree]]
    stage: Callable[[str, Tree, Array | int, Array, Tree], tuple[Array, Tree]]
    leave: Callable[[Tree, Array, Tree, Tree], tuple[Array, Tree]]
    stages: Stages
    uniform_program: bool


class PipelinedParams(NamedTuple):
    """The parameters of the three functions, or their gradients."""

    enter: Tree
    stage: Tree
    leave: Tree
