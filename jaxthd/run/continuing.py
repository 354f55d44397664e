"""The start of the commands that train: their options, their workdir, what a new run needs before."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.paths import home_path
from jaxthd.files.run_folder import source_of
from jaxthd.files.stores import is_url
from jaxthd.objectives.answers import draws_answers
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import PROCESS_OPTIONS, CommandLine

OPTIONS: dict[str, dict[str, Any]] = {
    "workdir": {
        "type": home_path,
        "metavar": "FOLDER",
        "help": "where the run is kept and continued, a folder or a URL (s3, gs, az); by default the "
        "workdir in SOURCE, or runs/NAME, NAME "
        "being the config file's",
    },
    **PROCESS_OPTIONS,
}


def workdir_of(line: CommandLine) -> Path:
    """The workdir that a training command starts or continues. Raises UserError for a checkpoint of a run."""
    if line.options.workdir:
        return line.options.workdir
    if line.run and source_of(line.run)[1] != "newest":
        raise UserError(
            f"{line.run} names a checkpoint; expected a workdir, which is continued from its newest one. To "
            f"start a new run from this one: --workdir NEW --train.init-from {line.run}"
        )
    return home_path(line.run.removesuffix("@newest")) if line.run and is_url(line.run) else line.folder


def command_of(config: Config) -> str:
    """The command that trains with the config's objective: "grpo" where that needs drawn answers."""
    return "grpo" if draws_answers(objective_of(config)) else "train"


def require_objective(config: Config, *, draws: bool) -> None:
    """Raises UserError for an objective of the other command. draws: it trains on answers that are drawn."""
    if (command_of(config) == "grpo") == draws:
        return
    expected, other = ("drawn answers", "jaxthd train") if draws else ("data", "jaxthd grpo")
    raise UserError(
        f"train.objective is {config.train.objective!r}; expected one that trains on {expected}: use "
        f"{other}, or another objective"
    )


def run_before(line: CommandLine, workdir: Path) -> None:
    """Runs the commands of train.before, one after the other, if the workdir holds no run yet.

    Raises UserError where one fails, and where the run has several processes.
    """
    commands = line.config.train.before
    if line.run or not commands or (workdir / "checkpoints").is_dir():
        return
    if line.options.processes or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise UserError(
            f"a new run of several processes, and train.before names {len(commands)} commands; expected them "
            f"to be done: run {', '.join(f'`jaxthd {command}`' for command in commands)} in "
            f"{line.path.parent} first, and give --train.before without a value"
        )
    # They use this package, from wherever it was imported.
    package, path = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([package, path] if path else [package])}
    for command in commands:
        print(f"before this run: jaxthd {command}", flush=True)
        words = [sys.executable, "-m", "jaxthd", *shlex.split(command)]
        status = subprocess.run(words, cwd=line.path.parent, env=environment, check=False).returncode
        if status:
            raise UserError(
                f"`jaxthd {command}`, which this run needs (train.before in {line.path}), ended with status "
                f"{status}; expected 0: see above, and correct its cause"
            )
