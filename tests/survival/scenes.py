"""Where and when a fault strikes, what the run was doing then, and what it does afterwards."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.stores.servers import Server
from tests.survival.phases import OF_GRPO, OF_TRAIN, Seen, go_on, look, stop
from tests.survival.runs import STUCK_SECONDS, Run

STEPS_AFTER = 2
"""A run that goes on has taken so many steps after the fault."""
LOOKS = 12
"""A phase that was not met by so many looks at steps is given up for the one that is there."""
BEFORE_STEPS = ("importing", "starting", "reading", "restoring", "unknown")
"""Phases in which signals still end the process at once."""
Allowed = Callable[[int, str], bool]
"""Whether a process may end with a status, where the run's log is so."""


class Scene(NamedTuple):
    """Where a fault strikes. disk: a small file system with the workdirs. wanted: the phase to strike in, if
    the run comes to it; "" for any. server: serves the data of a run that reads them by http."""

    run: Run
    rng: np.random.Generator
    disk: Path
    server: Server | None = None
    wanted: str = ""

    @property
    def control(self) -> Path:
        return self.disk.parent / "disk-control"


class Injected(NamedTuple):
    """seen: what the run was doing, and the evidence. end: what the run then did. holds: whether it may."""

    seen: Seen
    end: str
    holds: bool


def strike(scene: Scene, rank: int = 0) -> Seen:
    """Waits for the moment, and leaves all processes of the run stopped; Seen("ended") where it has ended."""
    run, rng = scene.run, scene.rng
    phases = OF_TRAIN if run.kind.command == "train" else OF_GRPO
    rare = "ending" if rng.random() < 0.03 else ""  # it is the end of the case
    wanted = scene.wanted or rare or str(rng.choice([phase for phase in phases if phase != "ending"]))
    first = run.step()
    if wanted in ("importing", "starting"):
        time.sleep(rng.uniform(0, 3))
    elif wanted not in BEFORE_STEPS and wanted != "ending":
        target = first + int(rng.integers(0, 1 + run.kind.steps // 12))
        run.wait(lambda: run.step() >= target or not run.is_running)
    looks = 0
    while run.is_running:
        for process in run.processes:
            stop(process.pid)
        seen = look(run.processes[rank].pid, run.workdir, run.started)
        is_past = wanted in BEFORE_STEPS and seen.phase not in BEFORE_STEPS
        looks += run.step() > first
        late = is_past or looks > LOOKS
        if seen.evidence and (seen.phase == wanted or (late and wanted != "ending")):
            return seen
        for process in run.processes:
            go_on(process.pid)
        time.sleep(rng.uniform(0.01, 0.2))
    return Seen("ended", "the run had ended")


def release(run: Run) -> None:
    """Lets all processes go on."""
    for process in run.processes:
        go_on(process.pid)


def ends(scene: Scene, seen: Seen, allowed: Allowed) -> Injected:
    """Lets the run go on to its end; `allowed`: whether (a status, the log) may be so."""
    release(scene.run)
    statuses, log = scene.run.end(), scene.run.log()
    telling = [x for x in log.splitlines() if x.startswith("error") or "stopped" in x]
    telling = telling or [x for x in log.splitlines() if "rror" in x]
    last = telling[-1] if telling else ""
    text = f"status {' '.join(map(str, statuses))}" + f": {last[:200]}" * bool(last)
    return Injected(seen, text, all(allowed(status, log) for status in statuses))


def continues(scene: Scene, seen: Seen, seconds: float = STUCK_SECONDS) -> Injected:
    """Lets the run go on for some steps, or to its end, and kills it there."""
    run = scene.run
    before, began = run.step(), time.monotonic()
    release(run)
    target = min(before + STEPS_AFTER, run.kind.steps)
    in_time = run.wait(lambda: run.step() >= target, seconds)
    statuses = [process.poll() for process in run.processes]
    run.kill()
    end = f"went on from step {before} to {run.step()} in {time.monotonic() - began:.1f} s"
    return Injected(seen, end, in_time and all(status in (None, 0) for status in statuses))


def says(*texts: str) -> Allowed:
    """The run ends well, or with an error that says one of these; of several processes each does."""
    named = (1, -signal.SIGABRT)
    return lambda status, log: status == 0 or (status in named and any(text in log for text in texts))


def library(scene: Scene, name: str) -> str:
    """The path of a library to preload, compiled from the file of that name beside this one."""
    path, source = scene.disk.parent / f"{name}.so", Path(__file__).with_name(f"{name}.c")
    if not path.exists():
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return str(path)
