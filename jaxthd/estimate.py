"""Estimates what a run will cost: memory of a device, bytes on the wire, pipeline bubble.

    jaxthd estimate configs/nemotron3_nano.py --mesh.data 16
    jaxthd estimate runs/my --no-compile

Bytes of the state are exact. Temporary memory and bytes on the wire are given twice: by closed forms
(jaxthd/planning/memory.py and traffic.py), and from the training step, compiled for as many simulated CPU
devices as the mesh has; no array of the run's size is ever allocated. CPUs compute bfloat16 in float32, so
the closed forms are given for float32 too, for comparison. For a config of jaxthd grpo the compiled programs
are those of its steps: rollouts, scores, the gradient of a batch and the update. Compiling Nemotron-3-Nano
takes minutes; --no-compile skips it. For more devices than a machine has, a further part says what the
machines' links, storage and loading take, and what fails first (jaxthd/planning/cluster.py), on paper.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.objectives.answers import draws_answers
from jaxthd.parallel.mesh import CONTEXT, batch_specs, bytes_of, on_device
from jaxthd.planning.bubble import describe_bubble
from jaxthd.planning.cluster import Cluster, describe_cluster
from jaxthd.planning.compiled_grpo import Program, measure_grpo
from jaxthd.planning.compiled_step import Measured, abstract_batch, in_float32, measure
from jaxthd.planning.layouts import laid_out, possible_layouts
from jaxthd.planning.memory import temporary_memory
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.sizes import Number
from jaxthd.planning.stage_memory import decided, describe_stages, has_stages
from jaxthd.planning.traffic import step_traffic
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, validate

_OF_MACHINES = Cluster()
OPTIONS: dict[str, dict[str, Any]] = {
    "no-compile": {"action": "store_true", "help": "closed forms only"},
    "device-memory": {
        "type": float,
        "metavar": "GIB",
        "help": "memory of a device, for what stages may keep",
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
    config, path, _, options, _ = parse_command_line("estimate", argv, OPTIONS, __doc__)
    jax.config.update("jax_platforms", "cpu")
    if not options.no_compile:
        simulate_devices(config.mesh.devices)
    facts = DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    for warning in validate(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    memory = None if options.device_memory is None else round(options.device_memory * 2**30)
    stages = describe_stages(config, memory) if has_stages(config) else ""
    config = decided(config, memory)
    draws = draws_answers(objective_of(config))
    found = measure_grpo(config) if draws and not options.no_compile else None
    measured = None if options.no_compile else found.update if found else measure(config)
    mesh = f"Mesh (data, context, pipeline, tensor) = {config.mesh.sizes}: {config.mesh.devices} devices."
    print(f"{path}. {mesh}\n\n{estimate(config, measured)}")
    if stages:
        print(f"\n{stages}")
    if config.mesh.devices > options.gpus_a_machine:
        cluster = Cluster(gpus=options.gpus_a_machine, network=1e9 * options.network_gb)
        print(f"\n{describe_cluster(config, cluster)}")
    if found:
        print(f"\n{programs_table(found.programs)}")
    if measured:
        print(f"\nCompiled in {measured.seconds:.0f} s for simulated CPU devices.")


def estimate(config: Config, measured: Measured | None = None) -> str:
    """All tables as text. measured: figures of the compiled step, to stand beside the closed forms."""
    table = _Table(has_both=config.compute.dtype == "bfloat16", is_compiled=measured is not None)
    return "\n\n".join(
        [
            _state(table, config, measured),
            _temporary(table, config, measured),
            _received(table, config, measured),
            *([_layouts(config)] if config.mesh.context > 1 else []),
            describe_bubble(Blueprint(config)),
        ]
    )


def programs_table(programs: Sequence[Program]) -> str:
    """What each program of a step of jaxthd grpo needs besides the state and a batch."""
    head = ("Programs of a step, compiled", "held", "temporary")
    rows = [(x.name, size_text(x.held), size_text(x.temporary)) for x in programs]
    most = max(programs, key=lambda x: x.held + x.temporary)
    return (
        f"{aligned([head, *rows], left=(0,))}\n\n"
        f"The most at a time: {size_text(most.held + most.temporary)} ({most.name}), besides the state and "
        "the batches of a step.\nHeld: places with their keys and values, and weights on another mesh; "
        "scores; gradients. In float32."
    )


class _Table:
    """Rows of closed forms: as configured, in float32 if that differs, and compiled with the difference."""

    def __init__(self, *, has_both: bool, is_compiled: bool) -> None:
        self._has_both, self._is_compiled = has_both, is_compiled
        self.columns = ["closed form"] + ["in float32"] * has_both + ["compiled", "off by"] * is_compiled

    def row(self, name: str, closed: Number, in_float32: Number, found: Number | None = None) -> list[str]:
        """found: what was compiled; None where the compiler does not tell."""
        cells = [name, size_text(closed)] + [size_text(in_float32)] * self._has_both
        if not self._is_compiled:
            return cells
        return [*cells, "", ""] if found is None else [*cells, size_text(found), _off(in_float32, found)]

    def text(self, title: str, rows: Sequence[Sequence[str]]) -> str:
        return aligned([[title, *self.columns], *rows], left=(0,))


def _off(closed: Number, found: Number) -> str:
    return f"{closed / found - 1:+.1%}" if found else "" if not closed else "all of it"


def _state(table: _Table, config: Config, measured: Measured | None) -> str:
    state = state_bytes(config)
    del state["gradients"]
    state["counters"] = 3 * 4
    total = sum(state.values())
    wide = {**state_bytes(in_float32(config)), "counters": 3 * 4}  # the reference has the compute dtype
    rows = [table.row(name, size, wide[name]) for name, size in state.items()]
    whole = sum(wide[name] for name in state)
    rows.append(table.row("in all, exact", total, whole, measured and measured.state))
    batch = bytes_of(on_device(abstract_batch(config), batch_specs(), config.mesh))
    rows.append(table.row("batch", batch, batch))
    return table.text("State of a device", rows)


def _temporary(table: _Table, config: Config, measured: Measured | None) -> str:
    memory, wide = temporary_memory(config), temporary_memory(in_float32(config))
    rows = [table.row(name, size, wide.kept[name]) for name, size in memory.kept.items()]
    rows.append(["the largest of"] + [""] * len(table.columns))
    rows += [table.row(f"  {name}", size, wide.phases.get(name, 0)) for name, size in memory.phases.items()]
    rows.append(table.row("in all", memory.most, wide.most, measured and measured.temporary))
    return table.text("Temporary memory of a device", rows)


def _received(table: _Table, config: Config, measured: Measured | None) -> str:
    traffic, wide = step_traffic(config), step_traffic(in_float32(config))
    found = measured.received if measured else {}
    rows = []
    for axes in sorted({*traffic, *found}):
        compiled = found.get(axes, 0) if measured else None
        rows.append(table.row(" + ".join(axes), traffic.get(axes, 0), wide.get(axes, 0), compiled))
    return table.text("Bytes a device receives in a step, by axes", rows or [table.row("none", 0, 0)])


def _layouts(config: Config) -> str:
    """What the context layouts exchange, side by side."""
    rows = []
    for layout in possible_layouts(config):
        under = laid_out(config, layout)
        none_cut = replace(under, compute=replace(under.compute, context_cuts=0))
        least, most = (step_traffic(x).get((CONTEXT,), 0) for x in (none_cut, under))
        rows.append([layout, size_text(least), size_text(most)])
    head = ["Context layouts: bytes over context", "at least", "at most"]
    return (
        f"{aligned([head, *rows], left=(0,))}\n\nwhole: at least where no document of a step is divided, at "
        "most where each row has\ncompute.context_cuts divided ones. jaxthd plan weighs them for your data."
    )


if __name__ == "__main__":
    with readable_errors():
        main()
