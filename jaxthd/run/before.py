"""Commands that a new run needs before it starts, such as the training of the model that it starts from."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from jaxthd.errors import UserError
from jaxthd.terminal.arguments import CommandLine


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
