"""Runs of real commands whose output goes into a pipe that is read no further: `jaxthd ... | head -3`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthd.files.run_folder import write_config
from jaxthd.run.metrics_file import read_metrics
from tests.quick_compilation import QUICK
from tests.test_grpo import STEPS, config_of, write_prompts

WARNING = "warning: nobody reads standard output any more (a closed pipe or terminal): this command goes on"


def piped(folder: Path, command: str, *options: str) -> str:
    """Runs the command into a pipe that `head -3` reads; returns what it wrote to standard error."""
    words = [sys.executable, "-m", "jaxthd", command, "run", *options]
    environment = os.environ | {"XLA_FLAGS": QUICK, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    run = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=environment)
    with run:
        head = subprocess.run(["head", "-3"], stdin=run.stdout, capture_output=True, text=True, check=True)
        assert run.stdout
        run.stdout.close()
        _, errors = run.communicate()
    assert run.returncode == 0, errors
    assert len(head.stdout.splitlines()) == 3
    return errors


@pytest.mark.parametrize("command", ["train", pytest.param("grpo", marks=pytest.mark.exhaustive)])
def test_a_closed_pipe_does_not_end_a_run(command: str, tmp_path: Path):
    """It goes on to its last step, and all of it is in the files."""
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", config_of(write_prompts(tmp_path)))
    options = "--train.validate-every 0 --rollout.validation-prompts 0"
    if command == "train":
        options += " --train.objective sft --rollout.updates 1 --posttraining.reference-every 0"
    errors = piped(tmp_path, command, *options.split())
    assert WARNING in errors
    assert "Traceback" not in errors
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert (tmp_path / "run" / "checkpoints" / str(STEPS)).is_dir()
    assert f"{STEPS} steps, " in (tmp_path / "run" / "report.txt").read_text()
