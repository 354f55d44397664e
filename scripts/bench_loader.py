"""Whether the loader alone is fast enough for the step that consumes it, and whether its memory stays flat.

    python scripts/bench_loader.py --config configs/cp2.py [--check] [--batches 48] [--long 2000]
    python scripts/bench_loader.py --tar 2000

For 0, 1 and 2 worker processes: seconds a batch of the run's own training loader with nothing else running,
and how often that goes into a step. The step (forward, backward, update) is the run's too. It is timed on
batches made before, while no batch is being made. Step and loaders are timed alternately, --rounds times, so
that other load on the machine affects all alike. A packer emits data.packing_bins buffers in one burst: means
are over whole bursts, and the median means little without prefetching.

Before that, a loader with data.workers makes --long batches. Compared is the highest resident memory of this
process and its workers over the first tenth of the batches, after 16 to warm up, and over the last tenth.
Keeping one document a batch would add a fifth; the allocator's own growth levels off within 3%.

At the end stands how many GPUs 64 cores can feed: from the seconds of audio that a core makes documents of
(all processes' time on cores counts), and those that a GPU trains on in a second by `jaxthd estimate`, for
each config of --feeds.

--check exits 1 unless a step takes at least 5 times as long as a batch with data.workers, and memory grows
by at most 5%.

--tar N reads N recordings of 5 s out of a tar file four times as large, in its order and in random order,
once when the system holds nothing of the file in memory and once when it does: recordings a second, and the
bytes that come from the disk.
"""

import io
import os
import random
import statistics
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import soundfile

from jaxthd.config import Config
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.dataset import SpeechData
from jaxthd.data.example import Member
from jaxthd.data.loader import BatchReport, Loader
from jaxthd.data.sources.tarred import TarIndex, index_tar
from jaxthd.data.stream import GROUP
from jaxthd.files.config_file import load_config
from jaxthd.files.remote_path import ask_ahead
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.cluster import Cluster, step_flops
from jaxthd.run.startup import simulate_devices
from scripts.benchmark import Claim, Step, benchmark, conclude, show, used

WARM_UP = 16
"""Batches before any measurement of time or memory."""
STEPS = 6
"""Steps in a round."""
LEAST_BATCHES = 5
"""Batches that the loader makes in the time of a step, at least."""
CORES = 64
"""Cores of the machine whose GPUs are counted."""


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
        weighed.append(used().resident)
    tenth = -(-batches // 10)
    return max(weighed[:tenth]), max(weighed[-tenth:])


def fed(core: float, configs: list[Path]) -> list[list[str]]:
    """Rows (config, seconds of audio that a GPU trains on in a second, GPUs that CORES feed). core: seconds
    of audio that a core makes documents of in a second."""
    rows, gpu = [], Cluster()
    for path in configs:
        config = load_config(path)
        front_end, data = config.model.encoder, config.data
        audio = data.rows * front_end.seconds(data.audio_capacity) if front_end else 0.0
        rate = audio / (step_flops(config) / (gpu.flops * gpu.reached))
        rows.append([path.stem, f"{rate:,.0f}", f"{CORES * core / rate:,.1f}"])
    return rows


def make_tar(path: Path, count: int) -> TarIndex:
    """Writes a tar file of so many recordings of 5 s; returns its index."""
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, 80_000), 16_000, format="wav")
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{number:06d}.wav")
            info.size = len(file.getvalue())
            tar.addfile(info, io.BytesIO(file.getvalue()))
    return index_tar(path)


def forget(path: Path) -> None:
    """Makes the system drop what it holds of a file in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> int:
    """Bytes that this process has read from disks so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def bench_tar(count: int, rounds: int) -> None:
    """Reads recordings of a tar file in its order and in random order. Prints the medians of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        index = make_tar(Path(folder, "a.tar"), 4 * count)
        size = index.path.stat().st_size / 1e6
        names = list(index.members)
        orders = {"in order": names[:count], "shuffled": random.Random(0).sample(names, count)}
        timed: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for (how, order), held in product(orders.items(), ("disk", "memory")):
                if held == "disk":
                    forget(index.path)
                before, start = from_disk(), time.perf_counter()
                for first in range(0, count, GROUP):  # as a worker does
                    members = [index.clip(name).member for name in order[first : first + GROUP]]
                    for member in members:
                        if isinstance(member, Member):
                            ask_ahead(index.path, member.start, member.size)
                    for member in members:
                        load_audio(index.path, member=member)
                rate = count / (time.perf_counter() - start)
                timed.setdefault((how, held), []).append((rate, (from_disk() - before) / 1e6))
    rows = []
    for ways, found in timed.items():
        rates, read = zip(*found, strict=True)
        rows.append([*ways, f"{statistics.median(rates):,.0f}", f"{statistics.median(read):,.0f}"])
    title = f"{count:,} of {4 * count:,} recordings of 5 s in a tar file, a quarter of {size:,.0f} MB"
    show(title, "read|from|recordings/s|MB from the disk", rows)


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, rounds=3)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--config", type=Path)
    wanted.add_argument("--tar", type=int, metavar="N", help="read N recordings out of a tar file instead")
    parser.add_argument(
        "--feeds", type=Path, nargs="+", default=[Path("configs/nemotron3_nano.py")], metavar="CONFIG"
    )
    parser.add_argument("--batches", type=int, default=48, help="timed a round and number of workers")
    parser.add_argument("--long", type=int, default=2000, help="batches over which memory is weighed")
    options = parser.parse_args(argv)
    if options.tar:
        bench_tar(options.tar, options.rounds)
        return
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
        on_cores: dict[int, float] = dict.fromkeys(counts, 0.0)
        for _ in range(options.rounds):
            steps += timed_steps(step, batches)
            for workers, loader in loaders.items():
                began = used().seconds
                made[workers] += timed(loader, options.batches)
                on_cores[workers] += used().seconds - began
    step_seconds, rows, ratios = statistics.mean(steps), [], {}
    for workers, each_batch in made.items():
        seconds = [each for each, _ in each_batch]
        total = sum(seconds)
        tokens, documents = (
            sum(getattr(r, name) for _, r in each_batch) / total for name in ("real_tokens", "documents")
        )
        ratios[workers] = step_seconds * len(seconds) / total
        times = f"{total / len(seconds):.4f}", f"{statistics.median(seconds):.4f}"
        of_core = f"{documents * total / on_cores[workers]:,.0f}"
        rows.append(
            [workers, *times, f"{tokens:,.0f}", of_core, f"{documents:,.0f}", f"{ratios[workers]:.1f}"]
        )
    show(
        f"A step takes {step_seconds:.3f} s on average; the loader alone, by its workers",
        "workers|mean s|median s|real tokens/s|documents a core's second|documents/s|batches a step",
        rows,
    )
    used_workers = config.data.workers
    audio = sum(report.audio_seconds for _, report in made[used_workers]) / on_cores[used_workers]
    show(
        f"A core makes documents of {audio:,.0f} s of audio a second; a GPU as jaxthd estimate has it",
        f"model|s of audio a second of a GPU|GPUs that {CORES} cores feed",
        fed(audio, options.feeds),
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
