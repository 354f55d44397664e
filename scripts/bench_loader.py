"""Whether the loader alone is fast enough for the step that consumes it, and whether its memory stays flat.

    python scripts/bench_loader.py --config configs/cp2.py [--check] [--batches 48] [--long 2000]

For 0, 1 and 2 worker processes: seconds a batch of the run's own training loader with nothing else running,
and how often that goes into a step. The step (forward, backward, update) is the run's too. It is timed on
batches made before, while no batch is being made. Step and loaders are timed alternately, --rounds times, so
that other load on the machine affects all alike. A packer emits data.packing_bins buffers in one burst: means
are over whole bursts, and the median means little without prefetching.

Before that, a loader with data.workers makes --long batches. Compared is the highest resident memory of this
process and its workers over the first tenth of the batches, after 16 to warm up, and over the last tenth.
Keeping one document a batch would add a fifth; the allocator's own growth levels off within 3%.

--check exits 1 unless a step takes at least 5 times as long as a batch with data.workers, and memory grows
by at most 5%.
"""

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.data.loader import BatchReport, Loader
from jaxthd.files.config_file import load_config
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.run.startup import simulate_devices
from scripts.benchmark import Claim, Step, benchmark, conclude, resident_bytes, show

WARM_UP = 16
"""Batches before any measurement of time or memory."""
STEPS = 6
"""Steps in a round."""
LEAST_BATCHES = 5
"""Batches that the loader makes in the time of a step, at least."""


def timed_steps(step: Step, batches: list[Batch]) -> list[float]:
    """Seconds of a step on each of the batches, which are already on the mesh."""
    found = []
    for batch in batches:
        start = time.perf_counter()
        jax.block_until_ready(step(batch))
        found.append(time.perf_counter() - start)
    return found


def opened(config: Config, workers: int, stack: ExitStack) -> Loader:
    """The run's training loader with that many workers, warmed up."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = replace(config, data=replace(config.data, workers=workers))
    data = stack.enter_context(closing(SpeechData(config, folder)))
    loader = stack.enter_context(data.training())
    list(islice(loader, WARM_UP))
    return loader


def timed(loader: Loader, batches: int) -> list[tuple[float, BatchReport]]:
    """(seconds, report) of each of the next batches, after the prefetched ones."""
    list(islice(loader, 2))
    found = []
    for _ in range(batches):
        start = time.perf_counter()
        _, report = next(loader)
        found.append((time.perf_counter() - start, report))
    return found


def growth(loader: Loader, batches: int) -> tuple[int, int]:
    """The most resident memory over the first tenth of the batches, and over the last tenth."""
    weighed = []
    for _ in range(batches):
        next(loader)
        weighed.append(resident_bytes())
    tenth = -(-batches // 10)
    return max(weighed[:tenth]), max(weighed[-tenth:])


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, rounds=3)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=48, help="timed a round and number of workers")
    parser.add_argument("--long", type=int, default=2000, help="batches over which memory is weighed")
    options = parser.parse_args(argv)
    config = load_config(options.config)
    simulate_devices(config.mesh.devices)

    with ExitStack() as stack:
        before, after = growth(opened(config, config.data.workers, stack), options.long)
    print(
        f"{options.long} batches by {config.data.workers} workers: at most {before / 2**20:.1f} MiB over the"
        f" first tenth, {after / 2**20:.1f} MiB over the last ({after / before - 1:+.1%})"
    )
    counts = sorted({0, 1, 2, config.data.workers})
    with ExitStack() as stack:
        loaders = {workers: opened(config, workers, stack) for workers in counts}
        mesh, steps = make_mesh(config.mesh), list[float]()
        batches = [put_batch(batch, mesh) for batch, _ in islice(loaders[0], STEPS)]
        step = Step(config, batches[0])
        timed_steps(step, batches)
        made: dict[int, list[tuple[float, BatchReport]]] = {workers: [] for workers in counts}
        for _ in range(options.rounds):
            steps += timed_steps(step, batches)
            for workers, loader in loaders.items():
                made[workers] += timed(loader, options.batches)
    step_seconds, rows, ratios = statistics.mean(steps), [], {}
    for workers, each_batch in made.items():
        seconds = [each for each, _ in each_batch]
        total = sum(seconds)
        tokens, documents = (
            sum(getattr(r, name) for _, r in each_batch) / total for name in ("real_tokens", "documents")
        )
        ratios[workers] = step_seconds * len(seconds) / total
        times = f"{total / len(seconds):.4f}", f"{statistics.median(seconds):.4f}"
        rows.append([workers, *times, f"{tokens:,.0f}", f"{documents:,.0f}", f"{ratios[workers]:.1f}"])
    show(
        f"A step takes {step_seconds:.3f} s on average; the loader alone, by its workers",
        "workers|mean s|median s|real tokens/s|documents/s|batches a step",
        rows,
    )
    ratio, grown = ratios[config.data.workers], after / before
    conclude(
        [
            Claim(
                f"the loader makes {ratio:.1f} batches a step (at least {LEAST_BATCHES})",
                ratio >= LEAST_BATCHES,
            ),
            Claim(f"its memory grows {grown:.3f} times (at most 1.05)", grown <= 1.05),
        ],
        check=options.check,
    )


if __name__ == "__main__":
    main()
