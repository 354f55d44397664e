"""Estimates a run: memory of a device, time of a step, bytes on the wire, pipeline bubble.

    jaxthd estimate configs/nemotron3_nano.py --mesh.data 16
    jaxthd estimate runs/my --no-compile

The first line says what a device needs, whether it fits, and how long a step takes: on this machine's GPUs;
on its CPUs, if it has no GPU and the mesh fits them; else on an H100, or on what --device-memory and
--device-tflops describe. The time is a prediction, from the step's products with weights. Bytes of the state
are exact. Temporary memory and bytes on the wire are those of the training step, compiled
for as many simulated CPU devices as the mesh has; no array of the run's size is ever allocated. A GPU's
compiler may hold more or less at a time. For a config of jaxthd grpo the compiled programs are those of its
steps: rollouts, scores, the gradient of a batch and the update. Compiling Nemotron-3-Nano takes minutes on
two cores, for 1,024 devices as for 8; --no-compile leaves out what needs it. For more devices than a machine
has, a further part says what the machines' links, storage and loading take, and what fails first
(jaxthd/planning/cluster.py), on paper.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.kernels.machine import nvidia_gpus
from jaxthd.objectives.answers import draws_answers
from jaxthd.parallel.mesh import batch_specs, bytes_of, on_device
from jaxthd.planning.cluster import GIB, Cluster, describe_cluster
from jaxthd.planning.compiled_grpo import Program, measure_grpo
from jaxthd.planning.compiled_step import Measured, abstract_batch, measure
from jaxthd.planning.fitting import first_that_fits
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.recurrences import describe_recurrences
from jaxthd.planning.sizes import with_sizes
from jaxthd.planning.verdict import Devices, chosen_devices, devices_text, gpus_of, verdict
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.terminal.waiting import waiting
from jaxthd.validate import DeviceFacts, validate

_OF_MACHINES = Cluster()
OPTIONS: dict[str, dict[str, Any]] = {
    "no-compile": {"action": "store_true", "help": "state, batch and bubble only, at once"},
    "device-memory": {
        "type": float,
        "metavar": "GIB",
        "help": "memory of a device that a run may use; by default what jax takes of this machine's GPU, or "
        f"{_OF_MACHINES.memory / GIB:g} GiB",
    },
    "device-tflops": {
        "type": float,
        "metavar": "TFLOPS",
        "help": "bfloat16 TFLOP/s of a device at its peak; by default those of this machine's GPU, or "
        f"{_OF_MACHINES.flops / 1e12:g}",
    },
    "gpus-a-machine": {"type": int, "default": _OF_MACHINES.gpus, "metavar": "N", "help": "joined by NVLink"},
    "network-gb": {
        "type": float,
        "default": _OF_MACHINES.network / 1e9,
        "metavar": "GB",
        "help": "a second into one GPU, from other machines",
    },
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("estimate", argv, OPTIONS, __doc__)
    config, options = line.config, line.options
    jax.config.update("jax_platforms", "cpu")
    if not options.no_compile:
        simulate_devices(config.mesh.devices)
    with redirect_stdout(sys.stderr):  # standard output begins with the verdict
        config = with_sizes(config, line.path if line.run else Path("runs") / line.path.stem)
    facts = DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    for warning in validate(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    devices = devices_text(config)
    about = [f"\n{line.path}. Mesh (data, context, pipeline, tensor) = {config.mesh.sizes}: {devices}."]
    about += [_state(config), describe_bubble(Blueprint(config))]
    found, memory, tflops = nvidia_gpus(), options.device_memory, options.device_tflops
    cluster = Cluster(gpus=options.gpus_a_machine, network=1e9 * options.network_gb)
    gpus = gpus_of(cluster, found, memory and memory * GIB, tflops and tflops * 1e12)
    if options.no_compile:
        least = size_text(sum(_state_bytes(config).values()) + _batch_bytes(config))
        print(f"Needs over {least} a device: that is state and batch (--no-compile leaves out the rest)")
        print(*filter(None, (*about, describe_recurrences(config, gpus.cluster.bandwidth))), sep="\n\n")
        return
    estimated = _estimated(config, gpus)
    needed, config = estimated.needed, estimated.config
    on = chosen_devices(config, needed, gpus, is_given=bool(found or memory or tflops))
    print(verdict(config, needed, None if estimated.programs else estimated.step, on))
    about += [describe_recurrences(config, gpus.cluster.bandwidth), describe_step(estimated.step)]
    print(*filter(None, about), sep="\n\n")
    if config.mesh.devices > options.gpus_a_machine:
        print(f"\n{describe_cluster(config, gpus.cluster, estimated.step)}")
    if estimated.programs:
        print(f"\n{programs_table(estimated.programs)}")
    print(f"\nCompiled in {estimated.step.seconds:.0f} s for simulated CPU devices.")


class Estimated(NamedTuple):
    """The figures of compiled programs.

    config: with the compute.remat that was chosen. needed: bytes of a device. step: the training step, or
    what stands for it where answers are drawn: then `programs` are those of a step.
    """

    config: Config
    needed: int
    step: Measured
    programs: list[Program]


def _estimated(config: Config, gpus: Devices) -> Estimated:
    """Compiles the programs of a step, and says so meanwhile."""
    simulated, batch = devices_text(config, "simulated "), _batch_bytes(config)
    if draws_answers(objective_of(config)):
        with waiting(f"compiling the programs of a step for {simulated}"):
            drawn = measure_grpo(config)
        needed = drawn.update.state + max(x.held + x.temporary for x in drawn.programs) + batch
        return Estimated(config, needed, drawn.update, drawn.programs)
    tried: list[Config] = []

    def compiled(choice: Config) -> tuple[Measured, int]:
        """(the figures of the step, the bytes of a device that it takes)."""
        tried.append(choice)
        remat = choice.compute.remat
        with waiting(f"compiling the step for {simulated}, with compute.remat {remat}"):
            step = measure(choice)
        return step, step.state + step.temporary + batch

    step = first_that_fits(config, gpus.cluster.memory, compiled, partial(print, file=sys.stderr))
    return Estimated(tried[-1], step.state + step.temporary + batch, step, [])


def describe_step(step: Measured) -> str:
    """Memory of a device and the bytes that it receives, as text."""
    held = [
        ("Memory of a device", ""),
        ("state", size_text(step.state)),
        ("temporary: gradients, activations, gathered weights", size_text(step.temporary)),
    ]
    received = [("Bytes a device receives in a step, by axes", "")]
    received += [(" + ".join(axes), size_text(size)) for axes, size in sorted(step.received.items())]
    received += [("none", size_text(0))] * (not step.received)
    return f"{aligned(held, left=(0,))}\n\n{aligned(received, left=(0,))}"


def describe_bubble(blueprint: Blueprint) -> str:
    """The pipeline's schedule, its bubble (the share of a step in which ranks are idle), and the blocks of
    each stage, as text."""
    schedule, patterns = blueprint.schedule, blueprint.stages.patterns
    p, v, m = schedule.ranks, schedule.chunks, schedule.microbatches
    lines = [
        f"Pipeline: P = {p} ranks, V = {v} stages a rank, M = {m} microbatches. {schedule.ticks} ticks; "
        f"{schedule.slots} inputs kept.",
        f"Bubble: {schedule.bubble:.1%} of the step.",
    ]
    return "\n".join([*lines, f"Stages: {' | '.join(patterns)}"] if p * v > 1 else lines)


def programs_table(programs: Sequence[Program]) -> str:
    """Memory of each program of a step of jaxthd grpo besides the state and a batch."""
    head = ("Programs of a step, compiled", "held", "temporary")
    rows = [(x.name, size_text(x.held), size_text(x.temporary)) for x in programs]
    most = max(programs, key=lambda x: x.held + x.temporary)
    return (
        f"{aligned([head, *rows], left=(0,))}\n\n"
        f"The most at a time: {size_text(most.held + most.temporary)} ({most.name}), besides the state and "
        "the batches of a step.\nHeld: places with their keys and values, and weights on another mesh; "
        "scores; gradients."
    )


def _state(config: Config) -> str:
    """Bytes of the training state, exact, and of a batch."""
    state = _state_bytes(config)
    rows = [("State of a device", ""), *((name, size_text(size)) for name, size in state.items())]
    rows += [("in all, exact", size_text(sum(state.values()))), ("batch", size_text(_batch_bytes(config)))]
    return aligned(rows, left=(0,))


def _state_bytes(config: Config) -> dict[str, int]:
    """Bytes of a device by part of the training state; gradients are temporary."""
    state = state_bytes(config)
    del state["gradients"]
    return state | {"counters": 3 * 4}


def _batch_bytes(config: Config) -> int:
    """Bytes of a device that a step's batch takes."""
    return int(bytes_of(on_device(abstract_batch(config), batch_specs(), config.mesh)))


if __name__ == "__main__":
    with readable_errors():
        main()
