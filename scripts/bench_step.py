"""What a setting costs: time of a step, memory and compilation, by turns with the config's own.

    python scripts/bench_step.py configs/first_run.py --with train.optimizer=lion --with train.optimizer=muon
    python scripts/bench_step.py my.py --with compute.remat=none,compute.unroll_layers=1

Trains on one batch of the config's data. A step of the config as it is, and one with each --with (settings
with commas between them), alternate: whatever else the machine does slows all of them. `state` are a device's
arguments of the compiled step, `temporary` what it needs besides. Settings that change what a batch holds are
not compared here.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.files.config_file import load_config
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.run.startup import keep_freed_memory, prepared, simulate_devices
from scripts.benchmark import Step, benchmark, by_turns, changed, show, size_text


def first_batch(config: Config, folder: str) -> Batch:
    mesh = make_mesh(config.mesh)
    with (
        closing(SpeechData(config, Path(folder))) as data,
        closing(data.training(local_rows(mesh, config.data.rows))) as loader,
    ):
        return put_batch(next(loader)[0], mesh)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark(__doc__, rounds=20)
    parser.add_argument("config", type=Path)
    parser.add_argument("--with", action="append", default=[], dest="changes", metavar="NAME=VALUE,...")
    options = parser.parse_args(argv)
    own = load_config(options.config)
    if simulate_devices(own.mesh.devices):
        keep_freed_memory()  # as jaxthd train does on CPUs
    own = prepared(replace(own, data=replace(own.data, validation_manifest="")))
    with tempfile.TemporaryDirectory() as folder:
        batch = first_batch(own, folder)
    steps = {
        text or "as it is": Step(changed(own, text.split(",")), batch) for text in ("", *options.changes)
    }
    ways = {name: [step] for name, step in steps.items()}
    seconds = by_turns(ways, options.rounds, wait=jax.block_until_ready)
    rows = []
    for name, step in steps.items():
        sizes = step.program.memory_analysis()
        bytes_of = size_text(sizes.argument_size_in_bytes), size_text(sizes.temp_size_in_bytes)
        ratio = seconds[name] / seconds["as it is"]
        times = f"{1e3 * seconds[name]:,.1f}", f"{ratio:.2f}"
        rows.append([name, *times, *bytes_of, f"{step.compile_seconds:.1f}"])
    title = f"A training step of {options.config}, median of {options.rounds}, by turns"
    show(title, "settings|ms|of the config's|state|temporary|compiling, s", rows)


if __name__ == "__main__":
    main()
