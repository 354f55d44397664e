"""What a new run needs to be done before it starts, such as the training of the model that it starts from."""

import shlex
import subprocess
import sys
from pathlib import Path

from jaxthd.errors import UserError
from jaxthd.terminal.arguments import CommandLine


def run_before(line: CommandLine, workdir: Path) -> None:
    """Runs the commands of train.before, one after the other, if the workdir holds no run yet.

    Of several processes, process 0 does. Raises UserError where one fails.
    """
    if line.run or (workdir / "checkpoints").is_dir() or line.options.process not in (None, 0):
        return
    for command in line.config.train.before:
        print(f"before this run: jaxthd {command}", flush=True)
        words = [sys.executable, "-m", "jaxthd", *shlex.split(command)]
        status = subprocess.run(words, cwd=line.path.parent, check=False).returncode
        if status:
            raise UserError(
                f"`jaxthd {command}`, which this run needs (train.before in {line.path}), ended with status "
                f"{status}; expected 0: see above, and correct its cause"
            )
