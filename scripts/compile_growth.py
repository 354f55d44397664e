"""The training step compiled ahead of time for growing numbers of simulated devices: does it grow with them?

    python scripts/compile_growth.py [--meshes 1x4x2x2 4x4x2x2] [--pattern M-M*-M-M*-] [--check]

The model has Nemotron-3-Nano's letters, at small width. Every mesh has the four axes. Rows, slots and experts
grow with the ranks: a device has the same share everywhere. Each mesh has a process of its own, which lowers
and compiles the step and allocates nothing. StableHLO: characters before XLA. Program: those of XLA's own
program for one device, without its lists of ranks (replica_groups), which name every device.

--check exits 1 where StableHLO grows by over 5%, or the instructions of a model without experts by over 20%,
among the meshes with more than three context ranks. (With two and three, attention's remote steps make no
loop. Up to eight, the passing of states is written out, two small steps a rank; beyond, it takes log2 steps.)
With experts XLA's program for CPUs grows: its all-to-all takes an operand of each rank, and a copy of what
makes it. That of StableHLO does not.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MESHES = ("1x2x2x2", "2x2x2x2", "1x4x2x2", "1x8x2x2", "4x4x2x2")
PATTERN = "MEM*EMEM*E"


def compiled(sizes: str, pattern: str) -> dict[str, float]:
    """Figures of a mesh, on simulated devices of this process."""
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
    from jaxthd.planning.compiled_step import lowered_step
    from jaxthd.planning.program import UNOPTIMIZED
    from jaxthd.run.startup import simulate_devices

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    data, context, pipeline, tensor = map(int, sizes.split("x"))
    mesh = MeshConfig(data, context, pipeline, tensor)
    simulate_devices(mesh.devices)
    share, owners = 64, mesh.data * mesh.context
    config = Config(
        mesh=mesh,
        data=DataConfig(
            rows=2 * mesh.data, capacity=share * mesh.context, audio_capacity=0, max_documents=16
        ),
        model=ModelConfig(
            encoder=None,
            llm=LLMConfig(
                pattern=pattern,
                vocab_size=512,
                dim=32,
                q_heads=4,
                kv_heads=2,
                head_dim=8,
                mamba_heads=4,
                mamba_head_dim=8,
                mamba_state=8,
                mamba_groups=2,
                experts=2 * owners,
                experts_per_token=2,
                expert_dim=16,
                shared_expert_dim=16,
            ),
        ),
        compute=ComputeConfig(
            block_sizes=BlockSizes(scan=16, attention=32, loss=32, vocabulary=64, experts=8)
        ),
        train=TrainConfig(microbatches=2),
    )
    start = time.perf_counter()
    lowered = lowered_step(config)
    traced = time.perf_counter()
    program = lowered.compile(compiler_options=UNOPTIMIZED)
    end = time.perf_counter()
    text = re.sub(
        r"(replica_groups|source_target_pairs)=\{[^}]*(\}\s*,\s*\{[^}]*)*\}+", r"\1", program.as_text()
    )
    memory = program.memory_analysis()
    return {
        "stablehlo": len(re.sub(r"dense<[^>]*>", "", lowered.as_text())),
        "program": len(text),
        "instructions": text.count(" = "),
        "traced": traced - start,
        "compiled": end - traced,
        "temporary": memory.temp_size_in_bytes,
    }


def main(argv: list[str] | None = None) -> None:
    from jaxthd.terminal.tables import Claim, conclude, show

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--meshes", nargs="+", default=list(MESHES), help="data x context x pipeline x tensor"
    )
    parser.add_argument("--pattern", default=PATTERN, help="the decoder's blocks")
    parser.add_argument("--only", help="compile for this mesh here, and print JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args(argv)
    if options.only:
        print(json.dumps(compiled(options.only, options.pattern)))
        return
    found, rows = {}, []
    for mesh in options.meshes:
        command = [sys.executable, __file__, "--only", mesh, "--pattern", options.pattern]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        output = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found[mesh] = x = json.loads(output.splitlines()[-1])
        sizes = f"{x['stablehlo'] / 1e3:,.0f}", f"{x['program'] / 1e3:,.0f}", f"{x['instructions']:,}"
        times = f"{x['traced']:.1f}", f"{x['compiled']:.1f}", f"{x['temporary'] / 1e3:,.0f}"
        rows.append([math.prod(map(int, mesh.split("x"))), mesh, *sizes, *times])
    show(
        f"The step compiled ahead of time; a device has the same share everywhere; pattern {options.pattern}",
        "devices|mesh|StableHLO kB|program kB|instructions|traced s|compiled s|temporary kB",
        rows,
    )
    looped, claims = [mesh for mesh in options.meshes if int(mesh.split("x")[1]) > 3], []
    for figure, most in (("stablehlo", 1.05), ("instructions", 1.2)):
        if looped and (figure == "stablehlo" or "E" not in options.pattern):
            growth = max(found[mesh][figure] for mesh in looped) / found[looped[0]][figure]
            text = f"{figure}, most over {looped[0]}, {', '.join(looped)}: {growth:.3f} (at most {most})"
            claims.append(Claim(text, growth <= most))
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
