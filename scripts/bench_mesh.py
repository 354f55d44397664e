"""What the mesh gains: memory of a device, pipeline bubble and program size, without timing anything.

    python scripts/bench_mesh.py [--check] [--quick]
    python scripts/bench_mesh.py --ranks [--check]     # the program's size as the mesh grows to 64 devices

Everything is read from training steps of a tiny text model, compiled for 8 simulated CPU devices (set up
here), or from schedules. --check exits 1 and lists the claims that fail:

- in a pipeline of 4, temporary memory grows at most 5% from 8 to 16 microbatches; from 2 to 16 it grows by at
  most the inputs in the schedule's slots (and 5%); with 1F1B and interleaved;
- a pipeline stage that keeps its blocks' inputs, as it does by default, runs forward once less than one that
  keeps its own input: from the operations of the compiled programs;
- parameters and optimizer state of a device are 1 / data of the total, within 5%; weight matrices exactly;
- temporary memory falls with the tensor and the context size;
- each schedule's bubble equals the formula's;
- the program for 32 or 64 layers of a repeating pattern is at most 10% larger than for 8, with one pipeline
  rank and with two;
- with --ranks: among meshes with more than three context ranks StableHLO grows by at most 5%, and the
  instructions of a model without experts by at most 20%.

Compile times are printed, never checked.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.config.block import Block
from jaxthd.models.blocks import Attention, Mamba2, MoE
from jaxthd.parallel.mesh import CONTEXT, TENSOR
from jaxthd.parallel.schedule import make_schedule
from jaxthd.planning.compiled_step import lowered_step
from jaxthd.planning.program import UNOPTIMIZED
from scripts.benchmark import Claim, benchmark, conclude, show
from tests.mesh_costs import (
    CHOICES,
    TINY,
    bubble_formula,
    forward_passes,
    matrix_bytes,
    program,
    slots_bytes,
    tiny,
    with_remat,
)

MESHES = ((1, 2, 2, 2), (2, 2, 2, 2), (1, 4, 2, 2), (1, 8, 2, 2), (4, 4, 2, 2))
"""Growing meshes; all have the four axes."""
PATTERNS = ("MEM*EMEM*E", "M-M*-M-M*-")
"""Nemotron-3-Nano's letters, and the same without experts."""


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


def passes_section(pattern: str = "--------") -> list[Claim]:
    """A stage of MLPs, whose backward pass is twice as much work as the forward pass. Of what is recomputed
    the last product is left out: nothing needs its result.
    """
    base = tiny(MeshConfig(pipeline=2), pattern, rows=4, microbatches=4)
    compiled = {choice: program(with_remat(base, choice)) for choice in CHOICES}
    passes = {choice: forward_passes(base, each, compiled["none"]) for choice, each in compiled.items()}
    rows = [[choice, f"{passes[choice]:.1f}", each.temporary] for choice, each in compiled.items()]
    show(
        f"What a pipeline stage recomputes; pipeline 2, layers {pattern}",
        "compute.remat|forward passes|temporary",
        rows,
    )
    temporary = [each.temporary for each in compiled.values()]
    return [
        Claim(f"with all kept a stage runs forward {passes['none']:.2f} times (1)", passes["none"] == 1),
        Claim("temporary memory grows with what is kept", temporary == sorted(temporary)),
    ]


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


def share_of(mesh: MeshConfig, pattern: str) -> Config:
    """A config whose rows, slots and experts grow with the ranks: a device has the same share everywhere."""
    owners = mesh.data * mesh.context
    llm = LLMConfig(pattern=pattern, vocab_size=512, dim=32)
    usual: dict[str, Block] = {
        "*": Attention(heads=4, kv_heads=2, head_dim=8),
        "M": Mamba2(heads=4, head_dim=8, state=8, groups=2),
        "E": MoE(experts=2 * owners, experts_per_token=2, inner=16, shared_inner=16),
    }
    llm = replace(llm, blocks={x: block for x, block in usual.items() if x in llm.kinds})
    data = DataConfig(rows=2 * mesh.data, capacity=64 * mesh.context, audio_capacity=0, max_documents=16)
    blocks = BlockSizes(scan=16, attention=32, loss=32, vocabulary=64, experts=8)
    model = ModelConfig(encoder=None, llm=llm)
    return Config(
        mesh=mesh,
        data=data,
        model=model,
        compute=ComputeConfig(block_sizes=blocks),
        train=TrainConfig(microbatches=2),
    )


def ranks_section(meshes: Sequence[tuple[int, int, int, int]], patterns: Sequence[str]) -> list[Claim]:
    """The step's program for growing meshes. With two and three context ranks attention's remote steps make
    no loop. Up to eight, the passing of states is written out, two small steps a rank. With experts XLA's
    program for CPUs grows: its all-to-all takes an operand of each rank; that of StableHLO does not."""
    claims = []
    for pattern in patterns:
        rows, sizes = [], dict[tuple[int, ...], tuple[int, int]]()
        for mesh in meshes:
            lowered = lowered_step(share_of(MeshConfig(*mesh), pattern))
            compiled = lowered.compile(compiler_options=UNOPTIMIZED)
            # Lists of ranks name every device.
            stablehlo = len(re.sub(r"dense<[^>]*>", "", lowered.as_text()))
            sizes[mesh] = stablehlo, compiled.as_text().count(" = ")
            temporary = f"{compiled.memory_analysis().temp_size_in_bytes / 1e3:,.0f}"
            name = "x".join(map(str, mesh))
            rows.append([prod(mesh), name, f"{stablehlo / 1e3:,.0f}", f"{sizes[mesh][1]:,}", temporary])
        show(
            f"The step compiled ahead of time; a device has the same share everywhere; pattern {pattern}",
            "devices|mesh|StableHLO kB|instructions|temporary kB",
            rows,
        )
        looped = [size for mesh, size in sizes.items() if mesh[1] > 3]
        for figure, most, number in (("StableHLO", 1.05, 0), ("instructions", 1.2, 1)):
            if looped and (number == 0 or "E" not in pattern):
                growth = max(size[number] for size in looped) / looped[0][number]
                text = f"{figure} of {pattern} grows {growth:.3f} times over more than 3 context ranks"
                claims.append(Claim(f"{text} (at most {most})", growth <= most))
    return claims


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--ranks", action="store_true", help="growing meshes of up to 64 devices, alone")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64 if options.ranks else 8)
    quick = options.quick
    if options.ranks:
        conclude(ranks_section(MESHES[:2] if quick else MESHES, PATTERNS), check=options.check)
        return
    claims = [
        *pipeline_section((2, 8, 16) if quick else (2, 4, 8, 16)),
        *passes_section(),
        *fsdp_section((1, 8) if quick else (1, 2, 4, 8)),
        *axes_section((1, 4) if quick else (1, 2, 4)),
        *bubble_section(),
        *depth_section((8, 32) if quick else (8, 32, 64)),
    ]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
