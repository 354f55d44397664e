"""Weights on another mesh of the same devices: copied there part by part, in the dtype that the model uses.

Nothing goes through the host or a file. A part is a few small arrays, a layer of a large stack, or a large
array that is no stack. It is cast, gathered whole on every device, and each keeps its shard. It has arrived
before the next part leaves. So beside both copies a device holds three times a whole part at most.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import AXES, PIPELINE
from jaxthd.parallel.params import Buffer
from jaxthd.steps.blueprint import Blueprint, Tree

PART_BYTES = 2**28
"""Arrays are copied together up to so many bytes; a stack that has more is copied layer by layer."""


class Leaf(NamedTuple):
    """Move of an array. source, target: its shardings. shape, dtype: of the copy.

    rows: for each layer of a stack, its row in the array and its row in the copy; None for what is no stack.
    is_there: the array is the same on both meshes, and needs no copy.
    """

    source: NamedSharding
    target: NamedSharding
    shape: tuple[int, ...]
    dtype: Any
    rows: tuple[tuple[int, int], ...] | None
    is_there: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole copy."""
        return math.prod(self.shape) * self.dtype.itemsize


def same_devices(mesh: Mesh, config: MeshConfig) -> Mesh:
    """The mesh of `config` over the devices of `mesh`, in their order: one program can use both meshes."""
    return Mesh(mesh.devices.reshape(config.sizes), AXES, axis_types=mesh.axis_types)


class Resharding:
    """(params, buffers) in the device layout of one mesh -> the same for another one.

    here, there: blueprints of one model that differ in their meshes; mesh, other: these (same_devices).
    The copy has the dtypes of Blueprint.used_dtypes. An array that is the same on both meshes is no copy.
    """

    def __init__(
        self, here: Blueprint, mesh: Mesh, there: Blueprint, other: Mesh, *, part_bytes: int = PART_BYTES
    ) -> None:
        self.leaves = list(_leaves(here, mesh, there, other))
        self.parts = [
            (numbers, _program([self.leaves[number] for number in numbers], part_bytes))
            for numbers in _parts(self.leaves, part_bytes)
        ]

    def __call__(self, params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
        arrays, tree = jax.tree.flatten((params, buffers))
        moved = [
            jax.device_put(x, leaf.target) if leaf.is_there else None
            for x, leaf in zip(arrays, self.leaves, strict=True)
        ]
        for numbers, program in self.parts:
            copies = jax.block_until_ready(program(*(arrays[number] for number in numbers)))
            for number, x in zip(numbers, copies, strict=True):
                moved[number] = x
        params, buffers = jax.tree.unflatten(tree, moved)
        return params, buffers


def _leaves(here: Blueprint, mesh: Mesh, there: Blueprint, other: Mesh) -> Iterator[Leaf]:
    """In the order of the arrays."""
    shapes, other_shapes = (
        [nnx.to_pure_dict(nnx.state(each.model, kind)) for kind in (nnx.Param, Buffer)]
        for each in (here, there)
    )
    dtypes = there.used_dtypes, jax.tree.map(lambda x: x.dtype, shapes[1])
    found, _ = jax.tree_util.tree_flatten_with_path(shapes)
    others = [
        jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for tree in (other_shapes, dtypes, here.specs, there.specs)
    ]
    for (path, x), y, dtype, spec, other_spec in zip(found, *others, strict=True):
        source, target = NamedSharding(mesh, spec), NamedSharding(other, other_spec)
        rows = _rows(path, x.shape, here, there)
        is_same = (x.shape, x.dtype) == (y.shape, dtype) and all(a == b for a, b in rows or ())
        is_there = is_same and source.is_equivalent_to(target, x.ndim)
        yield Leaf(source, target, y.shape, dtype, rows, is_there)


def used_shapes(blueprint: Blueprint, mesh: Mesh) -> tuple[Tree, Tree]:
    """The trees that Resharding makes for this mesh, with ShapeDtypeStructs on their shardings for arrays."""
    shapes = tuple(nnx.to_pure_dict(nnx.state(blueprint.model, kind)) for kind in (nnx.Param, Buffer))
    dtypes = blueprint.used_dtypes, jax.tree.map(lambda x: x.dtype, shapes[1])

    def described(x: Any, dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(described, shapes, dtypes, blueprint.specs)


def _parts(leaves: Sequence[Leaf], part_bytes: int) -> list[list[int]]:
    """The numbers of the leaves that are copied together."""
    parts: list[list[int]] = []
    room = 0
    for number, leaf in enumerate(leaves):
        if leaf.is_there:
            continue
        if not parts or leaf.bytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(number)
        room -= leaf.bytes
    return parts


def _rows(
    path: tuple[Any, ...], shape: tuple[int, ...], here: Blueprint, there: Blueprint
) -> tuple[tuple[int, int], ...] | None:
    """Leaf.rows."""
    letter = here.stages.letter_of(path)
    if letter is not None:
        found = []
        for stages in (here.stages, there.stages):
            layers = stages.layers(letter)
            rows = np.flatnonzero(layers >= 0)
            found.append(rows[np.argsort(layers[rows])].tolist())
        return tuple(zip(*found, strict=True))
    is_stack = any(getattr(key, "key", None) == "blocks" for key in path)
    return tuple((row, row) for row in range(shape[0])) if is_stack else None


def _program(part: Sequence[Leaf], part_bytes: int) -> Callable[..., Any]:
    """(the part's arrays) -> their copies."""
    (first, *others) = part
    if others or first.bytes <= part_bytes or not first.rows:
        return whole_program(tuple(part))
    return partial(_layer_by_layer, first)


def _layer_by_layer(leaf: Leaf, x: Array) -> tuple[Array]:
    copy, move = empty_program(leaf)(), layer_program(leaf)
    for row, own_row in leaf.rows or ():
        copy = move(copy, x, row, own_row)
    return (copy,)


@cache
def whole_program(part: tuple[Leaf, ...]) -> Callable[..., tuple[Array, ...]]:
    def copied(x: Array, leaf: Leaf) -> Array:
        whole = _everywhere(x.astype(leaf.dtype), leaf.target)
        if leaf.rows is None:
            return whole
        rows, own_rows = map(np.array, zip(*leaf.rows, strict=True))
        return jnp.zeros(leaf.shape, leaf.dtype).at[own_rows].set(whole[rows])

    def run(*arrays: Array) -> tuple[Array, ...]:
        return tuple(copied(x, leaf) for x, leaf in zip(arrays, part, strict=True))

    return jax.jit(run, out_shardings=tuple(leaf.target for leaf in part))


@cache
def empty_program(leaf: Leaf) -> Callable[[], Array]:
    return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.target)


@cache
def layer_program(leaf: Leaf) -> Callable[..., Array]:
    """(copy, array, row, own row) -> the copy with a layer of the array. The copy's memory is reused."""
    source, target, scalar = leaf.source, leaf.target, PartitionSpec()
    take = _on_ranks(_taken(source.spec, leaf.dtype), source, (source.spec, scalar), layer_of(source))
    put = _on_ranks(_put(target.spec), target, (target.spec, layer_of(target), scalar), target.spec)

    def move(copy: Array, x: Array, row: Array, own_row: Array) -> Array:
        return put(copy, _everywhere(take(x, row), target), own_row)

    return jax.jit(move, donate_argnums=0, out_shardings=target)


def _everywhere(x: Array, on: NamedSharding) -> Array:
    """x, whole on each device. Between most shardings XLA knows no shorter way, and warns about it."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(on.mesh, PartitionSpec()))


def layer_of(sharding: NamedSharding) -> PartitionSpec:
    """The spec of a layer of a stack."""
    return PartitionSpec(*sharding.spec[1:])


def _on_ranks(rank: Callable[..., Array], on: NamedSharding, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(rank, mesh=on.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_divided(spec: PartitionSpec) -> bool:
    """Whether pipeline ranks hold different rows of the stack."""
    first = spec[0] if spec else None
    return PIPELINE in ((first,) if isinstance(first, str) else first or ())


def _own_row(row: Array, rows: int, spec: PartitionSpec) -> Array:
    """The row's number on this rank; out of 0..rows-1 where another rank has it."""
    return row - jax.lax.axis_index(PIPELINE) * rows if _is_divided(spec) else row


def _taken(spec: PartitionSpec, dtype: Any) -> Callable[[Array, Array], Array]:
    """(stack, row) -> the row on all pipeline ranks."""

    def take(x: Array, row: Array) -> Array:
        own = _own_row(row, len(x), spec)
        layer = jax.lax.dynamic_index_in_dim(x, own, keepdims=False).astype(dtype)
        if not _is_divided(spec):
            return layer
        return jax.lax.psum(jnp.where((own >= 0) & (own < len(x)), layer, 0), PIPELINE)

    return take


def _put(spec: PartitionSpec) -> Callable[[Array, Array, Array], Array]:
    """(stack, layer, row) -> the stack with the layer in this row."""

    def put(x: Array, layer: Array, row: Array) -> Array:
        own = _own_row(row, len(x), spec)
        # A negative index would count from the end; one behind the last row is dropped.
        return x.at[jnp.where(own < 0, len(x), own)].set(layer, mode="drop")

    return put
