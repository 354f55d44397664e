"""Draws the curves of a run again, from its metrics.

    jaxthd draw runs/cp2

Reads metrics.jsonl in the workdir, and writes curves.png there.
"""

import argparse

from jaxthd.errors import readable_errors
from jaxthd.figures.curves import draw_curves
from jaxthd.files.paths import home_path
from jaxthd.run.goodput import stored_seconds
from jaxthd.run.metrics_file import read_metrics


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    parser = argparse.ArgumentParser(prog="jaxthd draw", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workdir", type=home_path, help="folder of the run; receives curves.png")
    workdir = parser.parse_args(argv).workdir
    draw_curves(read_metrics(workdir), workdir / "curves.png", stored_seconds(workdir))
    print(workdir / "curves.png")


if __name__ == "__main__":
    with readable_errors():
        main()
