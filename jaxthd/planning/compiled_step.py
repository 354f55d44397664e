"""The training step compiled for simulated CPU devices: what the compiler says of its memory and traffic."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxthd.config import Config
from jaxthd.kernels.choose import using
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.mesh import batch_specs, make_mesh
from jaxthd.parallel.schedule import Schedule, make_schedule
from jaxthd.parallel.stages import to_stages
from jaxthd.planning.costs import Traffic, stage_runs
from jaxthd.planning.program import UNOPTIMIZED, received_bytes
from jaxthd.steps.state import abstract_state, stages_of, state_shardings
from jaxthd.steps.step import make_train_step


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

    state = jax.eval_shape(lambda state: to_stages(state, stages_of(config)), abstract_state(config))
    state = jax.tree.map(on_mesh, state, state_shardings(config, mesh))
    batch = (
        on_mesh(x, NamedSharding(mesh, spec))
        for x, spec in zip(abstract_batch(config), batch_specs(), strict=True)
    )
    step: Any = make_train_step(config, mesh)
    return step.lower(state, Batch(*batch))


def abstract_batch(config: Config) -> Batch:
    """A step's batch, with shapes and dtypes for arrays."""
    data, mels = config.data, config.model.encoder.num_mels
    tokens, audio = (data.rows, data.capacity), (data.rows, data.audio_capacity)
    ahead = (data.rows, config.depths_trained, data.capacity)
    frames = (data.rows, data.audio_capacity // SUBSAMPLING)
    of_tokens = {name: (tokens, jnp.int32) for name in Batch._fields}
    special = {
        "weights": (tokens, jnp.float32),
        "mels": ((*audio, mels), jnp.float32),
        "mel_mask": (audio, jnp.bool_),
        "chunk_ids": (frames, jnp.int32),
        "chunk_positions": (frames, jnp.int32),
        "future_tokens": (ahead, jnp.int32),
        "future_audio_slots": (ahead, jnp.int32),
        "future_targets": (ahead, jnp.int32),
        "future_weights": (ahead, jnp.float32),
    }
    return Batch(**{k: jax.ShapeDtypeStruct(*v) for k, v in (of_tokens | special).items()})


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
    runs = dict.fromkeys(("stage", "stage_gradient"), stage_runs(config, stages_of(config), schedule))
    runs |= {part: schedule.microbatches for part in ("enter", "leave_gradient", "enter_gradient")}

    def often(name: str) -> float:
        _, scope, operation = ("", "", *name.split("/"))[-3:]
        return float(runs[scope] / schedule.ticks) if operation == "cond" and scope in runs else 1.0

    return often


def schedule_of(config: Config) -> Schedule:
    return make_schedule(config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank)
