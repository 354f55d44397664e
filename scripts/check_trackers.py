"""Whether W&B and MLflow hold every step of a killed and continued run once, as metrics.jsonl has it.

    python scripts/check_trackers.py

Needs wandb and mlflow (pip install -e '.[wandb,mlflow]'); installs nothing and uses no network. Runs
`jaxthd train` and `jaxthd grpo` on tiny models and noise, on the CPU, with all three trackers: W&B offline,
MLflow in files. Each run is killed (kill -9) and continued by the same command. Then what the packages wrote
is read back and compared with metrics.jsonl, number by number. Last, a run whose trackers all fail must end
well, and so must one whose W&B process is stopped (SIGSTOP) before the end, which W&B would wait for as
Python exits. Prints a line for each check; exits 1 if one fails. Takes about 4 minutes on 2 cores.
"""

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.trackers.background import CLOSE_SECONDS
from jaxthd.run.trackers.tracker import scalars
from jaxthd.run.trackers.wandb_files import histories
from tests.survival import write_recordings

STEPS, KILL_AFTER = 10, 5
TRACKERS = ("tensorboard", "wandb", "mlflow")
ROOT = Path(__file__).parents[1]
CONFIGS = {"train": "check_survival.py", "grpo": "check_grpo_survival.py"}
Points = dict[tuple[str, int], float]
"""Values by (tag, step)."""


class History(NamedTuple):
    """What a tracker holds. runs: ids of its runs. repeated: numbers that it has twice."""

    runs: set[str]
    points: Points
    repeated: int


def main() -> int:
    missing = [name for name in ("wandb", "mlflow") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} not installed; expected both: pip install -e '.[wandb,mlflow]'")
        return 1
    rows: list[tuple[bool, str]] = []
    with tempfile.TemporaryDirectory(prefix="jaxthd-trackers-") as name:
        folder = Path(name)
        write_recordings(folder)
        for command in CONFIGS:
            workdir = folder / command
            killed_at = run(command, folder, workdir, kill=True)
            last = run(command, folder, workdir)
            rows.append((last == STEPS, f"{command}: killed after step {killed_at}, ended with step {last}"))
            expected = points(read_metrics(workdir))
            for tracker, found in (("W&B", of_wandb(workdir)), ("MLflow", of_mlflow(workdir))):
                rows.append(compared(f"{command}: {tracker}", found, expected))
        broken = {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
        broken |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        last = run("train", folder, folder / "broken", more=broken | {"WANDB_INIT_TIMEOUT": "5"})
        log = (folder / "broken.log").read_text()
        reports = [log.count(f"the tracker {name} has failed") for name in TRACKERS]
        says = "without any server: ended with step {}, reports of tensorboard, wandb, mlflow {}"
        rows.append((last == STEPS and reports == [0, 1, 1], says.format(last, reports)))
        rows.append(with_stopped_service(folder))
    for holds, text in rows:
        print(f"{'holds' if holds else 'FAILS':5}  {text}")
    return 0 if all(holds for holds, _ in rows) else 1


def with_stopped_service(folder: Path) -> tuple[bool, str]:
    """A run whose W&B process is stopped after KILL_AFTER steps, so that it never answers again."""
    workdir = folder / "stopped"
    process = start("train", folder, workdir)
    while process.poll() is None and last_step(workdir) < KILL_AFTER:
        time.sleep(0.02)
    services = [pid for pid in children(process.pid) if "wandb" in Path(f"/proc/{pid}/comm").read_text()]
    for pid in services:
        os.kill(pid, signal.SIGSTOP)
    while process.poll() is None and last_step(workdir) < STEPS:
        time.sleep(0.02)
    began = time.monotonic()
    try:
        status: int | str = process.wait(10 * CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        status = "none: it hangs"
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    last, reports = last_step(workdir), (folder / "stopped.log").read_text().count("has not ended within")
    text = f"W&B's process stopped: {len(services)} stopped, ended with step {last}, exit status {status}, "
    text += f"{time.monotonic() - began:.0f} s after it, {reports} report"
    return (last, status, reports, len(services)) == (STEPS, 0, 1, 1), text


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
    options: dict[str, Any] = {
        "config": ROOT / "scripts" / CONFIGS[command],
        "data.manifest": folder / "manifest.jsonl",
    }
    options |= {"workdir": workdir, "train.steps": STEPS, "mesh.data": 1, "mesh.context": 1}
    words = [text for option, value in options.items() for text in (f"--{option}", str(value))]
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


def compared(what: str, found: History, expected: Points) -> tuple[bool, str]:
    """Timings of steps that ran twice differ; the tracker has those of the first time."""
    timed = ("second", "seconds", "goodput", "utilisation")
    wrong = [
        key
        for key, value in expected.items()
        if key not in found.points
        or not (key[0].endswith(timed) or found.points[key] == value or math.isnan(value))
    ]
    steps = {step for _, step in found.points}
    holds = not wrong and not found.repeated and len(found.runs) == 1 and steps == {s for _, s in expected}
    text = f"{len(found.points)} numbers of {len(steps)} steps in {len(found.runs)} run(s), "
    text += f"{len(wrong)} wrong or missing, {found.repeated} repeated"
    return holds, f"{what}: {text}{f', such as {wrong[0]}' if wrong else ''}"


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


if __name__ == "__main__":
    sys.exit(main())
