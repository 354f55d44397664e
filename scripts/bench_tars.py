"""How long the headers of tar files take to read as a run starts, against Python's tarfile; in one run.

    python scripts/bench_tars.py [--recordings 100000] [--tars 16] [--seconds 1.0] [--folder FOLDER]

Writes tar files of equally long recordings (16 kHz, 16 bits) into a temporary folder inside FOLDER. Both
ways index all of them: jaxthd (data/sources/tarred.py) several files at a time, for disks and networks that
make it wait; TarFile.getmembers one after the other. They alternate, three times; the table has the medians.
The files have just been written, so as much of them as fits is in the system's cache. With the defaults they
take 3.3 GB of disk. Exits 1 unless both find the same recordings in the same places.
"""

import argparse
import io
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile

from jaxthd.data.example import Member
from jaxthd.data.sources.tarred import index_tars
from jaxthd.terminal.tables import show

SAMPLE_RATE = 16_000
ROUNDS = 3
Places = list[tuple[str, int, int]]
"""Of each recording: its name, the first byte of its data in the tar file, and their number."""


def write_tars(folder: Path, recordings: int, tars: int, seconds: float) -> list[Path]:
    """Tar files that hold so many recordings together, each about as many."""
    sound = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, int(seconds * SAMPLE_RATE))
    soundfile.write(sound, noise, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    paths = [folder / f"audio_{number}.tar" for number in range(tars)]
    for path, numbers in zip(paths, np.array_split(np.arange(recordings), tars), strict=True):
        with tarfile.open(path, "w") as tar:
            for number in numbers:
                member = tarfile.TarInfo(f"speaker_{number % 100}/{number}.wav")
                member.size = len(sound.getvalue())
                tar.addfile(member, io.BytesIO(sound.getvalue()))
    return paths


def by_product(paths: Sequence[Path]) -> Places:
    members = [member for index in index_tars(paths) for member in index.members.values()]
    return [(x.name, x.start, x.size) for x in members if isinstance(x, Member)]


def by_tarfile(paths: Sequence[Path]) -> Places:
    found: Places = []
    for path in paths:
        with tarfile.open(path) as tar:
            found += [(x.name, x.offset_data, x.size) for x in tar.getmembers()]
    return found


WAYS: dict[str, Callable[[Sequence[Path]], Places]] = {
    "jaxthd, several files at a time": by_product,
    "TarFile.getmembers, one after the other": by_tarfile,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recordings", type=int, default=100_000)
    parser.add_argument("--tars", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each recording")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured; default: for temporary files"
    )
    given = parser.parse_args(argv)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    found: dict[str, Places] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        paths = write_tars(Path(name), given.recordings, given.tars, given.seconds)
        size = sum(path.stat().st_size for path in paths)
        for _ in range(ROUNDS):
            for way, read in WAYS.items():
                start = time.perf_counter()
                found[way] = read(paths)
                times[way].append(time.perf_counter() - start)
    title = f"The headers of {given.recordings:,} recordings in {given.tars} tar files of {size / 1e9:.1f} GB"
    medians = {way: statistics.median(each) for way, each in times.items()}
    rows = [[way, f"{s:.2f}", f"{1e6 * s / given.recordings:.0f}"] for way, s in medians.items()]
    show(title, "way|seconds|microseconds a recording", rows)
    product, plain = found.values()
    same = product == plain and len(product) == given.recordings
    print(
        f"\nboth find {'the same' if same else 'DIFFERENT'} recordings: {len(product):,} and {len(plain):,}"
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
