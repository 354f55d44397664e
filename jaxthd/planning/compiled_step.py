"""Compiles the training step for simulated CPU devices and reads its memory and traffic from the result.

The program is one for all devices, so a mesh of a thousand compiles in minutes on two cores.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxthd.config import ComputeConfig, Config
from jaxthd.kernels.choose import using
from jaxthd.models.stacks import to_stages
from jaxthd.objectives.answers import compares_answers
from jaxthd.packing.batch import AUDIO_FIELDS, Batch
from jaxthd.packing.fit import BufferLimits
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import batch_specs, make_mesh
from jaxthd.planning.program import UNOPTIMIZED, received_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.steps.state import TrainState, abstract_state, state_shardings
from jaxthd.steps.training import make_train_step

ByAxes = dict[tuple[str, ...], float]
"""Bytes received, by the mesh axes in which the senders differ from the receiver."""


class Measured(NamedTuple):
    """Figures for one device, from the compiled step.

    state: bytes of the training state, which a step replaces in place. temporary: bytes besides state and
    batch. received: bytes that the busiest device receives in a step. seconds: compilation time.
    """

    state: int
    temporary: int
    received: ByAxes
    seconds: float


def lowered_step(config: Config) -> Any:
    """The training step for the config's shapes, lowered for the mesh's devices; nothing is allocated."""
    blueprint, mesh, state, batch = abstract_inputs(compilable(config))
    step: Any = make_train_step(blueprint, mesh)
    return step.lower(state, batch)


def compilable(config: Config) -> Config:
    """The config with the XLA back-ends of attention and scan, which compile anywhere."""
    return using(config, attention_backend="xla", scan_backend="xla")


def abstract_inputs(config: Config) -> tuple[Blueprint, Mesh, TrainState, Batch]:
    """(blueprint, mesh, state, batch) of a run, with ShapeDtypeStructs on their shardings for arrays."""
    mesh = make_mesh(config.mesh)

    def on_mesh(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        """The shape with its sharding on the mesh."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    blueprint = Blueprint(config)
    state = jax.eval_shape(lambda state: to_stages(state, blueprint.stages), abstract_state(blueprint))
    state = jax.tree.map(on_mesh, state, state_shardings(blueprint, mesh))
    batch = abstract_batch(config)
    specs = jax.tree.broadcast(batch_specs(), batch)
    batch = jax.tree.map(lambda x, spec: on_mesh(x, NamedSharding(mesh, spec)), batch, specs)
    return blueprint, mesh, state, batch


def abstract_batch(config: Config) -> Batch:
    """A step's batch, with ShapeDtypeStructs for arrays."""
    data, encoder = config.data, config.model.encoder
    limits = BufferLimits.of(config)
    audio_frames, tokens, outputs = (
        limits.array_frames,
        (data.rows, data.capacity),
        (data.rows, limits.array_outputs),
    )
    future = (data.rows, config.depths_trained, data.capacity)

    def ints(shape: tuple[int, ...]) -> Any:
        """An array of int32 of this shape."""
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    audio: dict[str, Any] = dict.fromkeys(AUDIO_FIELDS)
    if encoder is not None and audio_frames:
        frames, labels = (data.rows, audio_frames), encoder.labels_per_output
        audio = {
            "audio_slots": ints(tokens),
            "features": jax.ShapeDtypeStruct((*frames, encoder.width), jnp.float32),
            "frame_mask": jax.ShapeDtypeStruct(frames, jnp.bool_),
            "piece_ids": ints(outputs),
            "piece_positions": ints(outputs),
            **dict.fromkeys(
                ("recording_ids", "recording_positions"), ints(outputs) if encoder.reads_recordings else None
            ),
            "future_audio_slots": ints(future),
            "recording_labels": ints((*outputs, labels)) if labels else None,
        }
    objective = objective_of(config)
    has_answers = compares_answers(objective)
    of_tokens = *objective.extras, *objective.scored
    most_split = config.compute.context_splits if ContextLayout.of(config).keeps_documents else 0
    return Batch(
        tokens=ints(tokens),
        targets=ints(tokens),
        weights=jax.ShapeDtypeStruct(tokens, jnp.float32),
        segment_ids=ints(tokens),
        positions=ints(tokens),
        future_tokens=ints(future),
        future_targets=ints(future),
        future_weights=jax.ShapeDtypeStruct(future, jnp.float32),
        extras={name: jax.ShapeDtypeStruct(tokens, jnp.float32) for name in of_tokens},
        document_ids=ints(tokens) if has_answers else None,
        prefixes=ints(tokens) if has_answers and config.posttraining.share_prompts else None,
        splits=ints((data.rows, most_split)) if most_split else None,
        **audio,
    )


def measure(config: Config) -> Measured:
    """Compiles the step and reads its figures."""
    start = time.perf_counter()
    program = lowered_step(as_wide(config)).compile(compiler_options=UNOPTIMIZED)
    memory = program.memory_analysis()
    received = received_bytes(program.as_text(), config.mesh, runs_by_schedule(config))
    return Measured(
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        {axes: float(of_device.max()) for axes, of_device in received.items() if of_device.any()},
        time.perf_counter() - start,
    )


def step_bytes(compiled: Any) -> int:
    """Bytes of a device that a compiled step needs: its arguments, results that are not written over them,
    and what lasts within it."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


@dataclass(frozen=True)
class _Sixteen(ComputeConfig):
    """Settings with a dtype that is none of a run: float16 would need its loss scaled."""

    dtype: Any = "float16"


def as_wide(config: Config) -> Config:
    """The config with float16 in place of bfloat16: as wide, and a CPU's compiler makes no float32 of it."""
    if config.compute.dtype != "bfloat16":
        return config
    settings = {x.name: getattr(config.compute, x.name) for x in fields(config.compute)}
    sixteen = _Sixteen(**settings | {"dtype": "float16", "block_sizes": config.compute.blocks})
    return replace(config, compute=sixteen)


def runs_by_schedule(config: Config) -> Callable[[str], float]:
    """Returns the argument `often` of received_bytes for a training step.

    A conditional around a part of the pipeline runs that part in some ticks; the schedule gives the average
    number of runs in a tick. Other conditionals choose among stages. A loop of unknown length is the experts'
    exchange, which usually takes one round.
    """
    blueprint = Blueprint(config)
    schedule, of_stage = blueprint.schedule, blueprint.schedule.microbatches * blueprint.schedule.chunks
    runs = dict.fromkeys(("stage", "stage_gradient"), of_stage)
    runs |= {part: schedule.microbatches for part in ("embed", "head_gradient", "embed_gradient")}

    def often(name: str) -> float:
        """Runs of the named conditional in a tick of the schedule, on average; 1 of other operations."""
        _, scope, operation = ("", "", *name.split("/"))[-3:]
        return float(runs[scope] / schedule.ticks) if operation == "cond" and scope in runs else 1.0

    return often
