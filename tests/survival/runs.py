"""Runs of jaxthd as processes of their own, in one or several, and what they leave."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from tests.survival import tiny

ROOT = Path(__file__).parents[2]
TIMED = ("time", "tokens_per_second", "_seconds", "compilations", "goodput", "utilisation")
"""Endings of names of metrics that depend on the process and its clock."""
AUDIO = "audio_seconds"
RECORDINGS, HELD_OUT = 20, 4
POISON = {"nan": np.nan, "loud": 1e30}
"""Recordings that cannot be used, and by what a part of their samples is multiplied."""
STORE_SECONDS = 10.0
"""A store that answers nothing for so long is given up."""
STUCK_SECONDS = 600.0
"""A run that takes so long, waiting or not, is stuck: the longest waits of jaxthd are 60 s."""


def write_recordings(folder: Path, poison: bool = False) -> None:
    """20 ragged recordings of noise, their manifest, and one of 4 of them to validate on.

    poison: those of POISON too.
    """
    rng = np.random.default_rng(0)
    lines = []
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, RECORDINGS)):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        lines.append({"audio_filepath": f"{i}.wav", "text": f"number {i} " + "la " * int(rng.integers(8))})
    held_out = lines[:HELD_OUT]
    if poison:
        for name, value in POISON.items():
            samples = rng.normal(0, 0.1, 8000).astype(np.float32)
            samples[1000:2000] *= np.float32(value)
            soundfile.write(folder / f"{name}.wav", samples, 16000, subtype="FLOAT")
            lines.append({"audio_filepath": f"{name}.wav", "text": name})
    for file, of in {"manifest": lines, "held_out": held_out}.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of))


class Kind(NamedTuple):
    """A kind of run. command: train or grpo. processes: how many share it. poison: see write_recordings.
    store: it reads its data by http."""

    command: str = "train"
    processes: int = 1
    poison: bool = False
    store: bool = False

    @property
    def name(self) -> str:
        return f"{self.command}-{self.processes}" + "-poison" * self.poison + "-store" * self.store

    @property
    def steps(self) -> int:
        return tiny.STEPS if self.command == "train" else tiny.GRPO_STEPS


class Run:
    """A run in `workdir`, started again by the same command as often as needed.

    data: the folder of write_recordings, or its URL. cache: of compiled programs. package: the folder that
    holds jaxthd. more: words that are added to the command.
    """

    def __init__(self, kind: Kind, workdir: Path, data: str, cache: Path, package: Path = ROOT) -> None:
        self.kind, self.workdir, self.data, self.cache = kind, workdir, data, cache
        self._package, self.log_file = package, cache.with_name(f"{workdir.name}.log")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.more: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """What each process runs."""
        options = {
            "data.manifest": f"{self.data}/manifest.jsonl",
            "data.validation-manifest": f"{self.data}/held_out.jsonl",
            "workdir": self.workdir,
            "mesh.data": self.kind.processes,
        }
        words = [sys.executable, "-P", "-m", f"jaxthd.{self.kind.command}", str(tiny.__file__)]
        words += [text for option, value in options.items() for text in (f"--{option}", str(value))]
        return [*words, *(tiny.GRPO.split() if self.kind.command == "grpo" else []), *self.more]

    def start(self, environment: Mapping[str, str] = {}) -> None:
        """Starts all processes, with these variables besides."""
        own = {
            "PYTHONPATH": str(self._package),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAXTHD_STORE_SECONDS": str(STORE_SECONDS),
            "JAXTHD_CACHE_GB": "0",  # each epoch reads from the store again
        }
        port = 0
        if self.kind.processes > 1:
            with socket.create_server(("localhost", 0)) as free:
                port = free.getsockname()[1]
        self.log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        self.processes, self.started = [], time.time()
        for number in range(self.kind.processes):
            place = {}
            if self.kind.processes > 1:
                place = {
                    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                    "JAX_NUM_PROCESSES": str(self.kind.processes),
                    "JAX_PROCESS_ID": str(number),
                }
            with self.log_file.open("ab") as output:
                self.processes.append(
                    subprocess.Popen(
                        self.command(),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=os.environ | own | place | dict(environment),
                    )
                )

    @property
    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def wait(self, until: Callable[[], bool] = lambda: False, seconds: float = STUCK_SECONDS) -> bool:
        """Waits until the condition holds or all processes have ended; False where the time is over."""
        end = time.monotonic() + seconds
        while self.is_running and not until():
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True

    def end(self) -> list[int]:
        """Waits for the end of all processes; kills those that are stuck. Returns the exit statuses."""
        if not self.wait():
            for process in self.processes:
                process.kill()
        return [process.wait() for process in self.processes]

    def kill(self) -> None:
        """Kills what still runs, with its workers."""
        for process in self.processes:
            for child in children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait()

    def log(self) -> str:
        """What the processes have printed since the last start."""
        with self.log_file.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The metrics lines on disk, without TIMED; an incomplete line is skipped."""
        file = self.workdir / "metrics.jsonl"
        entries = []
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                entries.append(
                    {k: v for k, v in json.loads(line).items() if k == AUDIO or not k.endswith(TIMED)}
                )
        return entries

    def step(self) -> int:
        """The newest step in the metrics."""
        return max((line["step"] for line in self.lines()), default=0)

    def saved(self) -> list[int]:
        """The steps of the whole checkpoints."""
        return sorted(int(p.name) for p in (self.workdir / "checkpoints").glob("*") if p.name.isdecimal())

    def result(self) -> dict[str, Any]:
        """All that must be alike: every line, the last checkpoint's checksums of all arrays, answers."""
        lines = self.lines()
        result: dict[str, Any] = {f"step {line['step']}": line for line in lines}
        result["steps"] = [line["step"] for line in lines]
        last = self.workdir / "checkpoints" / str(self.kind.steps) / "about" / "metadata"
        about = json.loads(last.read_text())["content"] if last.exists() else {}
        result["arrays"] = about.get("arrays")
        result["position"] = about.get("position")
        for name in ("hypotheses.jsonl", "rollouts.jsonl"):
            file = self.workdir / name
            result[name] = file.read_text() if file.exists() else ""
        return result

    def clear(self) -> None:
        """Removes the workdir."""
        shutil.rmtree(self.workdir, ignore_errors=True)


def differing(result: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """What differs between the results of two runs."""
    return [name for name in {**want, **result} if result.get(name) != want.get(name)]


def children(pid: int) -> list[int]:
    """The processes that this one has started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found + [each for child in found for each in children(child)]
