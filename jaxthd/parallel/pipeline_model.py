"""A model as a pipeline runs it: three differentiable functions.

    enter(params, state, batch) -> (x, bypass, state)   the embeddings; all ranks compute them together
    stage(params, chunk, x, batch) -> (x, extra)        one stage's layers, on the rank that holds them
    leave(params, x, bypass, batch) -> (share, out)     the objective; all ranks compute it together

bypass: what goes from a microbatch's enter straight to its leave, around the stages; a tree, maybe empty.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from jaxthd.parallel.stages import Stages

Tree = Any


class PipelinedModel(NamedTuple):
    """The three functions for one microbatch; `stage` also takes its stage's pattern, first.

    uniform_program: all ranks run one stage program, at the same time.
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
