"""The training step that keeps what fits into the devices, by the memory of its compiled program."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.packing.batch import Batch
from jaxthd.parallel.processes import exchange
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.tables import size_text

ROOM = 0.8
"""Share of a device's memory that a step may take to keep all activations; validation needs room too."""


def fitting_step(
    config: Config, mesh: Mesh, state: TrainState, batch: Batch, say: Callable[[str], None]
) -> Any:
    """make_train_step, with a value for compute.remat_stage "auto": "nothing" where the step that keeps all
    activations takes at most ROOM of a device, else the default (ComputeConfig.recomputed_of_stage).

    It compiles the step that keeps all; where that is taken, it is not compiled again. All processes call it
    together. say: prints what was chosen.
    """
    memory = device_memory() if config.mesh.pipeline > 1 and config.compute.remat_stage == "auto" else None
    if memory is None:
        return make_train_step(Blueprint(config), mesh)
    keeping = replace(config, compute=replace(config.compute, remat_stage="nothing"))
    step: Any = make_train_step(Blueprint(keeping), mesh)
    needed = step_bytes(step, state, batch)
    fits = needed <= ROOM * memory
    found = "nothing" if fits else config.compute.recomputed_of_stage
    say(
        f"compute.remat_stage: {found}; to keep all activations of stages takes {size_text(needed)} of "
        f"{size_text(memory)}"
    )
    return step if fits else make_train_step(Blueprint(config), mesh)


def step_bytes(step: Any, state: TrainState, batch: Batch) -> int:
    """Bytes of a device that a jitted step needs: arguments, results that are not written over them, and what
    lasts within it."""
    memory = step.lower(state, batch).compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def device_memory() -> int | None:
    """Bytes of the smallest device of all processes that XLA may use; None where one does not say."""
    found = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    told = [size for of_process in exchange(found) for size in of_process]
    return min(told) if all(told) else None
