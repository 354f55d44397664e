"""Compiles the programs of jaxthd grpo for simulated CPU devices and reads their memory from the result."""

import time
from typing import Any, NamedTuple

from jaxthd.config import Config
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.parallel.mesh import bytes_of, on_device
from jaxthd.planning.compiled_step import Measured, abstract_inputs, as_wide, compilable, runs_by_schedule
from jaxthd.planning.program import UNOPTIMIZED, received_bytes
from jaxthd.rl.resharding import used_shapes
from jaxthd.rl.rollouts import Rollouts
from jaxthd.steps.accumulation import AccumulatedStep
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference import has_reference
from jaxthd.steps.scoring import shared_scoring_step
from jaxthd.steps.state import TrainState


class Program(NamedTuple):
    """A program, in bytes of a device. held: what it takes or makes besides state and batch, and that lasts
    beyond it. temporary: what it needs meanwhile.
    """

    name: str
    held: int
    temporary: int


class MeasuredGRPO(NamedTuple):
    """update: of the gradient of one batch and of the update, in place of a training step's. programs: all of
    a step, in their order."""

    update: Measured
    programs: list[Program]


def measure_grpo(config: Config) -> MeasuredGRPO:
    """Compiles rollouts, scores, gradient and update."""
    start, config = time.perf_counter(), compilable(as_wide(config))
    blueprint, mesh, state, batch = abstract_inputs(config)
    programs = _rollouts(config, state, mesh)
    scores: Any = shared_scoring_step(blueprint, mesh, config.rollout.temperature)
    memory, _ = _compiled(scores.lower(state.params, state.buffers, batch))
    whose = "of the policy and of the reference" if has_reference(config) else "of the policy"
    programs.append(
        Program(f"log-probabilities {whose}", memory.output_size_in_bytes, memory.temp_size_in_bytes)
    )

    lowered = AccumulatedStep(blueprint, mesh).lowered(state, batch)
    gradient, text = _compiled(lowered["gradient"])
    update, _ = _compiled(lowered["update"])
    held = gradient.alias_size_in_bytes
    programs += [
        Program("gradient of a batch", held, gradient.temp_size_in_bytes),
        Program("update", held, update.temp_size_in_bytes),
    ]
    received = received_bytes(text, config.mesh, runs_by_schedule(config))
    by_axes = {axes: float(of_device.max()) for axes, of_device in received.items() if of_device.any()}
    most = held + max(gradient.temp_size_in_bytes, update.temp_size_in_bytes)
    measured = Measured(update.alias_size_in_bytes, most, by_axes, time.perf_counter() - start)
    return MeasuredGRPO(measured, programs)


def _compiled(lowered: Any) -> tuple[Any, str]:
    """(its memory, its text)."""
    program = lowered.compile(compiler_options=UNOPTIMIZED)
    return program.memory_analysis(), program.as_text()


def _rollouts(config: Config, state: TrainState, mesh: Any) -> list[Program]:
    tokenizer = load_tokenizer(config.data.tokenizer)
    rollouts = Rollouts(config, mesh, stop_ids=PromptTemplate(config.data, tokenizer).stop_ids)
    weights, copy = (state.params, state.buffers), 0
    if rollouts.has_own_mesh:
        there = Blueprint(rollouts.config)
        weights = used_shapes(there, rollouts.mesh)
        copy = bytes_of(on_device(weights, there.specs, there.config.mesh))
    lowered = rollouts.lowered(*weights)
    memory = {name: _compiled(program)[0] for name, program in lowered.items()}
    places = copy + memory["empty"].output_size_in_bytes
    names = {"prefill": "rollouts: prompts take places", "decode": "rollouts: tokens are decoded"}
    return [Program(title, places, memory[name].temp_size_in_bytes) for name, title in names.items()]
