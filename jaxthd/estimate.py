"""What a run will cost, before it runs: memory of a device, bytes on the wire, pipeline bubble.

    python -m jaxthd.estimate --config configs/nemotron3_nano.py [--mesh.data 16 ...] [--no-compile]

State is exact. Temporary memory and bytes are told twice: in closed form (jaxthd/planning/costs.py), and read from
the training step, compiled for as many simulated CPU devices as the mesh has; nothing of the run's size is
ever allocated. These devices compute bfloat16 in float32, so the closed form is told for float32 too.
Compiling Nemotron-3-Nano takes minutes; --no-compile leaves it out.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxthd.config import Config
from jaxthd.describe import state_bytes
from jaxthd.errors import readable_errors
from jaxthd.kernels.choose import using
from jaxthd.models.stacks import to_stages
from jaxthd.packing.batch import AUDIO_FIELDS, Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.mesh import batch_specs, bytes_of, make_mesh, on_device
from jaxthd.parallel.schedule import Schedule, make_schedule
from jaxthd.planning.costs import Costs, Number, Traffic, stage_runs
from jaxthd.planning.program import UNOPTIMIZED, received_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.steps.state import abstract_state, state_shardings
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.command_line import parse_command_line, simulate_devices
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, validate


class Measured(NamedTuple):
    """Of a device, from the compiled step. state: bytes of it, whose place the new one takes. temporary:
    bytes besides state and batch. received: bytes in a step, of the busiest device.
    """

    state: int
    temporary: int
    received: Traffic
    seconds: float


def lowered_step(config: Config) -> Any:
    """The training step for the shapes of config, on the mesh's devices: nothing is allocated.

    Attention is XLA's, which compiles anywhere; so is the scan where it is auto.
    """
    scan = config.compute.scan_backend.replace("auto", "xla")
    config = using(config, attention_backend="xla", scan_backend=scan)
    mesh = make_mesh(config.mesh)

    def on_mesh(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.eval_shape(
        lambda state: to_stages(state, Blueprint(config).stages), abstract_state(Blueprint(config))
    )
    state = jax.tree.map(on_mesh, state, state_shardings(Blueprint(config), mesh))
    batch = abstract_batch(config)
    specs = jax.tree.broadcast(batch_specs(), batch)
    batch = jax.tree.map(lambda x, spec: on_mesh(x, NamedSharding(mesh, spec)), batch, specs)
    step: Any = make_train_step(Blueprint(config), mesh)
    return step.lower(state, batch)


def abstract_batch(config: Config) -> Batch:
    """A step's batch, with shapes and dtypes for arrays."""
    data, encoder = config.data, config.model.encoder
    tokens, frames = (data.rows, data.capacity), (data.rows, data.audio_capacity // SUBSAMPLING)
    future = (data.rows, config.depths_trained, data.capacity)

    def ints(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    audio: dict[str, Any] = dict.fromkeys(AUDIO_FIELDS)
    if encoder is not None and data.audio_capacity:
        mels = (data.rows, data.audio_capacity)
        audio = {
            "audio_slots": ints(tokens),
            "mels": jax.ShapeDtypeStruct((*mels, encoder.num_mels), jnp.float32),
            "mel_mask": jax.ShapeDtypeStruct(mels, jnp.bool_),
            "chunk_ids": ints(frames),
            "chunk_positions": ints(frames),
            "future_audio_slots": ints(future),
        }
    of_objective = objective_of(config).extras
    return Batch(
        tokens=ints(tokens),
        targets=ints(tokens),
        weights=jax.ShapeDtypeStruct(tokens, jnp.float32),
        segment_ids=ints(tokens),
        positions=ints(tokens),
        future_tokens=ints(future),
        future_targets=ints(future),
        future_weights=jax.ShapeDtypeStruct(future, jnp.float32),
        extras={name: jax.ShapeDtypeStruct(tokens, jnp.float32) for name in of_objective},
        **audio,
    )


def measure(config: Config) -> Measured:
    """Compiles the step; bfloat16 as float32, which is what a CPU makes of it."""
    start = time.perf_counter()
    program = lowered_step(in_float32(config)).compile(compiler_options=UNOPTIMIZED)
    memory = program.memory_analysis()
    received = received_bytes(program.as_text(), config.mesh, runs_by_schedule(config))
    return Measured(
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        {axes: float(of_device.max()) for axes, of_device in received.items() if of_device.any()},
        time.perf_counter() - start,
    )


def in_float32(config: Config) -> Config:
    if config.compute.dtype != "bfloat16":
        return config
    return replace(config, compute=replace(config.compute, dtype="float32"))


def runs_by_schedule(config: Config) -> Callable[[str], float]:
    """For received_bytes: how often, on average over the ticks, the schedule runs the pipeline's parts.

    Other branches are which stage a rank has; loops of unknown length the rounds of the experts' exchange,
    of which usually one is needed.
    """
    schedule = schedule_of(config)
    runs = dict.fromkeys(("stage", "stage_gradient"), stage_runs(config, Blueprint(config).stages, schedule))
    runs |= {part: schedule.microbatches for part in ("enter", "leave_gradient", "enter_gradient")}

    def often(name: str) -> float:
        _, scope, operation = ("", "", *name.split("/"))[-3:]
        return float(runs[scope] / schedule.ticks) if operation == "cond" and scope in runs else 1.0

    return often


def schedule_of(config: Config) -> Schedule:
    return make_schedule(config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank)


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
    schedule, stages = schedule_of(config), Blueprint(config).stages
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
