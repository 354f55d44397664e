"""The mesh: its devices, its axes, and the layout of a batch on it."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxthd.config import Config, MeshConfig
from jaxthd.errors import UserError
from jaxthd.packing.batch import Batch, with_rows

DATA, CONTEXT, PIPELINE, TENSOR = AXES = ("data", "context", "pipeline", "tensor")
Rows = TypeVar("Rows")
AUDIO_AXES = (CONTEXT, PIPELINE, TENSOR)
"""The axes whose ranks share a buffer. They encode the audio of that buffer together."""
TOKEN_AXES = (DATA, CONTEXT)
"""The axes over which a batch's tokens are sharded; over the other axes they are replicated."""


def ranks_of(config: MeshConfig, axes: Sequence[str]) -> int:
    """The number of ranks that these axes have together."""
    return math.prod(getattr(config, axis) for axis in axes)


def device_platform() -> str:
    """Returns jax's name of the back-end, such as "cpu" or "gpu", which this starts.

    Raises UserError where it cannot be started, as with JAX_PLATFORMS=cuda where there is no GPU.
    """
    try:
        return jax.default_backend()
    # jax asserts that there is a back-end: with "cuda" it only warns of a plugin that is not installed.
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS") or jax.config.read("jax_platforms") or ""
        reason = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".") or "it has no device here"
        raise UserError(
            f"JAX_PLATFORMS is {asked!r}, and jax cannot start that ({reason}); expected a platform that "
            "this machine has: leave JAX_PLATFORMS unset, set it to cpu, or make the accelerator visible to "
            "jax (driver, CUDA_VISIBLE_DEVICES, and pip install 'jaxthd[cuda12]' for NVIDIA GPUs)"
            if asked
            else f"jax cannot start a device ({reason}); expected a CPU or an accelerator: set "
            "JAX_PLATFORMS=cpu to do without an accelerator, or correct its driver"
        ) from error


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over the first `config.devices` devices.

    Raises UserError when there are fewer devices, or when there are more and several processes, for sizes
    below 1, and as device_platform does.
    """
    if min(config.sizes) < 1:
        raise UserError(
            f"the mesh is {config.sizes} (data, context, pipeline, tensor); expected 1 or more of each: "
            "correct the size"
        )
    platform = device_platform()
    if jax.device_count() < config.devices:
        raise UserError(
            f"the mesh {config.sizes} (data, context, pipeline, tensor) needs {config.devices} devices; "
            f"found {jax.device_count()} ({platform}): lower a mesh size"
        )
    if jax.process_count() > 1 and jax.device_count() > config.devices:
        raise UserError(
            f"the mesh {config.sizes} (data, context, pipeline, tensor) is for {config.devices} devices, not "
            f"for the {jax.device_count()} of {jax.process_count()} processes; expected a mesh over all of "
            "them: raise a mesh size, or start fewer processes"
        )
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(config.sizes, AXES, axis_types=axis_types, devices=jax.devices()[: config.devices])


def adopt_mesh(
    mesh: Mesh,
    *,
    data: str | Sequence[str] | None = None,
    context: str | Sequence[str] | None = None,
    pipeline: str | Sequence[str] | None = None,
    tensor: str | Sequence[str] | None = None,
) -> Mesh:
    """A mesh that was made elsewhere, with the axes that are used here; the same devices.

    Each argument names the axes of `mesh` that become ours, the outer one first; None: the one of our name,
    if there is one. Axes that are not there have one rank. with_mesh gives a config these sizes.
    Raises UserError for names that the mesh lacks, and for axes of several ranks that are not named.
    """
    named = dict(zip(AXES, (data, context, pipeline, tensor), strict=True))
    of_axes = {
        axis: [axis] * (axis in mesh.axis_names)
        if names is None
        else [names] * isinstance(names, str) or names
        for axis, names in named.items()
    }
    order = [name for names in of_axes.values() for name in names]
    missing = [name for name in order if name not in mesh.axis_names]
    left = [name for name in mesh.axis_names if name not in order and mesh.shape[name] > 1]
    if missing or left or len(set(order)) < len(order):
        raise UserError(
            f"the mesh has the axes {dict(mesh.shape)}, and {order} were named; expected each axis of "
            'several ranks once: name them, as in adopt_mesh(mesh, data=("replica", "fsdp"), tensor="model")'
        )
    unused = [name for name in mesh.axis_names if name not in order]
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in (*order, *unused)])
    sizes = [math.prod(mesh.shape[name] for name in names) for names in of_axes.values()]
    return Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def with_mesh(config: Config, mesh: Mesh) -> Config:
    """The config with the sizes of a mesh that make_mesh or adopt_mesh has made."""
    return replace(config, mesh=replace(config.mesh, **{axis: mesh.shape[axis] for axis in AXES}))


def on_ranks(rank: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function that runs `rank` on every device of the mesh, inside shard_map, with all axes manual.

    in_specs, out_specs: as in shard_map.
    Arguments without elements (no audio, no depths) do not enter shard_map but are made inside it, because
    jaxlib 0.11.2 crashes on them when it compiles for several devices.
    """

    def run(*given: Any) -> Any:
        """Maps `rank` over the mesh; arguments as those of `rank`, whole."""
        leaves, tree = jax.tree.flatten(given)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, given))

        def with_empty(*arrays: jax.Array) -> Any:
            """Calls `rank`, with zeros for the arguments without elements."""
            entering = iter(arrays)
            own = [
                next(entering)
                if x.size
                else jnp.zeros(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)
                for x, spec in zip(leaves, specs, strict=True)
            ]
            return rank(*jax.tree.unflatten(tree, own))

        entering = [(x, spec) for x, spec in zip(leaves, specs, strict=True) if x.size]
        mapped = jax.shard_map(
            with_empty,
            mesh=mesh,
            in_specs=tuple(spec for _, spec in entering),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(*(x for x, _ in entering))

    return run


def on_device(tree: Any, specs: Any, config: MeshConfig) -> Any:
    """Shapes and dtypes of each device's shards of a tree of arrays. They are the same on all devices.

    specs: the PartitionSpecs, a tree of the same structure or a prefix of it. The devices need not exist.
    """
    mesh = AbstractMesh(config.sizes, AXES)

    def part(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a device's shard of x."""
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(part, tree, jax.tree.broadcast(specs, tree))


def bytes_of(tree: Any) -> int:
    """Bytes that the arrays of the tree hold, or would hold, together."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def batch_specs() -> Batch:
    """PartitionSpecs of a batch's fields.

    Rows are sharded over data, tokens over context, audio over all axes whose ranks share a row.
    A field may be None or a dict of arrays. Its one spec is meant for all that the field holds: broadcast it
    (jax.tree.broadcast).
    """
    tokens, audio = PartitionSpec(DATA, CONTEXT), PartitionSpec(DATA, AUDIO_AXES)
    future = PartitionSpec(DATA, None, CONTEXT)
    return Batch(
        tokens=tokens,
        targets=tokens,
        weights=tokens,
        segment_ids=tokens,
        positions=tokens,
        audio_slots=tokens,
        features=audio,
        frame_mask=audio,
        piece_ids=audio,
        piece_positions=audio,
        future_tokens=future,
        future_audio_slots=future,
        future_targets=future,
        future_weights=future,
        extras=tokens,  # type: ignore[arg-type]
        document_ids=tokens,
        prefixes=tokens,
        embeddings=tokens,
        draws=tokens,
        splits=PartitionSpec(DATA),
        recording_ids=audio,
        recording_positions=audio,
        recording_labels=audio,
    )


def local_rows(mesh: Mesh, rows: int) -> list[int]:
    """The batch's rows that belong to data ranks with a device in this process."""
    share = rows // mesh.shape[DATA]
    return [row for rank in _local_data_ranks(mesh) for row in range(rank * share, (rank + 1) * share)]


def _local_data_ranks(mesh: Mesh) -> list[int]:
    ranks = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0)
    mine = jax.process_index()
    return [i for i, devices in enumerate(ranks) if any(d.process_index == mine for d in devices.flat)]


def put_rows(rows: Rows, specs: Rows, mesh: Mesh) -> Rows:
    """Makes global arrays on the mesh from this process's local_rows.

    rows: a tree of arrays that hold these rows, all other dims unsharded.
    specs: the PartitionSpecs, a tree of the same structure or a prefix of it.
    """
    processes_share = mesh.shape[DATA] / len(_local_data_ranks(mesh))

    def put(x: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """A global array of all processes' rows."""
        shape = (round(len(x) * processes_share), *x.shape[1:])
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x, shape)

    return jax.tree.map(put, rows, jax.tree.broadcast(specs, rows))


def put_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Puts a batch, or a row by itself, on the mesh. On the host it holds this process's local_rows."""
    return put_rows(with_rows(batch), batch_specs(), mesh)
