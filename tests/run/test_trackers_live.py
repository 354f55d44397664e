"""The packages of W&B and MLflow hold every step of a killed and continued run once, as metrics.jsonl does.

Needs pip install -e '.[wandb,mlflow]' and no network: W&B is offline, MLflow in files.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.trackers.background import CLOSE_SECONDS
from jaxthd.run.trackers.tracker import scalars
from jaxthd.run.trackers.wandb import histories
from tests.survival import tiny
from tests.survival.runs import write_recordings

pytestmark = pytest.mark.nightly
STEPS, KILL_AFTER = 10, 5
TRACKERS = ("tensorboard", "wandb", "mlflow")
Points = dict[tuple[str, int], float]
"""Values by (tag, step)."""


class History(NamedTuple):
    """What a tracker holds. runs: ids of its runs. repeated: numbers that it has twice."""

    runs: set[str]
    points: Points
    repeated: int


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with recordings, where both packages are installed."""
    for name in ("wandb", "mlflow"):
        pytest.importorskip(name)
    write_recordings(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["train", "grpo"])
def test_trackers_hold_what_metrics_jsonl_holds(command: str, folder: Path):
    """Number by number, after kill -9 and the same command again."""
    workdir = folder / command
    assert run(command, folder, workdir, kill=True) < STEPS
    assert run(command, folder, workdir) == STEPS
    expected = points(read_metrics(workdir))
    for found in (of_wandb(workdir), of_mlflow(workdir)):
        assert_holds(found, expected)


def test_a_run_whose_trackers_fail_ends_well(folder: Path):
    """Each is reported once."""
    broken = {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    broken |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    assert run("train", folder, folder / "broken", more=broken | {"WANDB_INIT_TIMEOUT": "5"}) == STEPS
    log = (folder / "broken.log").read_text()
    assert [log.count(f"the tracker {name} has failed") for name in TRACKERS] == [0, 1, 1]


def test_a_run_whose_wandb_process_never_answers_ends_well(folder: Path):
    """W&B would wait for its process, which is stopped (SIGSTOP), as Python exits."""
    workdir = folder / "stopped"
    process = start("train", folder, workdir)
    while process.poll() is None and last_step(workdir) < KILL_AFTER:
        time.sleep(0.02)
    services = [pid for pid in children(process.pid) if "wandb" in Path(f"/proc/{pid}/comm").read_text()]
    for pid in services:
        os.kill(pid, signal.SIGSTOP)
    try:
        while process.poll() is None and last_step(workdir) < STEPS:
            time.sleep(0.02)
        status = process.wait(10 * CLOSE_SECONDS)
    finally:
        process.kill()
        for pid in services:
            os.kill(pid, signal.SIGKILL)
    assert (last_step(workdir), status, len(services)) == (STEPS, 0, 1)
    assert (folder / "stopped.log").read_text().count("has not ended within") == 1


def children(process: int) -> list[int]:
    """The processes that it has started and that have not ended, on Linux."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found += [int(folder.name)] * (int(parent) == process)
    return found


def run(
    command: str, folder: Path, workdir: Path, *, kill: bool = False, more: Mapping[str, str] = {}
) -> int:
    """Starts or continues a run; returns its last step. kill: with kill -9, after KILL_AFTER steps."""
    process = start(command, folder, workdir, more)
    while process.poll() is None:
        if kill and last_step(workdir) >= KILL_AFTER:
            process.kill()
            process.wait()
        time.sleep(0.02)
    return last_step(workdir)


def start(command: str, folder: Path, workdir: Path, more: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Starts or continues a run, with the trackers."""
    options = {"config": tiny.__file__, "data.manifest": folder / "manifest.jsonl", "workdir": workdir}
    words = [text for option, value in options.items() for text in (f"--{option}", str(value))]
    words += tiny.GRPO.split() if command == "grpo" else []
    words += ["--train.steps", str(STEPS), "--data.validation-manifest", ""]
    words += ["--train.trackers", *TRACKERS]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), **more}
    with (folder / f"{workdir.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxthd", command, *words], stdout=log, stderr=log, env=environment
        )


def last_step(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def points(lines: list[dict[str, Any]]) -> Points:
    return {(tag, line["step"]): value for line in lines for tag, value in scalars(line).items()}


def assert_holds(found: History, expected: Points) -> None:
    """Timings of steps that ran twice differ; the tracker has those of the first time."""
    timed = ("second", "seconds", "goodput", "utilisation")
    wrong = [
        key
        for key, value in expected.items()
        if key not in found.points
        or not (key[0].endswith(timed) or found.points[key] == value or math.isnan(value))
    ]
    assert not wrong
    assert not found.repeated
    assert len(found.runs) == 1
    assert {step for _, step in found.points} == {step for _, step in expected}


def of_mlflow(workdir: Path) -> History:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    client = mlflow.MlflowClient((workdir / "mlruns").as_uri())
    found: Points = {}
    repeated, runs = 0, set()
    for experiment in client.search_experiments():
        for each in client.search_runs([experiment.experiment_id]):
            runs.add(each.info.run_id)
            for tag in each.data.metrics:
                for metric in client.get_metric_history(each.info.run_id, tag):
                    repeated += (tag, metric.step) in found
                    found[tag, metric.step] = metric.value
    return History(runs, found, repeated)


def of_wandb(workdir: Path) -> History:
    files = (workdir / "wandb").glob("offline-run-*/run-*.wandb")
    runs = {path.stem.removeprefix("run-") for path in files}
    found: Points = {}
    repeated = 0
    for each in runs:
        for history in histories(workdir, each):
            for tag, value in history.items():
                if not tag.startswith("_"):
                    repeated += (tag, history["_step"]) in found
                    found[tag, history["_step"]] = float(value)
    return History(runs, found, repeated)
