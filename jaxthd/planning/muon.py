"""Temporary memory of Muon's updates (jaxthd/steps/muon.py), in closed form."""

import math
from typing import NamedTuple

from flax import nnx

from jaxthd.parallel.mesh import AXES, ranks_of
from jaxthd.planning.sizes import Number, Sizes
from jaxthd.steps.blueprint import Blueprint

LOOPED, UNROLLED = 6, 5
"""Copies of a matrix that its orthogonalisation holds: in a loop over several matrices, and where it is the
only one of its stack on this rank. Read off programs compiled for CPUs (tests/test_estimate.py)."""


class Stack(NamedTuple):
    """A stack of matrices as a rank exchanges it. matrix: bytes of a whole matrix. held: whole matrices that
    the rank holds at a time. own: those of them that it orthogonalises.
    """

    matrix: int
    held: int
    own: int


def muon_update(sizes: Sizes) -> Number:
    """Momenta and updates of all matrices, whole where they are exchanged, and what orthogonalises one: of
    stacks of which a rank has one matrix, several are under way at a time.
    """
    stacks = _stacks(sizes)
    if not stacks:
        return 0
    whole = sum(stack.held * stack.matrix for stack in stacks)
    looped = max((stack.matrix for stack in stacks if stack.own > 1), default=0)
    unrolled = sum(stack.matrix for stack in stacks if stack.own == 1)
    return 2 * whole + max(LOOPED * looped, UNROLLED * unrolled)


def _stacks(sizes: Sizes) -> list[Stack]:
    blueprint, mesh = Blueprint(sizes.config), sizes.mesh
    trained = nnx.traversals.flatten_mapping(blueprint.trained)
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(blueprint.model, nnx.Param)):
        if not (variable.get_metadata("projects") and trained[path]):
            continue
        by_dim = variable.get_metadata("mesh_axes")
        *dims, rows, columns = (
            size // ranks_of(mesh, axes) for size, axes in zip(variable.shape, by_dim, strict=True)
        )
        shards = ranks_of(mesh, (*by_dim[-2], *by_dim[-1]))
        others = ranks_of(mesh, [axis for axis in AXES if not any(axis in axes for axes in by_dim)])
        matrices = -(-math.prod(dims) // (shards * others)) * shards * others
        matrix = rows * columns * shards * variable.dtype.itemsize
        found.append(Stack(matrix, matrices // shards, matrices // (shards * others)))
    return found
