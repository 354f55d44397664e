"""Muon's updates of weight matrices (Jordan et al., Muon, 2024; Liu et al., Muon is Scalable, 2025).

The update of a matrix is its momentum, orthogonalised: its singular values are moved to about 1. That needs
the whole matrix, while a rank holds a shard of each. So the ranks that hold shards of a stack exchange them
by all-to-all, each orthogonalises whole matrices of the stack, and a second exchange returns the shards. Each
matrix is computed once, by one rank, as one device computes it.

Legend: B matrices (layers, depths, experts) of a stack that this rank has shards of, R rows, C columns; r and
c are a shard's; b is the matrices that this rank orthogonalises.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float

from jaxthd.parallel.mesh import AXES, on_ranks

Tree = Any


class MuonState(NamedTuple):
    """done: updates done, int32 []. mu: the momentum, in the places of the parameters."""

    done: Array
    mu: Tree


def scale_by_muon(
    beta: float, iterations: int, rms: float, *, nesterov: bool, specs: Tree, mesh: Mesh | None
) -> optax.GradientTransformation:
    """Momentum, orthogonalised and scaled. The last two dims of each parameter are a matrix of inputs x
    outputs; every index of the dims before is a matrix by itself.

    iterations: of Newton-Schulz. rms: the root mean square of a full-rank update's elements; 0: its spectral
    norm is sqrt(max(1, outputs / inputs)). specs: PartitionSpecs of all parameters, the transformed ones
    among them. mesh: None where only the state's form is asked for.
    """
    # optax's Muon without momentum, on one matrix: its Newton-Schulz iteration alone.
    alone = optax.contrib.scale_by_muon(
        ns_steps=iterations,
        beta=0.0,
        nesterov=False,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
    )

    def orthogonal(matrix_RC: Array) -> Array:
        """The orthogonal factor of a momentum matrix, by optax's Newton-Schulz."""
        return alone.update(matrix_RC, alone.init(matrix_RC))[0]

    def init(params: Tree) -> MuonState:
        """No steps done, and momenta of 0."""
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(gradients: Tree, state: MuonState, _: Tree = None) -> tuple[Tree, MuonState]:
        """Orthogonalised momenta in place of the gradients."""
        count = optax.safe_increment(state.done)
        mu = optax.tree.update_moment(gradients, state.mu, beta, 1)
        if nesterov:
            ahead = optax.tree.bias_correction(mu, beta, count + 1)
            own = optax.tree.bias_correction(gradients, beta, count)
            momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, own)
        else:
            momentum = optax.tree.bias_correction(mu, beta, count)
        updates = _orthogonalised(orthogonal, momentum, specs, mesh)
        return jax.tree.map(lambda x: _factor(x.shape, rms) * x, updates), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def _factor(shape: tuple[int, ...], rms: float) -> float:
    inputs, outputs = shape[-2:]
    return rms * math.sqrt(max(inputs, outputs)) if rms else math.sqrt(max(1, outputs / inputs))


def _orthogonalised(orthogonal: Callable[[Array], Array], tree: Tree, specs: Tree, mesh: Mesh | None) -> Tree:
    """Every matrix of the tree, whose arrays are sharded as `specs` says, orthogonalised."""
    if mesh is None:
        raise ValueError("Muon's update was called without a mesh; expected make_optimizer(blueprint, mesh)")
    leaves, structure = jax.tree.flatten_with_path(tree)
    by_leaf = [_at(specs, path) for path, _ in leaves]

    def rank(*shards: Array) -> list[Array]:
        """The orthogonalised matrices of which this rank holds shards."""
        return [_on_rank(orthogonal, x, spec, mesh) for x, spec in zip(shards, by_leaf, strict=True)]

    run = on_ranks(rank, mesh, tuple(by_leaf), by_leaf)
    return jax.tree.unflatten(structure, run(*(x for _, x in leaves)))


def _at(specs: Tree, path: tuple[Any, ...]) -> PartitionSpec:
    for key in path:
        specs = specs[key.key]
    return specs


def _on_rank(
    orthogonal: Callable[[Array], Array], shard: Float[Array, "... r c"], spec: PartitionSpec, mesh: Mesh
) -> Float[Array, "... r c"]:
    """This rank's shard of the orthogonalised matrices. Collectives."""
    by_dim = [_axes(entry) for entry in (*spec, *[None] * (shard.ndim - len(spec)))]
    rows, columns = by_dim[-2:]
    others = tuple(axis for axis in AXES if not any(axis in axes for axes in by_dim))
    x_Brc = shard.reshape(-1, *shard.shape[-2:])
    matrices = len(x_Brc)
    ranks = math.prod(mesh.shape[axis] for axis in (*rows, *columns, *others))
    x_Brc = jnp.pad(x_Brc, ((0, -matrices % ranks), (0, 0), (0, 0)))
    x_bRC = _exchanged(_exchanged(x_Brc, rows, 0, 1), columns, 0, 2)
    share = len(x_bRC) // math.prod(mesh.shape[axis] for axis in others)
    if others:  # their ranks hold the same: each takes its share
        first = share * jax.lax.axis_index(others)
        x_bRC = jax.lax.dynamic_slice_in_dim(x_bRC, first, share)
    x_bRC = jax.lax.map(orthogonal, x_bRC)
    if others:
        x_bRC = jax.lax.all_gather(x_bRC, others, tiled=True)
    x_Brc = _exchanged(_exchanged(x_bRC, columns, 2, 0), rows, 1, 0)
    return x_Brc[:matrices].reshape(shard.shape)


def _exchanged(x: Array, axes: tuple[str, ...], split_params: int, merged_params: int) -> Array:
    return jax.lax.all_to_all(x, axes, split_params, merged_params, tiled=True) if axes else x


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of a PartitionSpec's entry."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
