"""The mesh: its axes, and how a batch lies on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxthd.config import MeshConfig
from jaxthd.errors import UserError
from jaxthd.packing.batch import Batch

DATA, CONTEXT, PIPELINE, TENSOR = AXES = ("data", "context", "pipeline", "tensor")
AUDIO_AXES = (CONTEXT, PIPELINE, TENSOR)
"""Axes whose ranks share a buffer, hence its audio."""


def ranks_of(config: MeshConfig, axes: Sequence[str]) -> int:
    """Ranks that these axes have together."""
    return math.prod(getattr(config, axis) for axis in axes)


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over the first `config.devices` devices. Raises UserError when there are fewer."""
    if jax.device_count() < config.devices:
        raise UserError(
            f"the mesh {config.sizes} (data, context, pipeline, tensor) needs {config.devices} devices; "
            f"found {jax.device_count()} ({jax.default_backend()}): lower a mesh size"
        )
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(config.sizes, AXES, axis_types=axis_types, devices=jax.devices()[: config.devices])


def on_device(tree: Any, specs: Any, config: MeshConfig) -> Any:
    """Shapes and dtypes of what each device of the mesh holds of a tree of arrays; all hold as much. specs:
    PartitionSpecs in the places of the arrays. None of the devices need exist.
    """
    mesh = AbstractMesh(config.sizes, AXES)

    def part(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(part, tree, specs)


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def batch_specs() -> Batch:
    """PartitionSpecs in the places of the arrays: rows over data; tokens over context; audio over all axes
    whose ranks share the row.
    """
    tokens, audio = PartitionSpec(DATA, CONTEXT), PartitionSpec(DATA, AUDIO_AXES)
    return Batch(
        tokens=tokens,
        targets=tokens,
        weights=tokens,
        segment_ids=tokens,
        positions=tokens,
        audio_slots=tokens,
        mels=audio,
        mel_mask=audio,
        chunk_ids=audio,
        chunk_positions=audio,
    )


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """The host's batch on the mesh."""
    return Batch(
        *(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(batch, batch_specs(), strict=True))
    )
