"""Estimates what a run will cost: memory of a device, bytes on the wire, pipeline bubble.

    python -m jaxthd.estimate --config configs/nemotron3_nano.py [--mesh.data 16 ...] [--no-compile]

Bytes of the state are exact. Temporary memory and bytes on the wire are given twice: by closed forms
(jaxthd/planning/memory.py and traffic.py), and from the training step, compiled for as many simulated CPU
devices as the mesh has; no array of the run's size is ever allocated. CPU devices compute bfloat16 in float32,
so for comparison the closed forms are given for float32 too. Compiling Nemotron-3-Nano takes minutes;
--no-compile skips it.
"""

import sys
from collections.abc import Sequence

import jax

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.parallel.mesh import batch_specs, bytes_of, on_device
from jaxthd.planning.compiled_step import Measured, abstract_batch, in_float32, measure, schedule_of
from jaxthd.planning.costs import Costs, Number
from jaxthd.planning.parameters import state_bytes
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.state import stages_of
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, validate


def estimate(config: Config, measured: Measured | None = None) -> str:
    """All tables as text; what is measured stands beside the closed forms."""
    has_both = config.compute.dtype == "bfloat16"
    costs, wide = Costs(config), Costs(in_float32(config))
    columns = ["closed form"] + ["in float32"] * has_both + ["compiled", "off by"] * (measured is not None)

    def line(name: str, own: Number, in_float32: Number, found: Number | None = None) -> list[str]:
        cells = [name, size_text(own)] + [size_text(in_float32)] * has_both
        if measured is None:
            return cells
        return [*cells, "", ""] if found is None else [*cells, size_text(found), _off(in_float32, found)]

    def table(title: str, rows: Sequence[Sequence[str]]) -> str:
        return aligned([[title, *columns], *rows], left=(0,))

    state = state_bytes(config)
    del state["gradients"]
    state["counters"] = 3 * 4
    total = sum(state.values())
    rows = [line(name, size, size) for name, size in state.items()]
    rows.append(line("in all, exact", total, total, measured and measured.state))
    batch = bytes_of(on_device(abstract_batch(config), batch_specs(), config.mesh))
    rows.append(line("batch", batch, batch))

    memory, in_wide = costs.memory(), wide.memory()
    temporary = [line(name, size, in_wide.kept[name]) for name, size in memory.kept.items()]
    phases = [line(f"  {name}", size, in_wide.phases.get(name, 0)) for name, size in memory.phases.items()]
    empty = ["the largest of"] + [""] * len(columns)
    in_all = line("in all", memory.most, in_wide.most, measured and measured.temporary)

    traffic, in_wide_traffic = costs.traffic(), wide.traffic()
    received = measured.received if measured else {}
    bytes_rows = [
        line(
            " + ".join(axes),
            traffic.get(axes, 0),
            in_wide_traffic.get(axes, 0),
            received.get(axes, 0) if measured else None,
        )
        for axes in sorted({*traffic, *received})
    ]
    return "\n\n".join(
        [
            table("State of a device", rows),
            table("Temporary memory of a device", [*temporary, empty, *phases, in_all]),
            table("Bytes a device receives in a step, by axes", bytes_rows or [line("none", 0, 0)]),
            _bubble(config),
        ]
    )


def _off(closed: Number, found: Number) -> str:
    return f"{closed / found - 1:+.1%}" if found else "" if not closed else "all of it"


def bubble_formula(ranks: int, chunks: int, microbatches: int) -> float:
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def _bubble(config: Config) -> str:
    schedule, stages = schedule_of(config), stages_of(config)
    p, v, m = schedule.ranks, schedule.chunks, schedule.microbatches
    formula = bubble_formula(p, v, m)
    lines = [
        f"Pipeline: ranks P = {p}, stages of a rank V = {v}, microbatches M = {m}. Ticks: {schedule.ticks}; "
        f"inputs kept: {schedule.slots}.",
        f"Bubble: {schedule.bubble:.1%} of the step; (P - 1) / (V M + P - 1) = {formula:.1%}.",
    ]
    return "\n".join([*lines, f"Stages: {' | '.join(stages.patterns)}"] if p * v > 1 else lines)


def main(argv: list[str] | None = None) -> None:
    no_compile = {"action": "store_true", "help": "closed forms only"}
    config, path, options = parse_command_line("estimate", argv, {"no-compile": no_compile})
    jax.config.update("jax_platforms", "cpu")
    if not options.no_compile:
        simulate_devices(config.mesh.devices)
    facts = DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    for warning in validate(config, facts):
        print(f"warning: {warning}", file=sys.stderr)
    measured = None if options.no_compile else measure(config)
    mesh = f"Mesh (data, context, pipeline, tensor) = {config.mesh.sizes}: {config.mesh.devices} devices."
    print(f"{path}. {mesh}\n\n{estimate(config, measured)}")
    if measured:
        print(f"\nCompiled in {measured.seconds:.0f} s for simulated CPU devices.")


if __name__ == "__main__":
    with readable_errors():
        main()
