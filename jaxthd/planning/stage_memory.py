"""What a pipeline stage keeps for its backward pass: what each choice costs, and what "auto" means."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import jax

from jaxthd.config import Config
from jaxthd.parallel.mesh import batch_specs, bytes_of, on_device
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.planning.compiled_step import abstract_batch
from jaxthd.planning.memory import temporary_memory
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.sizes import Number
from jaxthd.terminal.tables import aligned, size_text

ROOM = 0.8
"""The share of a device's memory that the closed forms may fill for "auto" to keep all activations: they are
off by up to a third of the temporary memory, and other programs need room too."""


class StageChoice(NamedTuple):
    """A value of compute.remat_stage. passes: how often a stage runs forward for each microbatch. temporary,
    needed: bytes of a device, in closed form; needed: with the state and a batch."""

    recomputes: Literal["stage", "blocks", "nothing"]
    passes: int
    temporary: Number
    needed: Number


def has_stages(config: Config) -> bool:
    return config.mesh.pipeline > 1


def stage_choices(config: Config) -> list[StageChoice]:
    """Those of a config with a pipeline, the one that keeps least first."""
    state = state_bytes(config)
    del state["gradients"]  # they are temporary
    held = sum(state.values()) + bytes_of(on_device(abstract_batch(config), batch_specs(), config.mesh))
    passes = {"stage": 2 + config.compute.remat_llm, "blocks": 2, "nothing": 1}

    def choice(recomputes: Literal["stage", "blocks", "nothing"]) -> StageChoice:
        temporary = temporary_memory(with_choice(config, recomputes)).most
        return StageChoice(recomputes, passes[recomputes], temporary, held + temporary)

    return [choice("stage"), choice("blocks"), choice("nothing")]


def with_choice(config: Config, recomputes: Literal["stage", "blocks", "nothing"]) -> Config:
    return replace(config, compute=replace(config.compute, remat_stage=recomputes))


def decided(config: Config, memory: int | None, say: Callable[[str], None] = lambda line: None) -> Config:
    """The config with another value for compute.remat_stage "auto": "nothing" where all activations fit into
    a device. memory: bytes of a device; None where they are not known. say: prints a line.
    """
    if not has_stages(config) or config.compute.remat_stage != "auto":
        return config
    default, keeping = config.compute.recomputed_of_stage, stage_choices(config)[-1]
    if memory is None:
        return with_choice(config, default)
    found = "nothing" if keeping.needed <= ROOM * memory else default
    say(
        f"compute.remat_stage: {found}; to keep all activations of stages takes about "
        f"{size_text(keeping.needed)} of {size_text(memory)}"
    )
    return with_choice(config, found)


def decided_here(config: Config) -> Config:
    """decided, by the memory of the devices of all processes, which call it together."""
    if not has_stages(config):
        return config
    return decided(config, device_memory(), lambda line: print(line) if is_first() else None)


def device_memory() -> int | None:
    """Bytes of the smallest device of all processes that XLA may use; None where one does not say."""
    found = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    told = [size for of_process in exchange(found) for size in of_process]
    return min(told) if all(told) else None


def describe_stages(config: Config, memory: int | None) -> str:
    """The choices as a table, with the one that is taken, as text. memory: of a device; None: not known."""
    taken = decided(config, memory).compute.recomputed_of_stage
    rows = [
        (
            c.recomputes,
            str(c.passes),
            size_text(c.temporary),
            size_text(c.needed),
            "taken" * (c.recomputes == taken),
        )
        for c in stage_choices(config)
    ]
    head = ("What a stage recomputes", "runs forward", "temporary", "with state and batch", "")
    how = f"compute.remat_stage is {config.compute.remat_stage}"
    if config.compute.remat_stage == "auto":
        how += (
            ": the memory of a device is not known here (--device-memory GIB)"
            if memory is None
            else f": nothing, where that takes at most {ROOM:.0%} of {size_text(memory)}"
        )
    return f"{aligned([head, *rows], left=(0, 4))}\n{how}."
