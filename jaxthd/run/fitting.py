"""The training step that keeps as many activations as the devices' memory holds."""

import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.packing.batch import Batch
from jaxthd.parallel.processes import exchange
from jaxthd.planning.compiled_step import step_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.tables import size_text

ROOM = 0.8
"""Share of a device's memory that a step may take to keep activations; validation needs room too."""
CHOICES: tuple[Literal["none", "selective"], ...] = ("none", "selective")
"""Values of compute.remat that are tried, in this order, before "full"."""


def fitting_step(
    blueprint: Blueprint, mesh: Mesh, state: TrainState, batch: Batch, say: Callable[[str], None]
) -> Any:
    """make_train_step, with a value for compute.remat "auto": the first of CHOICES whose step, compiled,
    takes at most ROOM of a device, else "full".

    The step that is taken is not compiled again. All processes call it together, and choose alike: memory is
    that of the machines, not what is free. say: prints what was chosen.
    """
    config = blueprint.config
    memory = device_memory() if config.compute.remat == "auto" else None
    if memory is None:
        return make_train_step(blueprint, mesh)
    for choice in CHOICES:
        step: Any = make_train_step(Blueprint(_with(config, choice)), mesh)
        needed = _bytes_of(step, state, batch)
        if needed is not None and needed <= ROOM * memory:
            say(f"compute.remat: {choice}; a step takes {size_text(needed)} of {size_text(memory)} a device")
            return step
    say(f"compute.remat: full; to keep more takes over {ROOM:.0%} of {size_text(memory)} a device")
    return make_train_step(Blueprint(_with(config, "full")), mesh)


def _with(config: Config, remat: Literal["none", "selective", "full"]) -> Config:
    return replace(config, compute=replace(config.compute, remat=remat))


def _bytes_of(step: Any, state: TrainState, batch: Batch) -> int | None:
    """Bytes of a device that the step needs; None where the compiler finds that they are too many."""
    try:
        return step_bytes(step.lower(state, batch).compile())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def device_memory() -> int | None:
    """Bytes of the smallest device of all processes that XLA may use; None where one does not say.

    CPU devices share the memory of their machine, or of its control group, alike.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        on_machines = Counter[str]()
        for machine, count in exchange((platform.node(), len(devices))):
            on_machines[machine] += count
        sizes: list[int | None] = [_host_memory() // on_machines[platform.node()]]
    else:
        sizes = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [size for of_process in exchange(sizes) for size in of_process]
    return min(known) if all(known) else None


def _host_memory() -> int:
    """Bytes of memory of this machine, or of the control group that the process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total
