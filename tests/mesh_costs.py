"""Memory, program size and work of a compiled training step, by its mesh: tests and bench_mesh read them."""

import time
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
from flax import nnx

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.parallel.mesh import bytes_of, on_device
from jaxthd.parallel.params import metadata
from jaxthd.parallel.schedule import make_schedule
from jaxthd.planning.compiled_step import lowered_step
from jaxthd.planning.program import UNOPTIMIZED
from jaxthd.steps.blueprint import Blueprint, specs_of

MLP_INNER = 256
TINY = ModelConfig(
    encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8),
    llm=LLMConfig(
        pattern="M*-E",
        vocab_size=256,
        dim=64,
        blocks={
            "*": Attention(heads=4, kv_heads=4, head_dim=16),
            "-": MLP(inner=MLP_INNER),
            "M": Mamba2(heads=4, head_dim=16, state=16, groups=4),
            "E": MoE(inner=64, shared_inner=128),
        },
    ),
)
Remat = Literal["full", "none"]
COMPUTE = ComputeConfig(block_sizes=BlockSizes(attention=64, loss=64))
CHOICES: tuple[Remat, ...] = ("full", "none")


class Program(NamedTuple):
    """A compiled step: bytes on a device, bytes of its program text, seconds to compile it, operations of its
    bodies: a loop's counts once, and of a conditional the costliest branch."""

    temporary: int
    state: int
    text: int
    seconds: float
    flops: float


def tiny(
    mesh: MeshConfig,
    pattern: str = TINY.llm.pattern,
    *,
    rows: int = 1,
    microbatches: int = 1,
    tokens: int = 256,
) -> Config:
    """The config of a tiny text-only model."""
    return Config(
        mesh=mesh,
        data=DataConfig(rows=rows, capacity=tokens, audio_capacity=0),
        model=replace(TINY, llm=replace(TINY.llm, pattern=pattern)),
        compute=COMPUTE,
        train=TrainConfig(microbatches=microbatches),
    )


def program(config: Config) -> Program:
    lowered = lowered_step(config)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=UNOPTIMIZED)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    # The new state is written over the old one, so the aliased bytes are the state.
    text, flops = len(lowered.as_text()), compiled.cost_analysis()["flops"]
    return Program(memory.temp_size_in_bytes, memory.alias_size_in_bytes, text, seconds, flops)


def slots_bytes(config: Config) -> int:
    """Bytes of the stage inputs that the schedule keeps on a rank, with one row a microbatch."""
    schedule = make_schedule(config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank)
    return schedule.slots * config.data.capacity * config.model.llm.dim * 4


def matrix_bytes(config: Config) -> int:
    """Bytes of the weight matrices on a device."""
    model = Blueprint(config).model
    state = nnx.state(model, nnx.Param)
    parts = on_device(nnx.to_pure_dict(state), specs_of(model)[0], config.mesh)
    are_matrices = jax.tree.leaves(metadata(state, "decayed"))
    return sum(
        bytes_of(x) for x, is_matrix in zip(jax.tree.leaves(parts), are_matrices, strict=True) if is_matrix
    )


def with_remat(config: Config, remat: Remat) -> Config:
    return replace(config, compute=replace(config.compute, remat=remat))


def forward_passes(config: Config, program: Program, kept: Program) -> float:
    """Forward passes of a stage of MLPs, those in its backward pass among them, to the next half.

    kept: the program that keeps all activations, which runs forward once. Both count one layer of a stage,
    whose two products take 4 operations for each token, dim and inner dim."""
    llm = config.model.llm
    once = 4 * config.data.capacity * llm.dim * MLP_INNER
    return 1 + round(2 * (program.flops - kept.flops) / once) / 2


def bubble_formula(ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """The bubble if every stage's forward and backward pass take the same time on all ranks.

    Source: Narayanan et al., 2021, whose formula gives idle time over busy time instead.
    """
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
