"""Two processes are one run: the same numbers, one set of files, one end. Their number may change."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import jax
import pytest

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.parallel import processes as distributed
from jaxthd.parallel.processes import exchange, started
from jaxthd.run.metrics import TIME_METRICS
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.signals import STOPPED
from jaxthd.train import train
from tests.survival.runs import write_recordings
from tests.test_train import UNOPTIMISED, tiny

STEPS = 10
PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
CLOCK = {"time", "tokens_per_second", "step_seconds", "compilations", "skipped_documents", "imbalance"}
CLOCK |= {metric.name for metric in TIME_METRICS} | {"device_tokens_per_second", "cached_compilations"}
"""Fields of a metrics line that depend on the call (skipped_documents: items met so far) and on the mesh."""


def config(manifest: Path) -> Config:
    """Every buffer's audio fits on two ranks and on four, so all meshes pack the same buffers."""
    small = tiny(manifest)
    llm = replace(small.model.llm, mtp_pattern="")
    return replace(
        small,
        data=replace(small.data, audio_capacity=1024),
        model=replace(small.model, llm=llm),
        compute=replace(small.compute, remat="none"),
        train=replace(
            small.train,
            steps=STEPS,
            validate_every=STEPS,
            learning_rate=1e-3,
            microbatches=1,
            max_new_tokens=2,
        ),
    )


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    write_recordings(folder)
    lines = (folder / "manifest.jsonl").read_text().splitlines(keepends=True)
    # In rows 1 and 2 of 4, so that different processes meet them.
    for place in (2, 5):
        lines.insert(place, json.dumps({"audio_filepath": f"missing{place}.wav", "text": "not there"}) + "\n")
    (folder / "manifest.jsonl").write_text("".join(lines))
    (folder / "settings.py").write_text(
        "from pathlib import Path\nfrom tests.parallel.test_distributed import config as make\n\n\n"
        f"def config():\n    return make(Path({str(folder / 'manifest.jsonl')!r}))\n"
    )
    return folder / "manifest.jsonl"


@pytest.fixture(scope="module")
def one(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("one")
    train(config(manifest), workdir)
    return workdir


@contextmanager
def two(
    manifest: Path, workdir: Path, *overrides: str, name: str = "train"
) -> Iterator[subprocess.Popen[str]]:
    """Two processes with two devices each, by scripts/launch_local.py. name: of the command."""
    command = [sys.executable, "-m", f"jaxthd.{name}", "--config", manifest.with_name("settings.py")]
    command = [
        sys.executable,
        "scripts/launch_local.py",
        "2",
        "--",
        *command,
        "--workdir",
        workdir,
        *overrides,
    ]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    process = subprocess.Popen(
        list(map(str, command)),
        env=PLAIN | cache | {"XLA_FLAGS": UNOPTIMISED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadlock = Timer(600, os.killpg, (process.pid, signal.SIGKILL))
    deadlock.start()
    try:
        yield process
    finally:
        deadlock.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """The output's lines up to the first that matches, or all lines."""
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if re.search(pattern, line):
            break
    return lines


def end(process: subprocess.Popen[str], number: int, how: signal.Signals, after: str = "[5-9]") -> str:
    """Sends process `number` a signal after its fifth step or later; returns the output from the start."""
    lines = until(process, rf"^\[0\] step {after}/")
    pids = re.findall(r"^\[(\d)\] pid (\d+)", "".join(lines), re.MULTILINE)
    os.kill(int(dict(pids)[str(number)]), how)
    # Acceptance: the others end within a minute.
    minute = Timer(60, os.killpg, (process.pid, signal.SIGKILL))
    minute.start()
    lines += until(process, "(?!)")
    minute.cancel()
    return "".join(lines)


class Ended(NamedTuple):
    workdir: Path
    status: int
    output: str


@pytest.fixture(scope="module")
def killed(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two processes; the second was killed."""
    workdir = tmp_path_factory.mktemp("two")
    with two(manifest, workdir) as processes:
        output = end(processes, 1, signal.SIGKILL)
        return Ended(workdir, processes.wait(), output)


@pytest.fixture(scope="module")
def stopped(manifest: Path, killed: Ended) -> Ended:
    """The same command again; the second process got SIGTERM."""
    with two(manifest, killed.workdir) as processes:
        output = end(processes, 1, signal.SIGTERM)
        return Ended(killed.workdir, processes.wait(), output)


def assert_same(workdir: Path, one: Path) -> int:
    """Metrics, including validations, equal the one process's up to rounding; returns the last step."""
    lines, all_of_one = read_metrics(workdir), read_metrics(one)
    for got, want in zip(lines, all_of_one[: len(lines)], strict=True):
        assert got.keys() - {"changed"} == want.keys()
        for name in want.keys() - CLOCK:
            assert got[name] == pytest.approx(want[name], rel=1e-5), (got["step"], name)
    return lines[-1]["step"]


def lines_of(file: Path) -> list[str]:
    return sorted(file.read_text().splitlines())


@pytest.mark.exhaustive
def test_two_processes_measure_what_one_does_until_one_is_killed_and_named(killed: Ended, one: Path):
    assert assert_same(killed.workdir, one) >= 5
    assert killed.status == 128 + signal.SIGKILL
    pid = re.search(r"^\[1\] pid (\d+)", killed.output, re.MULTILINE)
    assert pid
    assert re.search(rf"^\[0\] error: process 1 \(pid {pid[1]} on .*\) is gone", killed.output, re.MULTILINE)
    assert "Traceback" not in killed.output


@pytest.mark.exhaustive
def test_the_same_command_continues_and_a_signal_to_one_process_stops_all_after_the_same_step(
    stopped: Ended, one: Path
):
    assert re.search(r"^\[0\] continuing from step [24] ", stopped.output, re.MULTILINE)
    last = assert_same(stopped.workdir, one)
    assert f"stopped by SIGTERM after step {last}, which is saved" in stopped.output
    assert stopped.status == STOPPED
    assert last < STEPS, "the signal came too late to show anything"


@pytest.mark.exhaustive
def test_one_process_continues_what_two_began(stopped: Ended, manifest: Path, one: Path):
    before = read_metrics(stopped.workdir)[-1]["step"]
    train(config(manifest), stopped.workdir)
    assert assert_same(stopped.workdir, one) == STEPS
    assert read_metrics(stopped.workdir)[before]["compilations"] == 1, "the first line of this call"
    for name in ("hypotheses.jsonl", "skipped.jsonl"):
        assert lines_of(stopped.workdir / name) == lines_of(one / name)
    assert len(lines_of(one / "skipped.jsonl")) == 2


@pytest.mark.exhaustive
def test_two_processes_that_share_every_row_continue_what_one_began(
    manifest: Path, one: Path, tmp_path: Path
):
    """On (data, context) = (1, 4) instead of (2, 2): both processes load all rows, which count once."""
    shutil.copytree(one, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    (tmp_path / "hypotheses.jsonl").unlink()
    with two(manifest, tmp_path, "--mesh.data", "1", "--mesh.context", "4") as processes:
        output = "".join(until(processes, "(?!)"))
        assert processes.wait() == 0, output
    assert f"continuing from step {STEPS - 2}" in output
    assert assert_same(tmp_path, one) == STEPS
    changes = {line["step"]: line["changed"] for line in read_metrics(tmp_path) if "changed" in line}
    assert changes.keys() == {STEPS - 1}, "only the first step on the new mesh says what changed"
    assert "mesh.data 2 -> 1" in changes[STEPS - 1]
    assert lines_of(tmp_path / "hypotheses.jsonl") == lines_of(one / "hypotheses.jsonl")


PROCESS = """
import sys, time
from jaxthd.parallel import processes as distributed
from jaxthd.parallel.processes import exchange, require_same, started

what, *address = sys.argv[1:]
if what == "missing":
    distributed.START_SECONDS = distributed.NOTICE_SECONDS = 3
with started(*((address[0], 3, int(address[1])) if address else (None,) * 3)) as processes:
    me = distributed.global_state.process_id
    distributed.PATIENCE_SECONDS = 2
    print(exchange([me, processes]))
    if what == "differs":
        require_same("the weather", "fine" if me != 1 else "foul")
    if what == "breaks" and me == 0:
        distributed.NOTICE_SECONDS = 0
        raise RuntimeError("a defect")
    if what == "sticks" and me == 2:
        time.sleep(60)
    exchange(None)
"""


def three(
    what: str, *, slurm: bool = False, present: Sequence[int] = (0, 1, 2)
) -> list[tuple[int, str, str]]:
    """(exit status, standard output, errors) of three processes, or of some of them, that run PROCESS."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for i in present:
        # The variables that srun gives its tasks.
        told = {"STEP_NODELIST": "localhost", "NTASKS": 3, "STEP_NUM_TASKS": 3, "PROCID": i, "LOCALID": i}
        told = {f"SLURM_{k}": str(v) for k, v in told.items()} if slurm else {}
        environment = PLAIN | told | {"SLURM_JOB_ID": "1", "JAX_COORDINATOR_PORT": str(port)}
        address = () if slurm else (f"localhost:{port}", str(i))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, what, *address],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_what_each_gives_all_have_and_process_0_alone_speaks():
    """Started as by SLURM."""
    (_, said, _), *others = ended = three("nothing", slurm=True)
    assert [status for status, *_ in ended] == [0, 0, 0]
    assert said == "[[0, 3], [1, 3], [2, 3]]\n"
    assert [said for _, said, _ in others] == ["", ""]


@pytest.mark.parametrize(
    ("what", "culprit", "why"),
    [
        ("breaks", 0, "a defect"),
        pytest.param(
            "sticks", 2, "did not come within 2 s to where the others wait", marks=pytest.mark.exhaustive
        ),
        ("differs", 1, "is not that in process 0"),
    ],
)
def test_when_one_process_ends_or_hangs_all_end_and_say_which_and_why(what: str, culprit: int, why: str):
    for i, (status, _, errors) in enumerate(three(what)):
        assert status == 1
        assert why in errors
        assert i == culprit or re.search(rf"error: .*process {culprit} \(pid \d+ on \S+\)", errors)


def test_who_is_not_started_is_named():
    for status, _, errors in three("missing", present=(0, 1)):
        assert status != 0
        assert re.search(r"timed out task names:\s+2\b", errors)
    ((status, _, errors),) = three("missing", present=(1,))
    assert status == 1
    assert re.search(r"^error: process 1 has no answer from process 0 at localhost:\d+", errors, re.MULTILINE)


def test_an_incomplete_address_is_refused():
    for address in [
        ("localhost:1", None, None),
        ("localhost:1", 2, None),
        (None, 2, 0),
        ("localhost", 2, 0),
        ("localhost:1", 2, 2),
        ("localhost:1", 2, -1),
    ]:
        with pytest.raises(UserError, match=r"--coordinator is .*expected"), started(*address):
            pass


def test_one_process_is_several_of_one():
    with started("localhost:1", 1, 0) as processes:
        assert processes == 1
        assert exchange({"a": (1, 2)}) == [{"a": [1, 2]}]
        assert distributed.is_first()
