"""What the mesh gains: memory of a device, pipeline bubble and program size, without timing anything.

    python scripts/bench_mesh.py [--check] [--quick]

Everything is read from training steps of a tiny text model, compiled for 8 simulated CPU devices (set up
here), or from schedules. --check exits 1 and lists the claims that fail:

- in a pipeline of 4, temporary memory grows at most 5% from 8 to 16 microbatches; from 2 to 16 it grows by at
  most the inputs in the schedule's slots (and 5%); with 1F1B and interleaved;
- a pipeline stage that keeps its blocks' inputs, as it does by default, runs forward once less than one that
  keeps its own input; one that keeps all runs forward once: from the operations of its matrix products;
- parameters and optimizer state of a device are 1 / data of the total, within 5%; weight matrices exactly;
- temporary memory falls with the tensor and the context size;
- each schedule's bubble equals the formula's;
- the program for 32 or 64 layers of a repeating pattern is at most 10% larger than for 8, with one pipeline
  rank and with two.

Compile times are printed, never checked.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
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
from jaxthd.parallel.mesh import CONTEXT, TENSOR, bytes_of, on_device
from jaxthd.parallel.params import weight_decay_mask
from jaxthd.parallel.schedule import make_schedule
from jaxthd.planning.compiled_step import lowered_step
from jaxthd.planning.hlo import Instruction, parse
from jaxthd.planning.kernel_costs import H100, Costs
from jaxthd.planning.program import UNOPTIMIZED
from jaxthd.steps.blueprint import Blueprint, specs_of
from jaxthd.terminal.tables import Claim, conclude, show

TINY = ModelConfig(
    encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8),
    llm=LLMConfig(
        pattern="M*-E",
        vocab_size=256,
        dim=64,
        q_heads=4,
        kv_heads=4,
        head_dim=16,
        ffn_dim=256,
        mamba_heads=4,
        mamba_head_dim=16,
        mamba_state=16,
        mamba_groups=4,
        expert_dim=64,
        shared_expert_dim=128,
    ),
)
ENCODER = replace(TINY.audio_encoder, layers=4, dim=64, heads=4, ffn_dim=256)
COMPUTE = ComputeConfig(block_sizes=BlockSizes(attention=64, loss=64))


class Program(NamedTuple):
    """A compiled step: bytes on a device, bytes of its program text, seconds to compile it."""

    temporary: int
    state: int
    text: int
    seconds: float


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
    text = len(lowered.as_text())
    return Program(memory.temp_size_in_bytes, memory.alias_size_in_bytes, text, seconds)


def slots_bytes(config: Config) -> int:
    """Bytes of the stage inputs that the schedule keeps on a rank, with one row a microbatch."""
    schedule = make_schedule(config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank)
    return schedule.slots * config.data.capacity * config.model.llm.dim * 4


def matrix_bytes(config: Config) -> int:
    """Bytes of the weight matrices on a device."""
    model = Blueprint(config).model
    state = nnx.state(model, nnx.Param)
    parts = on_device(nnx.to_pure_dict(state), specs_of(model)[0], config.mesh)
    are_matrices = jax.tree.leaves(weight_decay_mask(state))
    return sum(
        bytes_of(x) for x, is_matrix in zip(jax.tree.leaves(parts), are_matrices, strict=True) if is_matrix
    )


def pipeline_section(counts: Sequence[int], pattern: str = "*-*-*-*-", ranks: int = 4) -> list[Claim]:
    """counts: numbers of microbatches, one row each; the schedule keeps as many inputs for the last two."""
    rows, claims = [], []
    for chunks, name in ((1, "1F1B"), (2, "interleaved")):
        mesh = MeshConfig(pipeline=ranks, stages_per_rank=chunks)
        configs = {m: tiny(mesh, pattern, rows=m, microbatches=m) for m in counts}
        temporary = {m: program(config).temporary for m, config in configs.items()}
        slots = {m: slots_bytes(config) for m, config in configs.items()}
        for m, size in temporary.items():
            schedule = make_schedule(m, ranks, chunks)
            rows.append(
                [name, m, schedule.slots, size, size - slots[m], f"{size / temporary[counts[-1]]:.3f}"]
            )
        first, before, last = counts[0], *counts[-2:]
        growth = temporary[last] / temporary[before]
        text = f"{name}: {growth:.3f} times the memory at {last} as at {before} microbatches (at most 1.05)"
        claims.append(Claim(text, growth <= 1.05))
        others = (temporary[last] - slots[last]) / (temporary[first] - slots[first])
        text = f"{name}: slots aside {others:.3f} times the memory at {last} as at {first} (at most 1.05)"
        claims.append(Claim(text, others <= 1.05))
    show(
        f"Temporary memory of a device, pipeline {ranks}, a row of 256 tokens a microbatch",
        f"schedule|microbatches|inputs kept|bytes|inputs aside|of {counts[-1]} microbatches",
        rows,
    )
    return claims


def _branches(x: Instruction) -> Iterator[str]:
    for name in ("branch_computations", "true_computation", "false_computation"):
        yield from x.attribute(name)


Recomputes = Literal["auto", "stage", "blocks", "nothing"]
CHOICES: tuple[Recomputes, ...] = ("stage", "blocks", "auto", "nothing")
SCOPES = ("stage", "stage_gradient", "enter", "enter_gradient")
"""The parts of a tick that run forward and backward passes (jaxthd/parallel/pipeline_tick.py)."""


def flops_of_parts(text: str) -> dict[str, float]:
    """Operations of the matrix products in one run of each of SCOPES, from a compiled program's text. A loop
    counts as often as it turns where XLA knows that, else once; of a conditional the dearest branch counts.
    """
    program, found = parse(text), dict.fromkeys(SCOPES, 0.0)
    costs = Costs(program, H100)

    def inside(computation: str) -> float:
        total = 0.0
        for x in program.computations[computation].values():
            total += sum(product.flops for product in costs.products(x, program.computations[computation]))
            if x.op == "while":
                total += (x.known_trips or 1) * sum(map(inside, x.attribute("body")))
            elif x.op == "call":
                total += sum(map(inside, x.attribute("to_apply")))
            elif x.op == "conditional":
                dearest = max(inside(branch) for branch in _branches(x))
                total += dearest
                scope, operation = ("", *x.op_name.split("/"))[-2:]
                if operation == "cond" and scope in found:
                    found[scope] = max(found[scope], dearest)
        return total

    inside(program.entry)
    return found


def with_remat(config: Config, recomputes: Recomputes) -> Config:
    return replace(config, compute=replace(config.compute, remat_stage=recomputes))


def passes_section(pattern: str = "--------", *, audio: bool = True) -> list[Claim]:
    """A stage of MLPs, whose backward pass is twice as much work as the forward pass. Of what is recomputed
    the last product is left out: nothing needs its result.
    """
    rows, passes, temporary = [], {}, []
    base = tiny(MeshConfig(pipeline=2), pattern, rows=4, microbatches=4)
    if audio:
        base = replace(base, data=replace(base.data, audio_capacity=512))
        base = replace(base, model=replace(base.model, encoder=ENCODER))
    for recomputes in CHOICES:
        config = with_remat(base, recomputes)
        compiled = lowered_step(config).compile(compiler_options=UNOPTIMIZED)
        flops, size = flops_of_parts(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes
        passes[recomputes] = forward_passes(flops)
        entered = (flops["enter_gradient"] / flops["enter"]) - 1 if flops["enter"] else 0
        temporary.append(size)
        counts = [f"{flops[scope]:,.0f}" for scope in SCOPES[:2]]
        ratios = f"{passes[recomputes]:.2f}", f"{entered:.2f}"
        rows.append([recomputes, *counts, *ratios, size])
    saved = passes["stage"] - passes["blocks"]
    show(
        f"What a pipeline stage recomputes; pipeline 2, layers {pattern}; operations of matrix products",
        "remat_stage|forward|backward|forward passes|of the encoder|temporary",
        rows,
    )
    return [
        Claim(f"with its blocks' inputs kept a stage runs forward {saved:.2f} times less (1)", saved == 1),
        Claim("by default it does so", passes["auto"] == passes["blocks"]),
        Claim(f"with all kept it runs forward {passes['nothing']:.2f} times (1)", passes["nothing"] == 1),
        Claim("temporary memory grows with what is kept", temporary == sorted(temporary)),
    ]


def forward_passes(flops: dict[str, float]) -> float:
    """Forward passes of a stage, those in its backward pass among them. flops: flops_of_parts."""
    return (flops["stage"] + flops["stage_gradient"]) / flops["stage"] - 2


def fsdp_section(sizes: Sequence[int]) -> list[Claim]:
    rows, claims = [], []
    whole, whole_matrices = 0, 0
    for data in sizes:
        config = tiny(MeshConfig(data=data), rows=data)
        found, matrices = program(config), matrix_bytes(config)
        whole, whole_matrices = whole or found.state, whole_matrices or matrices
        share, matrix_share = found.state / whole, matrices / whole_matrices
        rows.append([data, found.state, f"{share:.4f}", matrices, f"{matrix_share:.4f}", found.temporary])
        text = f"data {data}: {share * data:.3f} times 1 / data of the state (at most 1.05)"
        claims.append(Claim(text, share * data <= 1.05))
        claims.append(Claim(f"data {data}: matrices are 1 / data", matrices * data == whole_matrices))
    show(
        f"FSDP, bytes on a device; pattern {TINY.llm.pattern}, a row a rank",
        "data|parameters + optimizer|of the whole|weight matrices|of the whole|temporary",
        rows,
    )
    return claims


def axes_section(sizes: Sequence[int]) -> list[Claim]:
    rows, claims = [], []
    meshes = {TENSOR: [MeshConfig(tensor=n) for n in sizes], CONTEXT: [MeshConfig(context=n) for n in sizes]}
    for axis, of_axis in meshes.items():
        temporary: list[int] = []
        for size, mesh in zip(sizes, of_axis, strict=True):
            config = tiny(mesh, tokens=1024)
            temporary.append(program(config).temporary)
            rows.append([axis, size, temporary[-1], f"{temporary[-1] / temporary[0]:.3f}"])
        falls = all(a > b for a, b in pairwise(temporary))
        claims.append(Claim(f"temporary memory falls with the {axis} size", falls))
    show(
        f"Temporary memory of a device; pattern {TINY.llm.pattern}, 1,024 tokens",
        "axis|ranks|bytes|of 1 rank",
        rows,
    )
    return claims


def bubble_formula(ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """The bubble if every stage's forward and backward pass take the same time on all ranks.

    Source: Narayanan et al., 2021, whose formula gives idle time over busy time instead.
    """
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)


def bubble_section() -> list[Claim]:
    rows, wrong = [], 0
    for ranks, chunks, microbatches in product((2, 4, 8), (1, 2, 4), (8, 16, 32)):
        schedule = make_schedule(microbatches, ranks, chunks)
        formula = bubble_formula(ranks, chunks, microbatches)
        wrong += abs(schedule.bubble - formula) > 1e-9
        sides = f"{schedule.bubble:.4f}", f"{formula:.4f}"
        rows.append([ranks, chunks, microbatches, schedule.ticks, schedule.slots, *sides])
    show(
        "Bubble of a step",
        "ranks P|stages a rank V|microbatches M|ticks|inputs kept|schedule|(P - 1) / (V M + P - 1)",
        rows,
    )
    return [Claim(f"bubbles are those of the formula, {wrong} of {len(rows)} differ", not wrong)]


def depth_section(depths: Sequence[int], unit: str = "M-*-") -> list[Claim]:
    rows, claims = [], []
    for ranks in (1, 2):
        texts = []
        for layers in depths:
            mesh = MeshConfig(pipeline=ranks)
            config = tiny(mesh, unit * (layers // len(unit)), rows=2, microbatches=2)
            found = program(config)
            texts.append(found.text)
            rows.append([ranks, layers, found.text, f"{found.text / texts[0]:.3f}", f"{found.seconds:.1f}"])
        growth = max(texts) / min(texts)
        text = f"pipeline {ranks}: the program grows {growth:.3f} times (at most 1.1)"
        claims.append(Claim(f"{text} from {depths[0]} to {depths[-1]} layers", growth <= 1.1))
    show(
        f"Size of the step's program; layers {unit} repeated",
        f"pipeline|layers|bytes of StableHLO|of {depths[0]} layers|seconds to compile",
        rows,
    )
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    quick = options.quick
    claims = [
        *pipeline_section((2, 8, 16) if quick else (2, 4, 8, 16)),
        *passes_section(audio=not quick),
        *fsdp_section((1, 8) if quick else (1, 2, 4, 8)),
        *axes_section((1, 4) if quick else (1, 2, 4)),
        *bubble_section(),
        *depth_section((8, 32) if quick else (8, 32, 64)),
    ]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
