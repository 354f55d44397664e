"""Times of start, restore and stop of a run, as its processes grow in number on this machine.

    python scripts/bench_processes.py [--processes 2 4 8 16]

Every process has one simulated device, and the mesh has as many data ranks. The model is tiny and text-only:
what is timed is jaxthd and jax. A run trains two steps, which are saved, and ends. Its continuation restores
them, trains one more step and ends. First step: from the command to the line of the first step, whose program
has been compiled. Ended: from the line of the last step to the end of the last process. All processes share
this machine's cores, so the times grow with their number for that alone; the last column is per process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxthd.terminal.tables import show  # noqa: E402 (the script may run from anywhere)

CONFIG = """
from jaxthd.config import *


def config():
    llm = LLMConfig(pattern="M*", dim=16, q_heads=2, kv_heads=1, head_dim=8, mamba_heads=2, mamba_head_dim=8)
    data = DataConfig(
        manifest=("text.jsonl",), validation_manifest="", rows={processes}, capacity=64, max_documents=8,
        audio_capacity=0, prompt="", workers=0,
    )
    train = TrainConfig(steps=2, warmup_steps=1, validate_every=0, checkpoint_every=2)
    return Config(
        mesh=MeshConfig(data={processes}), data=data, model=ModelConfig(encoder=None, llm=llm), train=train
    )
"""


class Run(NamedTuple):
    """Seconds from the command to the first step's line, and from the last step's line to the end."""

    first_step: float
    ended: float


def run(processes: int, folder: Path, steps: int) -> Run:
    """Trains up to this step."""
    command = [sys.executable, str(ROOT / "scripts" / "launch_local.py"), str(processes), "--"]
    command += [sys.executable, "-m", "jaxthd.train", "--config", str(folder / "tiny.py")]
    command += ["--workdir", str(folder / "run"), "--train.steps", str(steps)]
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    start, lines = time.perf_counter(), list[float]()
    with subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = []
        for line in process.stdout or ():
            output.append(line)
            if line.startswith("[0] step ") and "loss" in line:
                lines.append(time.perf_counter())
        process.wait()
    end = time.perf_counter()
    if process.returncode or not lines:
        raise SystemExit("".join(output))
    return Run(lines[0] - start, end - lines[-1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args(argv)
    rows = []
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "tiny.py").write_text(CONFIG.format(processes=processes))
            turns = [
                [("user", f"number {i}"), ("assistant", "la " * (1 + i % 9))] for i in range(8 * processes)
            ]
            documents = [{"messages": [{"role": r, "content": text} for r, text in turn]} for turn in turns]
            (folder / "text.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
            new, continued = run(processes, folder, 2), run(processes, folder, 3)
        cells = [x for each in (new, continued) for x in each]
        rows.append([processes, *(f"{x:.1f}" for x in cells), f"{new.first_step / processes:.1f}"])
        show(
            f"Seconds of a run and of its continuation; {os.cpu_count()} cores",
            "processes|new: first step|ended|restored: first step|ended|first step a process",
            rows,
        )


if __name__ == "__main__":
    main()
