"""The part of the documents that a process reads, in a pipeline of one's own."""

from collections.abc import Sequence

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxthd.parallel.mesh import DATA


def data_shard(mesh: Mesh) -> grain.sharding.ShardOptions:
    """This process's shard of the documents, for grain.DataLoader or documents[index::count].

    Processes whose devices share a data rank hold parts of the same rows, so they read the same documents;
    grain's ShardByJaxProcess gives every process others. Raises ValueError where processes hold different
    numbers of data ranks, or some of each other's.
    """
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0).reshape(mesh.shape[DATA], -1)
    processes = [frozenset(device.process_index for device in devices) for devices in by_rank]
    return shard_of(processes, jax.process_index())


def shard_of(processes: Sequence[frozenset[int]], process: int) -> grain.sharding.ShardOptions:
    """The shard of one process. processes: those that hold each data rank. Raises as data_shard."""
    mine = [rank for rank, found in enumerate(processes) if process in found]
    consecutive = mine == list(range(mine[0], mine[0] + len(mine))) and mine[0] % len(mine) == 0
    same = all(processes[rank] == processes[mine[0]] for rank in mine)
    if len(processes) % len(mine) or not consecutive or not same:
        raise ValueError(
            f"process {process} has devices of the data ranks {mine} of {len(processes)}; expected equal, "
            "consecutive parts of the data axis in all processes: order the mesh's devices by process"
        )
    return grain.sharding.ShardOptions(
        shard_index=mine[0] // len(mine), shard_count=len(processes) // len(mine)
    )
