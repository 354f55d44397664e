"""What the commands that train share: their options, the workdir, and where a run goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.weights import start_state
from jaxthd.config import Config
from jaxthd.data.dataset import SynchronizedLoader
from jaxthd.data.prompts import PromptStream
from jaxthd.errors import UserError
from jaxthd.files.run_folder import Difference, source_of
from jaxthd.objectives.grpo import ADVANTAGE
from jaxthd.parallel.processes import is_first
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of
from jaxthd.steps.state import TrainState, abstract_state, canonical_shardings, training_form
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


def require_objective(config: Config, *, draws: bool) -> None:
    """Raises UserError for an objective of the other command. draws: it trains on answers that are drawn."""
    if (ADVANTAGE in objective_of(config).extras) == draws:
        return
    expected, other = ("drawn answers", "jaxthd train") if draws else ("data", "jaxthd grpo")
    raise UserError(
        f"train.objective is {config.train.objective!r}; expected one that trains on {expected}: use "
        f"{other}, or another objective"
    )


def newest_state(
    blueprint: Blueprint, mesh: Mesh, checkpoints: Checkpoints, loader: SynchronizedLoader | PromptStream
) -> TrainState:
    """The newest checkpoint's state, with the loader set to where its data goes on; else a new run's."""
    restored = checkpoints.restore_latest(abstract_state(blueprint), canonical_shardings(blueprint, mesh))
    if restored is None:
        return start_state(blueprint, mesh)
    state, position = restored
    loader.set_state(position)
    if is_first() and checkpoints.new_measure:
        print(checkpoints.new_measure)
    return training_form(state, blueprint, mesh)


def changed_settings(changes: Sequence[Difference], step: int) -> dict[str, str]:
    """Says what has changed since the steps before; returns it as a field of the next step's metrics line."""
    if not changes:
        return {}
    text = ", ".join(f"{x.name} {x.there} -> {x.here}" for x in changes)
    print(f"from step {step + 1} on: {text}")
    return {"changed": text}
