"""Where the time of a training step goes on this CPU, and what keeping host memory saves.

    python scripts/profile_step.py [--config configs/first_run.py] [--rounds 3] [--steps 40]

The config's step, on its mesh of simulated devices, with buffers of packed speech. Two processes alternate:
one keeps what is freed (jaxthd/run/host_memory.py), as jaxthd train does on CPUs, the other does not. Each
prints medians over its steps. Then jax's profiler times every kernel of a step, and the table sums them by
part of the model; by kind, matrix products and the rest. Kernels that run side by side are each counted in
full.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

from jaxthd import load_config
from jaxthd.config import Config
from jaxthd.data.loader import make_loader
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.hlo import parse
from jaxthd.planning.step_costs import step_costs
from jaxthd.planning.trips import expected_trips
from jaxthd.run.host_memory import keep_freed_memory
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.tables import show
from scripts.check_costs import measured, this_cpu
from scripts.check_gpu import recordings

LONGEST = 5.5
"""Seconds of the longest recording. Half of them are under a quarter of it: the synthetic speech's mean."""


def batch_of(config: Config) -> Any:
    """The first batch of recordings, as the packer fills it. Values are random."""
    slots = 2 * config.data.capacity * config.data.rows * config.mesh.data
    documents = recordings(slots, config.model, LONGEST)
    loader = make_loader([range(len(documents))], lambda item, epoch: documents[item], config, repeat=False)
    try:
        batch, report = next(iter(loader))
    finally:
        loader.close()
    print(
        f"{report.documents} documents, {report.real_tokens:,} tokens, {report.audio_seconds:.0f} s of audio"
    )
    return batch


def compiled_step(config: Config, batch: Batch) -> tuple[Any, Callable[[], None]]:
    """The program, and a call that runs a step of the batch and waits for it."""
    mesh = make_mesh(config.mesh)
    state, batch = init_state(Blueprint(config), mesh), put_batch(batch, mesh)
    program = make_train_step(Blueprint(config), mesh).lower(state, batch).compile()  # type: ignore[attr-defined]

    def run() -> None:
        nonlocal state
        state, metrics = program(state, batch)[:2]
        jax.block_until_ready((state, metrics))

    return program, run


def timed(config: Config, steps: int) -> dict[str, float]:
    """Of a step: median wall milliseconds; means of CPU milliseconds in the program and in the system, and of
    page faults."""
    _, run = compiled_step(config, batch_of(config))
    for _ in range(5):
        run()
    before, wall = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        wall.append(1e3 * (time.perf_counter() - start))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall": statistics.median(wall),
        "user": 1e3 * (after.ru_utime - before.ru_utime) / steps,
        "system": 1e3 * (after.ru_stime - before.ru_stime) / steps,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
    }


def in_child(given: argparse.Namespace, keep: bool) -> dict[str, float]:
    words = [sys.executable, __file__, "--config", given.config, "--steps", str(given.steps)]
    words += ["--child", "keep" if keep else "give_back"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(given: argparse.Namespace) -> None:
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        for _ in range(given.rounds):
            for keep, results in found.items():
                results.append(in_child(given, keep))
    rows = []
    for keep, results in found.items():
        medians = [statistics.median(r[k] for r in results) for k in ("wall", "user", "system", "faults")]
        what = "kept" if keep else "given back"
        rows.append([f"freed memory is {what}", *(f"{m:.0f}" for m in medians)])
    show("A step on this CPU", "|wall ms|CPU ms|of the system|page faults", rows)


def profiled(config: Config) -> None:
    """Prints the milliseconds of a step by part of the model."""
    batch = batch_of(config)
    program, run = compiled_step(config, batch)
    device, trips = this_cpu(), expected_trips(config, batch)
    costs = step_costs(parse(program.as_text()), device, lambda part, name: trips.get(part))
    seconds = measured(run, 5)
    parts: dict[str, Counter[str]] = {}
    for kernel in {k.name: k for k in costs.kernels}.values():
        kind = "products" if kernel.flops else "the rest"
        parts.setdefault(kernel.part, Counter())[kind] += 1e3 * seconds.get(kernel.name, 0.0)  # type: ignore[assignment]
    total = sum(sum(times.values()) for times in parts.values())
    rows = [
        [part, f"{times['products']:.1f}", f"{times['the rest']:.1f}"]
        for part, times in sorted(parts.items(), key=lambda item: -sum(item[1].values()))
    ]
    show("Milliseconds of a step's kernels", "|matrix products|the rest", rows)
    products = sum(times["products"] for times in parts.values())
    gflop = sum(k.times * k.flops for k in costs.kernels) / 1e9
    print(f"{total:.0f} ms in kernels, {products / total:.0%} of it in matrix products")
    print(f"{gflop:.1f} GFLOP, with what is computed again")
    print(f"large matrices multiply at {device.peak[''] / 1e9:.0f} GFLOP/s here")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/first_run.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--child", choices=("keep", "give_back"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is None:
        compare(given)
    config = load_config(given.config)
    config = replace(config, train=replace(config.train, warmup_steps=1))
    simulate_devices(config.mesh.devices)
    if given.child != "give_back":
        keep_freed_memory()
    if given.child is None:
        profiled(config)
    else:
        print(json.dumps(timed(config, given.steps)))


if __name__ == "__main__":
    main()
