"""The options of the commands that train, and the workdir that their command line names."""

from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.run_folder import source_of
from jaxthd.objectives.answers import draws_answers
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import PROCESS_OPTIONS, CommandLine

OPTIONS: dict[str, dict[str, Any]] = {
    "workdir": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "where the run is kept and continued; by default the workdir in SOURCE, or runs/NAME, NAME "
        "being the config file's",
    },
    **PROCESS_OPTIONS,
}


def workdir_of(line: CommandLine) -> Path:
    """The workdir that a training command starts or continues. Raises UserError for a checkpoint of a run."""
    if line.run and source_of(line.run)[1] != "newest" and not line.options.workdir:
        raise UserError(
            f"{line.run} names a checkpoint; expected a workdir, which is continued from its newest one. To "
            f"start a new run from this one: --workdir NEW --train.init-from {line.run}"
        )
    return line.options.workdir or (line.path if line.run else Path("runs") / line.path.stem)


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
