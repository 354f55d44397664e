"""The training step compiled ahead of time for growing numbers of simulated devices: does it grow with them?

    python scripts/compile_growth.py [--devices 8 16 64] [--check]

The model is Nemotron-3-Nano's pattern at small width. Every mesh has the four axes; the tensor and pipeline
axes keep their sizes, data and context grow, and so do rows, slots and experts with them: a device has the same
share everywhere. Each number of devices has a process of its own, which lowers and compiles the step and
allocates nothing. Program: characters of the StableHLO before XLA, and of XLA's own program for one device,
whose lists of ranks (replica_groups) grow by themselves and are left out. --check exits 1 where the program
of the most devices is more than 1.15 times as large as that of the fewest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MESHES = {8: (1, 2, 2, 2), 16: (2, 2, 2, 2), 32: (4, 2, 2, 2), 64: (4, 4, 2, 2), 128: (8, 4, 2, 2)}
"""The mesh of each number of devices; 64 devices of 8 x 2 x 2 x 2 would do as well."""


def compiled(devices: int) -> dict[str, float]:
    """Figures of one process with so many simulated devices."""
    import jax

    from jaxthd.config import (
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
    simulate_devices(devices)
    mesh = MeshConfig(*MESHES[devices])
    share, owners = 64, mesh.data * mesh.context
    config = Config(
        mesh=mesh,
        data=DataConfig(
            rows=2 * mesh.data, capacity=share * mesh.context, audio_capacity=0, max_documents=16
        ),
        model=ModelConfig(
            encoder=None,
            llm=LLMConfig(
                pattern="MEM*EMEM*E",
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
            scan_chunk=16, attention_block=32, loss_block=32, vocab_block=64, expert_block=8
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
    parser.add_argument("--devices", type=int, nargs="+", choices=list(MESHES), default=[8, 16, 64])
    parser.add_argument("--only", type=int, help="compile for so many devices here, and print JSON")
    parser.add_argument("--check", action="store_true", help="exit 1 when a claim fails")
    options = parser.parse_args(argv)
    if options.only:
        print(json.dumps(compiled(options.only)))
        return
    found, rows = {}, []
    for devices in options.devices:
        command = [sys.executable, __file__, "--only", str(devices)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        output = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        found[devices] = x = json.loads(output.splitlines()[-1])
        sizes = f"{x['stablehlo'] / 1e3:,.0f}", f"{x['program'] / 1e3:,.0f}", f"{x['instructions']:,}"
        times = f"{x['traced']:.1f}", f"{x['compiled']:.1f}", f"{x['temporary'] / 1e3:,.0f}"
        rows.append([devices, "x".join(map(str, MESHES[devices])), *sizes, *times])
    show(
        "The step compiled ahead of time; a device has the same share everywhere",
        "devices|mesh|StableHLO kB|program kB|instructions|traced s|compiled s|temporary kB",
        rows,
    )
    first, last = found[options.devices[0]], found[options.devices[-1]]
    growth = last["instructions"] / first["instructions"]
    text = f"instructions at {options.devices[-1]} devices over {options.devices[0]}: {growth:.2f} (at most 1.15)"
    conclude([Claim(text, growth <= 1.15)], check=options.check)


if __name__ == "__main__":
    main()
