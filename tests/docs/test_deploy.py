"""The files of scripts/deploy agree with the commands that they start."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from jaxthd.run.signals import STOPPED
from jaxthd.terminal import arguments
from jaxthd.terminal.arguments import PROCESS_OPTIONS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts" / "deploy"


@pytest.mark.parametrize(("status", "is_queued"), [(STOPPED, True), (0, False), (1, False)])
def test_slurm_queues_a_stopped_run_again(tmp_path: Path, status: int, is_queued: bool):
    """By programs that stand for Slurm's: each writes down how it was called."""
    for name, code in (("srun", status), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> calls\nexit {code}\n')
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = [DEPLOY / "slurm.sh", "train", "my config.py", "--train.steps", "4"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    assert ran.returncode == status
    started, *requeued = (tmp_path / "calls").read_text().splitlines()
    assert started == "srun --kill-on-bad-exit=1 jaxthd train my config.py --train.steps 4"
    assert requeued == ["scontrol requeue 7"] * is_queued


def test_the_jobset_tells_processes_their_place_and_restarts_what_was_stopped():
    spec = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())["spec"]
    (job,) = (replicated["template"]["spec"] for replicated in spec["replicatedJobs"])
    (container,) = job["template"]["spec"]["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    assert len(environment) == len(PROCESS_OPTIONS)
    read = Path(str(arguments.__file__)).read_text()
    assert all(f'"{name}"' in read for name in environment)
    processes = int(environment["JAX_NUM_PROCESSES"]["value"])
    assert processes == job["parallelism"] == job["completions"]
    (stopped,) = (rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule)
    assert (stopped["containerName"], stopped["values"]) == (container["name"], [STOPPED])
    assert spec["failurePolicy"]["rules"][0]["action"] == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.nightly
def test_the_images_commands_install_a_jaxthd_that_runs(tmp_path: Path):
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    image = tmp_path / "image"
    venv.create(tmp_path / "venv", with_pip=True)
    for words in (line.split()[1:] for line in lines if line.startswith("COPY")):
        *sources, target = words
        place = image / target
        for source in sources:
            into = place / source if target.endswith("/") else place
            into.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-r", ROOT / source, into], check=True)
    path = f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "EXTRAS": "", "PYTHONPATH": ""}
    runs = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    for command in (*runs, "jaxthd doctor"):
        ran = subprocess.run(command, shell=True, cwd=image, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, f"{command}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    version = re.search(r"Python (3\.\d+)", ran.stdout)
    assert version is None or version[1] == f"3.{sys.version_info.minor}"
