"""Faults of disks and files: full, read-only, slow, hung, damaged, cut off."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tests.survival.damage import damage, flip_array
from tests.survival.phases import Seen
from tests.survival.scenes import Injected, Scene, continues, ends, library, release, says, strike


def full_disk(scene: Scene) -> Injected:
    """A file fills the file system of the workdir, but for less than a checkpoint takes."""
    ballast = scene.disk / "ballast"
    scene.run.start()
    seen = strike(scene)
    try:
        left = shutil.disk_usage(scene.disk).free - int(scene.rng.integers(0, 2**14))
        with suppress(OSError), ballast.open("wb") as file:
            while left > 0:
                left -= file.write(bytes(min(left, 2**16)))
        return ends(scene, seen, says("No space left"))
    finally:
        ballast.unlink(missing_ok=True)


@contextmanager
def bad_disk(scene: Scene) -> Iterator[dict[str, str]]:
    """Yields the variables that put the run's files under tests/survival/disk.c, which is well so far."""
    scene.control.write_text(".")
    yield {
        "LD_PRELOAD": library(scene, "disk"),
        "DISK_UNDER": str(scene.run.workdir),
        "DISK_CONTROL": str(scene.control),
    }
    set_disk(scene.control, ".")


def set_disk(control: Path, how: str) -> None:
    with control.open("r+") as file:  # in place: the processes have mapped it
        file.write(how)


def read_only_disk(scene: Scene) -> Injected:
    """All that writes into the workdir fails with EROFS."""
    with bad_disk(scene) as variables:
        scene.run.start(variables)
        seen = strike(scene)
        set_disk(scene.control, "r")
        return ends(scene, seen, says("Read-only file system"))


def slow_disk(scene: Scene) -> Injected:
    """A write takes 50 ms longer."""
    with bad_disk(scene) as variables:
        scene.run.start(variables)
        seen = strike(scene)
        set_disk(scene.control, "s")
        return continues(scene, seen)


def hung_disk(scene: Scene) -> Injected:
    """Writes do not return for a few seconds."""
    with bad_disk(scene) as variables:
        scene.run.start(variables)
        seen = strike(scene)
        set_disk(scene.control, "h")
        release(scene.run)
        time.sleep(scene.rng.uniform(2, 6))
        set_disk(scene.control, ".")
        return continues(scene, seen)


def damaged(scene: Scene, how: Callable[[Path, np.random.Generator], str] = damage) -> Injected:
    """The newest of several checkpoints of a killed run is damaged; it is restored, or the one before."""
    run, steps = scene.run, scene.run.saved()
    what = how(run.workdir / "checkpoints" / str(steps[-1]), scene.rng)
    run.start()
    began = "continuing from step" if len(steps) > 1 else "parameters"
    run.wait(lambda: began in run.log())
    log = run.log()
    is_reported = f"the checkpoint of step {steps[-1]} is damaged" in log
    found = re.findall(r"continuing from step (\d+)", log)
    run.kill()
    end = f"{what}: {'reported' if is_reported else 'not noticed'}, continued from step {' '.join(found)}"
    seen = Seen("saved", f"checkpoints of steps {steps} on the disk")
    return Injected(seen, end, bool(found) and (is_reported or found == [str(steps[-1])]))


def truncated(scene: Scene) -> Injected:
    """One file of the newest checkpoint is cut to half."""
    return damaged(scene, _cut)


def _cut(checkpoint: Path, rng: np.random.Generator) -> str:
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size > 1]
    file = files[int(rng.integers(len(files)))]
    os.truncate(file, file.stat().st_size // 2)
    return f"{file.relative_to(checkpoint)} cut to half"


def flipped_array(scene: Scene) -> Injected:
    """A bit of the newest checkpoint's arrays is flipped."""
    return damaged(scene, flip_array)


def bad_cache(scene: Scene) -> Injected:
    """Programs in the compilation cache are damaged, in a copy of it."""
    run = scene.run
    whole, copy = run.cache, scene.disk.parent / "damaged-cache"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    files = sorted(x for x in copy.rglob("*") if x.is_file() and x.stat().st_size)
    for file in files:
        content = bytearray(file.read_bytes())
        at = int(scene.rng.integers(len(content)))
        if scene.rng.integers(2):
            del content[at:]
        else:
            content[at] ^= 1 << int(scene.rng.integers(8))
        file.write_bytes(content)
    run.cache = copy
    try:
        run.start()
        result = continues(scene, Seen("saved", f"{len(files)} damaged programs on the disk"))
        if not result.holds:
            result = result._replace(end=result.end + ": " + run.log()[-600:])
        return result
    finally:
        run.cache = whole


def torn_files(scene: Scene) -> Injected:
    """The last lines of metrics.jsonl and the account of time are cut off, as a power cut may leave them."""
    run = scene.run
    torn = []
    for name in ("metrics.jsonl", "goodput.json"):
        file = run.workdir / name
        if file.exists() and file.stat().st_size > 10:
            os.truncate(file, file.stat().st_size - int(scene.rng.integers(1, 10)))
            torn.append(name)
    run.start()
    return continues(scene, Seen("saved", f"{' and '.join(torn)} cut off"))
