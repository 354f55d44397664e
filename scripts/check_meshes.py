"""Every mesh gives the same loss: compares the loss and every gradient on each mesh with one device.

    python scripts/check_meshes.py [--only mtp] [--sample N] [--dtype float64] [--out results.jsonl]
    python scripts/check_meshes.py --mesh 2 2 2 2 --dtype float64

The meshes are all ways to write 1, 2, 4 and 8 simulated devices as data x context x pipeline x tensor. Most
are run in two variants. The first has 1F1B, the ring (gathered keys in pipelines), and whole residuals. The
second has interleaved or unevenly divided stages, all-gather, sequence-sharded residuals, sends to experts in
several rounds. A few more runs adapt the model by LoRA and frozen parameters.
They are compared with a dense model, which has neither: the gradient dW of the dense w + s a b gives those
of a and b as s dW b^T and s a^T dW. A few have multi-token prediction and a CTC loss, a few the blocks of
Qwen3, Qwen3-Next, GPT-OSS or DeepSeek-V3. Some keep documents whole on a context rank where they fit; in some
of these no document of a row is split, one, the most, and one that fills the buffer. The last ones have
stages that differ, under each layout and whether blocks are recomputed or not.

The model has all four mixers (two such units), experts over the data and context ranks, and audio. A batch is
32 ragged rows in 4 microbatches, one of which is all padding. A microbatch holds the same rows on every mesh,
so batch statistics and the auxiliary loss are the same too.

A row's error is the largest over all tensors, as tests/errors.py defines it. Float64 runs are
compared with one device; the limit is 1e-10. Float32 runs are compared with float64 on one device; the limit
is 1e-5, or three times the error of one device in float32 where that is more. That error is 3e-6 to 2.7e-5,
over 24 orders of the same rows; the worst tensor is a bias of the tiny random encoder's attention.

Each row is appended to --out when it is done and is not repeated, so an interrupted check continues.
Exits 1 when a row fails. A row takes about 20 s on two cores, mostly compilation.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.quick_compilation import quick_on_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads, four a device; see jaxthd.run.startup.simulate_devices.
os.environ.setdefault("PJRT_NPROC", "64" if "--mesh" in sys.argv else "32")
os.environ["XLA_FLAGS"] = quick_on_devices(16 if "--mesh" in sys.argv else 8, stuck_seconds=300)

import numpy as np

from jaxthd.config import MeshConfig
from scripts.benchmark import benchmark, table
from tests.meshes.gradients import ORDERS, check, everything, own_errors
from tests.meshes.models import MODEL, PLAIN
from tests.meshes.runs import KINDS, variants


def show(rows: Sequence[dict[str, Any]]) -> str:
    columns = "|stages|exchange|layout|split|residual|adapted|MTP|loss|error|at most|seconds"
    names = ("mesh", "stages", "exchange", "layout", "split", "residual", "adapted", "mtp")
    cells = [
        [
            *(r[name] for name in names),
            f"{r['loss']:.7f}",
            f"{r['error']:.1e}" + ("" if r["error"] <= r["allowed"] else " FAILS"),
            f"{r['allowed']:.1e}",
            f"{r['seconds']:.0f}",
        ]
        for r in rows
    ]
    return table("data x context x pipeline x tensor", columns, cells)


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, check=False)
    parser.add_argument("--only", choices=KINDS, help="one kind of rows")
    parser.add_argument("--mesh", type=int, nargs=4, help="plain rows of this mesh alone, as 2 2 2 2")
    parser.add_argument("--sample", type=int, default=0, help="only as many rows, drawn at random (seed 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("runs/check_meshes.jsonl"))
    options = parser.parse_args(argv)

    chosen = [options.only] if options.only else KINDS
    runs = [config for kind in chosen for config in KINDS[kind](options.dtype)]
    if options.mesh:
        runs = variants(MeshConfig(*options.mesh), options.dtype)
    if options.sample:
        drawn = np.random.default_rng(0).permutation(len(runs))[: options.sample]
        runs = [runs[i] for i in sorted(drawn)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    done = {row["config"]: row for row in map(json.loads, options.out.read_text().splitlines())}
    rows = []
    for config in runs:
        name = json.dumps(asdict(config))
        if name not in done:
            done[name] = {"config": name, **check(config)}
            with options.out.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        rows.append(done[name])
        line = rows[-1]
        print(
            f"{len(rows)}/{len(runs)}  {line['mesh']}  {line['stages']}  error {line['error']:.1e}",
            flush=True,
        )
    print(f"\n{show(rows)}")
    if options.dtype == "float32" and not (options.only or options.mesh):
        own = own_errors(PLAIN, MODEL.llm, everything)
        print(f"\none device, {ORDERS} orders of its rows: {min(own):.1e} to {max(own):.1e}")
        shares = [row["error"] / row["allowed"] for row in rows]
        print(f"errors over what is allowed: median {np.median(shares):.2f}, largest {max(shares):.2f}")
    failed = sum(row["error"] > row["allowed"] for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} hold")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
