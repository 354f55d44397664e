"""Trains a model, or continues the training in a workdir.

    jaxthd train configs/cp2.py                         starts runs/cp2, or continues it
    jaxthd train runs/cp2 --train.steps 4000            continues it with its own settings but that

A workdir that holds a checkpoint is continued, on any mesh. It receives
    metrics.jsonl      a JSON object for each step; the same for the trackers: TensorBoard in tensorboard/
    curves.png         loss, word error rate and speed over the steps
    report.txt         what was trained, the figures, answers right and wrong
    hypotheses.jsonl   hypotheses and references of the last validation
    skipped.jsonl      every document that was skipped, with the reason
    not_finite.jsonl   steps whose update was skipped, with their documents
    checkpoints/       parameters, optimizer state, batch statistics, data position
    reference.jsonl    the reference policy's log-probabilities, with posttraining.reference cached
    layout.json        the context layout, where the run chose it
    config.json        the settings of the run; tokenizer/ a copy of its tokenizer
    changes.jsonl      settings that changed when the run was continued

Several processes can train together: SLURM's srun starts them, or each is given --coordinator HOST:PORT
--processes N --process I. They share the workdir; each writes its arrays of the checkpoints, and process 0
everything else.
"""

import sys
from collections.abc import Collection
from pathlib import Path

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.run.continuing import OPTIONS, require_objective, run_before, workdir_of
from jaxthd.run.signals import STOPPED
from jaxthd.run.startup import devices_ready
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.leaving import ends_in_time
from jaxthd.training.documents import DocumentSupplier
from jaxthd.training.loop import run_training


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("train", argv, OPTIONS, __doc__)
    workdir = workdir_of(line)
    require_objective(line.config, draws=False)
    run_before(line, workdir)
    with devices_ready(line.config.mesh, line.options):
        is_done = train(line.config, workdir, changes=line.given)
    if not is_done:
        sys.exit(STOPPED)


def train(config: Config, workdir: Path, changes: Collection[str] = ()) -> bool:
    """Runs, or continues, the training in `workdir` on packed documents; see run_training."""
    require_objective(config, draws=False)
    return run_training(config, workdir, DocumentSupplier, changes)


if __name__ == "__main__":
    with ends_in_time(), readable_errors():
        main()
