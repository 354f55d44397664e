"""Faults of processes: they are killed, signalled, stopped, slow, without memory, or their clock jumps."""

import os
import resource
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jaxthd.run.signals import STOPPED
from tests.survival.phases import Seen, go_on, stop
from tests.survival.runs import Run, children
from tests.survival.scenes import Injected, Scene, continues, ends, library, release, strike

MEMORY, LIMIT = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
NAMED_SECONDS = 60.0
"""A process that is stopped is named within this time, with its stack."""
OVER = ("_shutdown ", "_python_exit")
"""Beginnings of the evidence of a process that has done its work, and may end by any signal."""
OUT_OF_MEMORY = (
    "llocat", "memory", "Memory", "RESOURCE_EXHAUSTED", "can't start new thread",
    "error return without exception set", "failed to map segment",
)  # fmt: skip
"""Parts of what says that memory was refused. The last two are Python's and the loader's while modules are
imported: of 60 imports of numpy and jax under such limits 7 and 7 at least ended so."""


def killed(scene: Scene) -> Injected:
    """kill -9 of all processes."""
    scene.run.start()
    seen = strike(scene)
    scene.run.kill()
    return Injected(seen, f"killed after step {scene.run.step()}", True)


def signalled(number: signal.Signals) -> Callable[[Scene], Injected]:
    def fault(scene: Scene) -> Injected:
        """A signal: to one process, or to all where the run does not handle signals yet."""
        run = scene.run
        run.start()
        seen = strike(scene)
        is_heard = "compiling its programs" in run.log() or seen.phase == "saving"
        is_heard = is_heard and not seen.evidence.startswith(OVER)
        one = run.processes[int(scene.rng.integers(len(run.processes)))]
        # What starts them signals all. While they start, one that is gone is waited for, for minutes.
        for process in [one] if is_heard else run.processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        may = {STOPPED, 0} if is_heard else {STOPPED, 0, 1, -number, 128 + number, -signal.SIGABRT}
        return ends(scene, seen, lambda status, log: status in may)

    return fault


def paused(scene: Scene) -> Injected:
    """Stopped as a whole for seconds, and continued."""
    scene.run.start()
    seen = strike(scene)
    time.sleep(scene.rng.uniform(1, 4))
    return continues(scene, seen)


def worker(how: signal.Signals) -> Callable[[Scene], Injected]:
    def fault(scene: Scene) -> Injected:
        """A worker process of the loader or of rewards is killed, or hangs."""
        run = scene.run
        run.start()
        seen = strike(scene._replace(wanted="stepping"))
        found = [each for process in run.processes for each in children(process.pid)]
        if not found:
            run.kill()
            return Injected(Seen(seen.phase, ""), "there was no worker yet", True)
        pid = found[int(scene.rng.integers(len(found)))]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        os.kill(pid, how)
        injected = continues(scene, seen._replace(evidence=f"{seen.evidence}; worker {words[-60:].strip()}"))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return injected

    return fault


def gone_rank(scene: Scene) -> Injected:
    """kill -9 of one process of several: the others end, and name it."""
    run, rank, seen = _strike_one(scene)
    run.processes[rank].kill()
    named = f"process {rank} (pid {run.processes[rank].pid}"
    return ends(
        scene,
        seen,
        lambda status, log: (
            status in (0, -signal.SIGKILL) or (status in (1, -signal.SIGABRT) and f"error: {named}" in log)
        ),
    )


def stalled_rank(scene: Scene) -> Injected:
    """One process of several is stopped, and stays so: it is named within a minute, with its stack."""
    run, rank, seen = _strike_one(scene)
    began, stalled = time.monotonic(), run.processes[rank]
    others = [process for process in run.processes if process is not stalled]
    for process in others:
        go_on(process.pid)

    def is_named() -> bool:
        said = run.log().partition(f"warning: process {rank} (pid {stalled.pid}")[2]
        return " in " in said.partition("at\n    ")[2]

    in_time = run.wait(is_named, NAMED_SECONDS) and is_named()
    seconds = time.monotonic() - began
    run.wait(lambda: all(process.poll() is not None for process in others), 2 * NAMED_SECONDS)
    statuses = [process.poll() for process in others]
    stalled.kill()
    end = f"named with its stack after {seconds:.0f} s" if in_time else f"not named in {seconds:.0f} s"
    return Injected(seen, f"{end}; the others ended with {statuses}", in_time and None not in statuses)


def _strike_one(scene: Scene) -> tuple[Run, int, Seen]:
    """(the run, the process that the fault is for, what that was doing), once all have found each other."""
    scene.run.start()
    rank = int(scene.rng.integers(len(scene.run.processes)))
    wanted = str(scene.rng.choice(["restoring", "compiling", "stepping", "saving"]))
    return scene.run, rank, strike(scene._replace(wanted=wanted), rank)


def slow_rank(scene: Scene) -> Injected:
    """One process gets a tenth of the time for ten seconds."""
    run, rank, seen = _strike_one(scene)
    release(run)
    end = time.monotonic() + 10
    while time.monotonic() < end and run.is_running:
        stop(run.processes[rank].pid)
        time.sleep(0.45)
        go_on(run.processes[rank].pid)
        time.sleep(0.05)
    return continues(scene, seen)


def clock_jump(scene: Scene) -> Injected:
    """The clock of the day jumps by up to 400 days, forward or back."""
    control = scene.disk.parent / "clock-control"
    control.write_bytes(struct.pack("q", 0))
    scene.run.start({"LD_PRELOAD": library(scene, "clock"), "CLOCK_CONTROL": str(control)})
    seen = strike(scene)
    days = int(scene.rng.integers(1, 400)) * int(scene.rng.choice([-1, 1]))
    with control.open("r+b") as file:  # in place: the processes have mapped it
        file.write(struct.pack("q", days * 86400))
    return continues(scene, seen._replace(evidence=f"{seen.evidence}; {days:+d} days"))


def little_memory(scene: Scene) -> Injected:
    """The process may have no more address space than it has, and a little."""
    run = scene.run
    run.start()
    seen = strike(scene)
    for process in run.processes:
        with suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
            more = int(scene.rng.integers(2**12, 2**24))
            _limit_address_space(process.pid, pages * resource.getpagesize() + more)
    release(run)
    run.wait(seconds=25)
    if run.is_running:  # it needs no more memory
        for process in run.processes:
            _limit_address_space(process.pid, resource.RLIM_INFINITY)
        return continues(scene, seen)
    return ends(
        scene,
        seen,
        lambda status, log: status <= 0 or (status == 1 and any(text in log for text in OUT_OF_MEMORY)),
    )


def _limit_address_space(pid: int, most: int) -> None:
    with suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


def memory_group(scene: Scene) -> Injected:
    """The kernel ends the process, because its group (cgroup) has too little memory."""
    run, group = scene.run, MEMORY / f"jaxthd-soak-{os.getpid()}"
    run.start()
    seen = strike(scene)
    group.mkdir(exist_ok=True)
    try:
        (group / LIMIT).write_text(str(int(scene.rng.integers(2**20, 2**24))))
        for process in run.processes:
            with suppress(OSError):
                (group / "cgroup.procs").write_text(str(process.pid))
        release(run)
        run.wait(seconds=25)
        if run.is_running:
            (group / LIMIT).write_text("-1")
            return continues(scene, seen)
        return ends(scene, seen, lambda status, log: status in (-signal.SIGKILL, 1, 0, -signal.SIGABRT))
    finally:
        run.kill()
        with suppress(OSError):
            group.rmdir()
