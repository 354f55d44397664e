"""Whether a step fits into the devices, by its compiled program; what the backward pass keeps follows."""

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import jax
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.kernels.machine import host_memory
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

T = TypeVar("T")


def first_that_fits(
    config: Config,
    memory: int | float | None,
    compiled: Callable[[Config], tuple[T, int | None]],
    say: Callable[[str], None],
    *,
    writes_layers: bool = False,
) -> T:
    """Decides on compute.remat "auto": the first of CHOICES whose step takes at most ROOM of a device, else
    "full", which is taken at once where the memory is None: not known.

    compiled: (config) -> (its compiled step, the bytes that it needs, or None if they are too many for the
    compiler). say: prints what was chosen. writes_layers: whether the first choice has its layers written out
    (compute.unroll_layers); where that does not fit, loops are tried. Returns the first of what `compiled`
    returns.
    """
    if config.compute.remat != "auto":
        return compiled(config)[0]
    if memory is None:
        return compiled(_with(config, remat="full"))[0]
    configs = [_with(config, remat=choice) for choice in CHOICES]
    if writes_layers:
        configs.insert(0, _with(config, remat=CHOICES[0], unroll_layers=True))
    for each in configs:
        step, needed = compiled(each)
        if needed is not None and needed <= ROOM * memory:
            layers = ", layers written out" if each.compute.unroll_layers else ""
            takes = f"a step takes {size_text(needed)} of {size_text(memory)} a device"
            say(f"compute.remat: {each.compute.remat}{layers}; {takes}")
            return step
    say(f"compute.remat: full; to keep more takes over {ROOM:.0%} of {size_text(memory)} a device")
    return compiled(_with(config, remat="full"))[0]


def fitting_step(
    blueprint: Blueprint, mesh: Mesh, state: TrainState, batch: Batch, say: Callable[[str], None]
) -> Any:
    """make_train_step, with what first_that_fits decides by the memory of the devices.

    Layers are written out first where Blueprint.writes_layers says so. The step that is taken is not compiled
    again. All processes call it together, and choose alike: memory is
    that of the machines, not what is free.
    """

    def compiled(config: Config) -> tuple[Any, int | None]:
        """The step of a config, and its bytes where the choice depends on them."""
        step: Any = make_train_step(Blueprint(config), mesh)
        return step, _bytes_of(step, state, batch) if config is not blueprint.config else None

    writes_layers = blueprint.writes_layers(mesh)
    return first_that_fits(blueprint.config, device_memory(), compiled, say, writes_layers=writes_layers)


def _with(config: Config, **compute: Any) -> Config:
    return replace(config, compute=replace(config.compute, **compute))


def _bytes_of(step: Any, state: TrainState, batch: Batch) -> int | None:
    """Bytes of a device that the step needs; None where the compiler finds that they are too many."""
    try:
        return step_bytes(step.compiled(state, batch))
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
        sizes: list[int | None] = [host_memory() // on_machines[platform.node()]]
    else:
        sizes = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    known = [size for of_process in exchange(sizes) for size in of_process]
    return min(known) if all(known) else None
