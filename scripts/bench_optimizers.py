"""What each optimizer costs: time of a step, memory, compilation; side by side in one run.

    python scripts/bench_optimizers.py [configs/first_run.py] [--rounds 20] [--mesh.data 2 ...]

Trains on one batch of the config's data with AdamW, Adafactor, Lion and Muon in turn, a step each, so that
whatever else the machine does slows all of them. A step's time is the median over the rounds. `moments` are
the optimizer's own arrays on a device, `temporary` what the compiled step needs besides the state and the
batch.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import readable_errors
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.planning.compiled_step import compilable
from jaxthd.planning.parameters import state_bytes
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer_kinds import OPTIMIZERS
from jaxthd.steps.state import TrainState, init_state
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import show, size_text

DEFAULT = "configs/first_run.py"
OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"type": int, "default": 20, "help": "steps of each optimizer that are timed"},
}


class Trained(NamedTuple):
    """A run with one optimizer. compile_seconds: of its step."""

    name: str
    config: Config
    step: Any
    state: TrainState
    temporary: int
    compile_seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0].startswith("-"):
        given.insert(0, DEFAULT)
    line = parse_command_line("bench_optimizers", given, OPTIONS, __doc__)
    simulate_devices(line.config.mesh.devices)
    config = compilable(replace(line.config, data=replace(line.config.data, validation_manifest="")))
    mesh = make_mesh(config.mesh)
    batch = first_batch(config, mesh)
    runs = [started(name, config, mesh, batch) for name in OPTIMIZERS]
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for number in range(line.options.rounds + 1):
        for place, run in enumerate(runs):
            began = time.perf_counter()
            state, metrics = run.step(run.state, batch)
            jax.block_until_ready((state, metrics))
            runs[place] = run._replace(state=state)
            if number:  # the first is a warm-up
                seconds[run.name].append(time.perf_counter() - began)
    show_costs(runs, seconds)


def first_batch(config: Config, mesh: Mesh) -> Batch:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(SpeechData(config, Path(folder))) as data,
        closing(data.training(local_rows(mesh, config.data.rows))) as loader,
    ):
        return put_batch(next(loader)[0], mesh)


def started(name: str, config: Config, mesh: Mesh, batch: Batch) -> Trained:
    own = replace(config, train=replace(config.train, optimizer=name, optimizer_options=()))  # type: ignore[arg-type]
    blueprint = Blueprint(own)
    step: Any = make_train_step(blueprint, mesh)
    state = init_state(blueprint, mesh)
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    seconds = time.perf_counter() - began
    return Trained(name, own, compiled, state, compiled.memory_analysis().temp_size_in_bytes, seconds)


def show_costs(runs: Sequence[Trained], seconds: dict[str, list[float]]) -> None:
    base = median(seconds[runs[0].name])
    rows = []
    for run in runs:
        middle = median(seconds[run.name])
        sizes = state_bytes(run.config)
        moments = sum(size for name, size in sizes.items() if name.endswith(" moments"))
        row = [run.name, f"{1000 * middle:,.1f} ms", f"{middle / base:.2f}"]
        row += [size_text(moments), size_text(run.temporary), f"{run.compile_seconds:.1f} s"]
        rows.append(row)
    title = f"A training step, median of {len(seconds[runs[0].name])}, the optimizers in turn"
    columns = f"optimizer|step|of {runs[0].name}'s|moments|temporary|compiling"
    show(title, columns, rows)


if __name__ == "__main__":
    with readable_errors():
        main()
