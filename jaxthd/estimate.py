"""Estimates what a run will cost: memory of a device, bytes on the wire, pipeline bubble.

    jaxthd estimate configs/nemotron3_nano.py --mesh.data 16
    jaxthd estimate runs/my --no-compile

Bytes of the state are exact. Temporary memory and bytes on the wire are those of the training step, compiled
for as many simulated CPU devices as the mesh has; no array of the run's size is ever allocated. A GPU's
compiler may hold more or less at a time. For a config of jaxthd grpo the compiled programs are those of its
steps: rollouts, scores, the gradient of a batch and the update. Compiling Nemotron-3-Nano takes minutes on
two cores, for 1,024 devices as for 8; --no-compile leaves out what needs it. For more devices than a machine
has, a further part says what the machines' links, storage and loading take, and what fails first
(jaxthd/planning/cluster.py), on paper.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.objectives.answers import draws_answers
from jaxthd.parallel.mesh import batch_specs, bytes_of, on_device
from jaxthd.planning.cluster import GIB, Cluster, describe_cluster
from jaxthd.planning.compiled_grpo import Program, measure_grpo
from jaxthd.planning.compiled_step import Measured, abstract_batch, measure
from jaxthd.planning.fitting import first_that_fits
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.sizes import with_sizes
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, validate

_OF_MACHINES = Cluster()
OPTIONS: dict[str, dict[str, Any]] = {
    "no-compile": {"action": "store_true", "help": "state, batch and bubble only, at once"},
    "device-memory": {
        "type": float,
        "default": _OF_MACHINES.memory / GIB,
        "metavar": "GIB",
        "help": "memory of a device that a run may use",
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
    config, path, run, options, _ = parse_command_line("estimate", argv, OPTIONS, __doc__)
    jax.config.update("jax_platforms", "cpu")
    if not options.no_compile:
        simulate_devices(config.mesh.devices)
    config = with_sizes(config, path if run else Path("runs") / path.stem)
    facts = DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    for warning in validate(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    mesh = f"Mesh (data, context, pipeline, tensor) = {config.mesh.sizes}: {config.mesh.devices} devices."
    print(f"{path}. {mesh}\n\n{_state(config)}\n\n{describe_bubble(Blueprint(config))}")
    if options.no_compile:
        return
    drawn = measure_grpo(config) if draws_answers(objective_of(config)) else None
    memory = options.device_memory * GIB
    step = drawn.update if drawn else first_that_fits(config, memory, _measured, print)
    print(f"\n{describe_step(step)}")
    if config.mesh.devices > options.gpus_a_machine:
        cluster = Cluster(
            gpus=options.gpus_a_machine,
            memory=memory,
            network=1e9 * options.network_gb,
        )
        print(f"\n{describe_cluster(config, cluster, step)}")
    if drawn:
        print(f"\n{programs_table(drawn.programs)}")
    print(f"\nCompiled in {step.seconds:.0f} s for simulated CPU devices.")


def _measured(config: Config) -> tuple[Measured, int]:
    """(the figures of the step, the bytes of a device that it takes)."""
    step, batch = measure(config), on_device(abstract_batch(config), batch_specs(), config.mesh)
    return step, round(step.state + step.temporary + bytes_of(batch))


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
    state = state_bytes(config)
    del state["gradients"]  # they are temporary
    state["counters"] = 3 * 4
    rows = [("State of a device", ""), *((name, size_text(size)) for name, size in state.items())]
    batch = bytes_of(on_device(abstract_batch(config), batch_specs(), config.mesh))
    rows += [("in all, exact", size_text(sum(state.values()))), ("batch", size_text(batch))]
    return aligned(rows, left=(0,))


if __name__ == "__main__":
    with readable_errors():
        main()
