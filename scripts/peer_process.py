"""Processes of libraries that a benchmark compares: each offers calls, and makes them when it is asked.

The parent starts a script again with its hidden options, under the interpreter that has the library; there
`serve` answers, a line of JSON for each call. This file needs the standard library alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""For glibc (man 3 mallopt): all freed memory is kept, so that finding memory anew costs no side time."""
MATRIX = 2048
"""The matrix rate is measured on a product of two square matrices of this size."""


class Timed(NamedTuple):
    """A call's result, and how long it took: by the clock, and of the process's CPU time."""

    result: Any
    seconds: float
    cpu_seconds: float


def serve(begin: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answers the parent's calls until it ends. begin: makes what the calls need, and returns them."""
    # What libraries print goes elsewhere; answers go where the parent reads.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls = begin()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        start, cpu_start = time.perf_counter(), time.process_time()
        result = calls[name](*arguments)
        timed = result, time.perf_counter() - start, time.process_time() - cpu_start
        print(json.dumps(timed), file=answers, flush=True)
    _tell_children(signal.SIGCONT)  # a stopped one would outlive this process


class Process:
    """The parent's end of a process that serves.

    options: the script's, by which it serves. log: where its errors go.
    """

    def __init__(self, python: str, script: str, options: Sequence[str], log: Path) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._log = log
        with open(log, "w") as errors:
            command = [python, script, *options]
            self._popen = subprocess.Popen(command, env=os.environ | KEEPS_MEMORY, stderr=errors, **pipes)

    def timed(self, name: str, *arguments: Any) -> Timed:
        """Makes a call. Ends this process with the other's last errors where that has ended."""
        assert self._popen.stdin
        assert self._popen.stdout
        try:
            print(json.dumps([name, *arguments]), file=self._popen.stdin, flush=True)
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(f"{self._log.stem} ended early: {self._log.read_text()[-3000:]}")
        return Timed(*json.loads(line))

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result of a call."""
        return self.timed(name, *arguments).result

    def end(self) -> None:
        assert self._popen.stdin
        self._popen.stdin.close()
        self._popen.wait()


def matrix_rate(process: Process) -> float:
    """FLOP/s of a product of large matrices in that process, which offers it as "matrix"."""
    return 2 * MATRIX**3 / min(process.timed("matrix").seconds for _ in range(4))


def require_modules(python: str, modules: str) -> None:
    """Ends this process where an interpreter cannot import them."""
    if subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode:
        sys.exit(
            f"{python} cannot import {modules}; install them there, or name an interpreter that has them: "
            "--python-reference PYTHON"
        )


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, task.read_text().split())
    return found + [each for child in found for each in children(child)]


@contextmanager
def workers_run() -> Iterator[None]:
    """Lets this process's children run inside, and stops them at the end: none works while another process is
    measured."""
    _tell_children(signal.SIGCONT)
    try:
        yield
    finally:
        _tell_children(signal.SIGSTOP)


def _tell_children(what: signal.Signals) -> None:
    for child in children(os.getpid()):
        os.kill(child, what)


def peak_and_workers() -> tuple[int, int]:
    """(most resident bytes that this process ever had, bytes of its child processes that no other shares)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0]), sum(map(_own_bytes, children(os.getpid())))


def _own_bytes(pid: int) -> int:
    """Proportional resident bytes of a process (a forked worker shares pages)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * int(dict(line.split(":", 1) for line in lines)["Pss"].split()[0])
