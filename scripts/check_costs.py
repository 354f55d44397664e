"""How far the cost model of a compiled step is to be trusted: its bounds beside time measured on this CPU.

    python scripts/check_costs.py [--steps 3]

The step of a small hybrid with packed speech is compiled for one CPU and priced by
jaxthd/planning/step_costs.py, with this CPU's measured rates for the matrix product, the copy, and a launch.
Then it runs under jax's profiler, which times every kernel. Printed are both for each part of the model,
their ratio, and the rank correlation (Spearman) over parts and over kernels. A ratio under 1, a bound above
the measurement, is a fault of the model or of the rates: values that stay in a cache, or a busy machine.
"""

import argparse
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
import jax.numpy as jnp
import numpy as np

from jaxthd.config import ComputeConfig, Config, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.hlo import parse
from jaxthd.planning.kernel_costs import Device
from jaxthd.planning.step_costs import StepCosts, step_costs
from jaxthd.planning.trips import expected_trips
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.tables import show
from scripts.check_gpu import recordings, rows_of

MODEL = ModelConfig(
    encoder=EncoderConfig(layers=4, dim=256, heads=4, ffn_dim=1024, subsampling_channels=64),
    llm=LLMConfig(
        pattern="M-M*-E",
        vocab_size=8192,
        dim=256,
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        ffn_dim=1024,
        mamba_heads=8,
        mamba_head_dim=64,
        mamba_state=64,
    ),
    adapter_dim=256,
)


def shortest(call: Callable[[], Any], repeats: int = 10) -> float:
    took = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        took.append(time.perf_counter() - start)
    return min(took[2:])


def this_cpu() -> Device:
    """Its rates, measured now. A launch: of a loop that does next to nothing, by its trips."""
    a, long = jnp.ones((2048, 2048)), jnp.ones(2**25)
    product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    trips = 10_000
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, trips, lambda i, x: jnp.sin(x) + i, x))
    rate, bandwidth = (
        2 * 2048**3 / shortest(lambda: product(a)),
        2 * long.nbytes / shortest(lambda: copy(long)),
    )
    launch = shortest(lambda: loop(jnp.ones(1))) / trips / 3  # the trip's kernels: end, counter, body
    return Device("this CPU", {"": rate}, rate / 2, bandwidth, bandwidth, 1, 1, launch, launch, 0.0, 0.0, 0.0)


def measured(run: Callable[[], Any], steps: int) -> dict[str, float]:
    """Seconds of a step in each instruction of the program, by its name."""
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    found: Counter[str] = Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if any(name == "hlo_op" for name, _ in event.stats):
                    found[event.name] += event.duration_ns / 1e9 / steps
    return dict(found)


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def compared(costs: StepCosts, seconds: dict[str, float]) -> None:
    bounds: Counter[str] = Counter()
    part_of: dict[str, str] = {}
    for k in costs.kernels:
        bounds[k.name] += k.times * k.seconds  # type: ignore[assignment]
        part_of[k.name] = k.part
    names = [name for name in bounds if name in seconds]
    parts: dict[str, list[float]] = {}
    for name in names:
        sums = parts.setdefault(part_of[name], [0.0, 0.0])
        parts[part_of[name]] = [sums[0] + bounds[name], sums[1] + seconds[name]]
    rows = [
        [part, f"{1e3 * bound:.2f}", f"{1e3 * took:.2f}", f"{took / bound:.1f}"]
        for part, (bound, took) in sorted(parts.items(), key=lambda item: -item[1][1])
    ]
    show("A step on this CPU", "|bound ms|measured ms|ratio", rows)
    by_part = correlation([bound for bound, _ in parts.values()], [took for _, took in parts.values()])
    by_kernel = correlation([bounds[n] for n in names], [seconds[n] for n in names])
    print(
        f"rank correlation: {by_part:.2f} over {len(parts)} parts, {by_kernel:.2f} over {len(names)} kernels"
    )
    covered = sum(bounds[n] for n in names) / sum(bounds.values())
    print(f"the profiler names kernels with {covered:.0%} of the bound")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    documents = recordings(2048, MODEL, 20.0)
    batch, data = rows_of([documents], MODEL)
    config = Config(model=MODEL, data=data, compute=ComputeConfig())
    config = replace(config, train=replace(config.train, warmup_steps=1))
    mesh = make_mesh(config.mesh)
    state, on_mesh = init_state(Blueprint(config), mesh), put_batch(batch, mesh)
    step: Any = make_train_step(Blueprint(config), mesh)
    program = step.lower(state, on_mesh).compile()
    trips = expected_trips(config, batch)

    def run() -> Any:
        nonlocal state
        state, metrics = program(state, on_mesh)[:2]
        return metrics

    device = this_cpu()
    print(
        f"this CPU: {device.peak[''] / 1e9:.0f} GFLOP/s, {device.bandwidth / 1e9:.1f} GB/s, "
        f"{1e6 * device.launch:.2f} us a launch"
    )
    costs = step_costs(parse(program.as_text()), device, lambda part, name: trips.get(part))
    compared(costs, measured(run, given.steps))


if __name__ == "__main__":
    main()
