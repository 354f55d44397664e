"""What FP8 costs in loss: trains configs/single.py in float32, bfloat16 and FP8 from the same start. A table.

    python scripts/check_fp8.py [--steps N] [--seeds N] [--check]

Trains configs/single.py for --steps steps (default 300) in each, on the same batches. "fp8" is bfloat16 with
the matrix products of all encoder and decoder projections in 8 bits (compute.fp8); CPUs compute these slowly
but exactly. Loss: mean of the last quarter of the steps; validation loss: at the end. Two minutes a run on
two cores. --check exits 1 if FP8's loss is more than 3% above bfloat16's, averaged over seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxthd.run.metrics_file import read_metrics
from jaxthd.terminal.tables import Claim, conclude, show

CONFIG = Path(__file__).parent.parent / "configs" / "single.py"
RUNS = {
    "float32": [],
    "bfloat16": ["--compute.dtype", "bfloat16"],
    "fp8": ["--compute.dtype", "bfloat16", "--compute.fp8", "decoder.layers.*", "encoder.blocks.*"],
}
MOST = 1.03


def train(name: str, seed: int, steps: int, workdir: Path) -> tuple[float, float]:
    """Trains one run; returns (training loss, validation loss)."""
    fixed = {"steps": steps, "validate-every": steps, "max-new-tokens": 0, "seed": seed}
    options = [text for field, value in fixed.items() for text in (f"--train.{field}", str(value))]
    command = [sys.executable, "-m", "jaxthd.train", "--config", str(CONFIG), "--workdir", str(workdir)]
    done = subprocess.run([*command, *options, *RUNS[name]], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-1000:] + done.stderr[-2000:])
    lines = read_metrics(workdir)
    losses = [line["loss"] for line in lines if "loss" in line]
    return statistics.mean(losses[-max(steps // 4, 1) :]), lines[-1]["validation_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rows, means = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in RUNS:
            found = []
            for seed in range(options.seeds):
                found.append(train(name, seed, options.steps, Path(scratch) / f"{name}{seed}"))
                rows.append((name, seed, *(f"{x:.4f}" for x in found[-1])))
                print(json.dumps(rows[-1]), flush=True)
            means[name] = statistics.mean(loss for loss, _ in found)
    show(f"Loss after {options.steps} steps", "products|seed|training|validation", rows)
    ratio = means["fp8"] / means["bfloat16"]
    text = f"FP8's training loss is {ratio:.3f} times bfloat16's (at most {MOST})"
    conclude([Claim(text, ratio <= MOST)], check=options.check)


if __name__ == "__main__":
    main()
