"""Draws the curves of a run again, from its metrics.

    jaxthd draw runs/cp2

Reads metrics.jsonl and config.json in the workdir, and writes curves.png there.
"""

import argparse
import sys
from pathlib import Path

from jaxthd.errors import UserError, readable_errors
from jaxthd.figures.curves import draw_curves
from jaxthd.files.paths import home_path
from jaxthd.files.run_folder import read_config
from jaxthd.objectives.answers import draws_answers
from jaxthd.objectives.sft import SFT
from jaxthd.rl.display import drawing_display
from jaxthd.run.display import Display, display_of
from jaxthd.run.goodput import stored_seconds
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.forward import objective_of


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    parser = argparse.ArgumentParser(prog="jaxthd draw", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workdir", type=home_path, help="folder of the run; receives curves.png")
    workdir = parser.parse_args(argv).workdir
    draw_curves(read_metrics(workdir), workdir / "curves.png", _display(workdir), stored_seconds(workdir))
    print(workdir / "curves.png")


def _display(workdir: Path) -> Display:
    """The display of the run; that of a supervised run where its objective cannot be found."""
    try:
        config = read_config(workdir)
        objective = objective_of(config)
        return drawing_display(config) if draws_answers(objective) else display_of(objective)
    except UserError as error:
        print(f"warning: {error}. The panels are those of supervised training", file=sys.stderr)
        return display_of(SFT())


if __name__ == "__main__":
    with readable_errors():
        main()
