"""The share of a day that goes to steps, where the machine is taken away once an hour: from real preemptions.

A run is preempted six times, three times with notice (SIGTERM) and three times without (kill -9). What each
costs is read from the account that the run keeps of its time, and from outside.
"""

import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.files.jsonl import read_lines
from jaxthd.run.goodput import stored_seconds
from tests.survival.runs import Kind, Run, write_recordings

PREEMPTIONS = 6
HOUR = 3600.0
WANTED = 0.97
"""Share of the day that steps should get."""
SAVE_EVERY = 30
STATE = (
    "--model.llm.dim 512 --model.llm.pattern M*M* --model.llm.blocks.M.heads 16 "
    "--model.llm.blocks.M.head-dim 64 --model.llm.blocks.*.heads 8 --model.llm.blocks.*.head-dim 64 "
    f"--train.steps 1000000 --train.checkpoint-every {SAVE_EVERY} --train.validate-every 1000000 "
    "--data.validation-manifest"
)
"""Settings of a run whose state is large enough that saving it takes time."""
STARTUP = ("starting", "restoring", "compiling")


class Preemption(NamedTuple):
    """What a preemption took, in seconds. stop: from the signal to the end of the process. startup: of the
    next command, by STARTUP. lost: of steps that ran again. step: at which it came."""

    kind: str
    step: int
    stop: float
    startup: dict[str, float]
    lost: float


class Saving(NamedTuple):
    """What a checkpoint costs. blocked: seconds in which no step runs. written: seconds until it is whole on
    the disk. step, step_beside: seconds of a step alone, and beside the writing. state, memory: bytes of the
    state, and those that the process holds more while it writes."""

    blocked: float
    written: float
    step: float
    step_beside: float
    state: int
    memory: int


def measure(folder: Path, seconds: float, say: Callable[[str], None]) -> tuple[list[Preemption], Saving]:
    """Runs a run in `folder`, preempts it after so many seconds of steps, and so on."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_recordings(data)
    run = Run(Kind(), folder / "run", str(data), folder / "cache")
    run.clear()
    run.more = (*STATE.split(), "")
    found: list[Preemption] = []
    with _watched(run) as seen:
        _until_steps(run, 0, seconds)  # the first command compiles, and is no preemption's
        for number in range(PREEMPTIONS):
            how = signal.SIGKILL if number % 2 else signal.SIGTERM
            began, before = time.monotonic(), _account(run)
            run.processes[0].send_signal(how)
            run.processes[0].wait()
            stop, at = time.monotonic() - began, run.step()
            _until_steps(run, at, seconds)
            account = _account(run)
            startup = {cause: account[cause] - before.get(cause, 0.0) for cause in STARTUP}
            lost = account["lost"] - before.get("lost", 0.0)
            found.append(Preemption(signal.Signals(how).name, at, stop, startup, lost))
            say(preemption_text(found[-1]))
        run.processes[0].send_signal(signal.SIGTERM)
        run.end()
    return found, _saving(run, seen)


def _until_steps(run: Run, before: int, seconds: float) -> None:
    """Starts the run, and lets it go on until it has trained for so many seconds."""
    run.start()
    if not run.wait(lambda: run.step() > before, 600) or not run.is_running:
        raise RuntimeError(f"the run takes no steps: {run.log()[-3000:]}")
    run.wait(seconds=seconds)


def _account(run: Run) -> dict[str, float]:
    """Seconds by cause, as the newest line of metrics has them."""
    line = read_lines(run.workdir / "metrics.jsonl")[-1]
    return {name.removesuffix("_seconds"): x for name, x in line.items() if name.endswith("_seconds")}


class _Seen(NamedTuple):
    """What was seen of the run from outside. memory: (whether a checkpoint is being written, resident bytes)
    at moments. written: seconds for which each was being written, by step."""

    memory: list[tuple[bool, int]]
    written: dict[str, float]


@contextmanager
def _watched(run: Run) -> Iterator[_Seen]:
    """Inside, what the run holds in memory and writes is noted, twenty times a second."""
    seen, over = _Seen([], {}), threading.Event()

    def watch() -> None:
        began: dict[str, float] = {}
        while not over.wait(0.05):
            now = {x.name.partition(".")[0] for x in (run.workdir / "checkpoints").glob("*tmp*")}
            for step in now - began.keys():
                began[step] = time.monotonic()
            for step in began.keys() - now - seen.written.keys():
                seen.written[step] = time.monotonic() - began[step]
            with suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{run.processes[0].pid}/statm").read_text().split()[1])
                seen.memory.append((bool(now - seen.written.keys()), pages * os.sysconf("SC_PAGE_SIZE")))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _saving(run: Run, seen: _Seen) -> Saving:
    """What the checkpoints cost, but for the last of each command."""
    lines = read_lines(run.workdir / "metrics.jsonl")
    after = [(x, y) for x, y in pairwise(lines) if x["step"] % SAVE_EVERY == 0]
    blocked = [y["saving_seconds"] - x["saving_seconds"] for x, y in after]
    written = statistics.median(seen.written.values())
    step = statistics.median(x["step_seconds"] for x in lines if x["step"] % SAVE_EVERY > SAVE_EVERY / 2)
    beside = statistics.median(y["step_seconds"] for _, y in after)
    state = max(
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in (run.workdir / "checkpoints").glob("*")
    )
    alone = [size for is_writing, size in seen.memory if not is_writing]
    memory = max((size for is_writing, size in seen.memory if is_writing), default=0)
    more = memory - int(statistics.median(alone))
    return Saving(statistics.median(blocked), written, step, beside, state, max(more, 0))


def preemption_text(x: Preemption) -> str:
    """A preemption, in a line."""
    parts = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in x.startup.items())
    total = x.stop + sum(x.startup.values()) + x.lost
    stop, lost = f"ends in {x.stop:.1f} s", f"lost steps {x.lost:.1f} s"
    return f"{x.kind} after step {x.step}: {stop}; {parts}; {lost}: {total:.1f} s"


def day(preemptions: Sequence[Preemption], saving: Saving) -> tuple[list[str], bool]:
    """Lines about a day with a preemption an hour, and whether steps get WANTED of it."""
    text = [
        f"a checkpoint of {saving.state / 1e6:.0f} MB: no step for {saving.blocked:.2f} s, on the disk after "
        f"{saving.written:.1f} s; a step takes {saving.step:.2f} s, beside the writing "
        f"{saving.step_beside:.2f} s; the process holds {saving.memory / 1e6:.0f} MB more meanwhile"
    ]
    cost = saving.blocked + max(saving.step_beside - saving.step, 0.0) * saving.written / saving.step_beside
    holds = True
    for kind, what in {"SIGTERM": "with notice", "SIGKILL": "without notice"}.items():
        found = [x for x in preemptions if x.kind == kind]
        startup = {cause: statistics.mean(x.startup[cause] for x in found) for cause in STARTUP}
        causes: dict[str, Any] = startup | {"ending": statistics.mean(x.stop for x in found)}
        # With notice nothing is lost: a checkpoint an hour. Without, the lost steps and the saves balance.
        every = HOUR if kind == "SIGTERM" else min(math.sqrt(2 * HOUR * max(cost, 0.01)), HOUR)
        causes["saving"] = cost * (HOUR / every - 1)
        causes["lost steps"] = 0.0 if kind == "SIGTERM" else every / 2
        goodput = 1 - sum(causes.values()) / HOUR
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in causes.items())
        verdict = "" if goodput >= WANTED else f"; under {WANTED:.0%}, most by {max(causes, key=causes.get)}"  # type: ignore[arg-type]
        text.append(
            f"a preemption an hour {what}, a checkpoint every {every / 60:.1f} min: {parts} an hour; "
            f"goodput of the day {goodput:.2%}{verdict}"
        )
        holds = holds and goodput >= WANTED
    return text, holds


def goodput(folder: Path, seconds: float, say: Callable[[str], None]) -> bool:
    """Measures, says what a day would be, and by what; returns whether it holds."""
    text, holds = day(*measure(folder, seconds, say))
    whole = stored_seconds(folder / "run")
    total = sum(whole.values())
    spent = ", ".join(f"{cause} {x / total:.1%}" for cause, x in whole.items() if x)
    for line in (
        *text,
        f"this run: {total:.0f} s: {spent}",
        f"as a picture: {folder / 'run' / 'curves.png'}",
    ):
        say(line)
    return holds
