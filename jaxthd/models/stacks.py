"""Converts the decoder's layers between canonical stacks and the stacks of a pipeline's ranks.

parallel/stages.py says which row of a stack holds which layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.config import LLMConfig, MeshConfig
from jaxthd.parallel.stages import Stages


def pipeline_stages(llm: LLMConfig, mesh: MeshConfig) -> Stages:
    """The pipeline's stages: divided at the pattern's marks if it has any, else by the layers' cost.

    Raises ValueError as Stages.of does, and for an unknown letter.
    """
    llm.require_blocks()
    return Stages.of(llm.pattern, mesh, lambda letter: llm.blocks[letter].cost(llm.dim), llm.stacks)


def to_stages(tree: Any, stages: Stages) -> Any:
    """Converts canonical stacks to the stacks of a pipeline's ranks.

    tree: any tree of arrays with the names of the module tree, such as parameters or an optimizer's moments.
    Arrays of NumPy stay such: no program is compiled for them.
    """

    def rows(letter: str, x: Any) -> Any:
        """Layers by slot of the stages, from layers in the decoder's order; empty slots are 0."""
        layers = stages.layers(letter)
        filled = (layers >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        if isinstance(x, np.ndarray):
            return np.where(filled, x[np.maximum(layers, 0)], np.zeros((), x.dtype))
        return jnp.where(filled, jnp.take(x, jnp.maximum(layers, 0), axis=0), 0)

    return _of_layers(rows, tree, stages)


def from_stages(tree: Any, stages: Stages) -> Any:
    """The inverse of to_stages."""

    def canonical(letter: str, x: Any) -> Any:
        """Layers in the decoder's order, from layers by slot of the stages."""
        layers = stages.layers(letter)
        rows = np.flatnonzero(layers >= 0)
        order = rows[np.argsort(layers[rows])]
        return x[order] if isinstance(x, np.ndarray) else jnp.take(x, order, axis=0)

    return _of_layers(canonical, tree, stages)


def _of_layers(change: Callable[[str, Any], Any], tree: Any, stages: Stages) -> Any:
    if len(stages.patterns) == 1:
        return tree

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        """The leaf changed by the letter of its kind; itself where no letter is in its path."""
        letter = stages.letter_of(path)
        return x if letter is None else change(letter, x)

    return jax.tree_util.tree_map_with_path(leaf, tree)
