"""Trains by reinforcement learning: draws answers, rewards them, and trains on both (GRPO).

    jaxthd grpo configs/grpo.py                      starts runs/grpo, or continues it
    jaxthd grpo runs/grpo --train.steps 400          continues it with its own settings but that

Each step draws rollout.group_size answers to each of rollout.prompts prompts of the training data, rewards
them with rollout.rewards, and makes rollout.epochs x rollout.updates updates from them. A workdir that holds
a checkpoint is continued, on any mesh. It receives
    metrics.jsonl      a JSON object for each step; the same for the trackers: TensorBoard in tensorboard/
    rollouts.jsonl     every answer that was drawn, with its rewards
    curves.png         reward, length, KL, word error rate over the steps
    report.txt         what was trained, the figures, answers right and wrong
    hypotheses.jsonl   hypotheses and references of the last validation
    skipped.jsonl      every prompt that was skipped, with the reason
    failures.jsonl     every reward that a function failed to give, with its prompt
    checkpoints/       parameters, optimizer state, reference policy, position in the prompts
    config.json        the settings of the run; changes.jsonl, tokenizer/ as for jaxthd train

Several processes can train together, as with jaxthd train. Each computes the rewards of a share of the
groups.
"""

import sys
from collections.abc import Collection
from pathlib import Path

from jaxthd.config import Config
from jaxthd.errors import readable_errors
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.rl.answers import AnswerSupplier
from jaxthd.run.continuing import OPTIONS, require_objective, run_before, workdir_of
from jaxthd.run.signals import STOPPED
from jaxthd.run.startup import devices_ready
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.leaving import ends_in_time
from jaxthd.training.loop import run_training


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("grpo", argv, OPTIONS, __doc__)
    workdir = workdir_of(line)
    require_objective(line.config, draws=True)
    run_before(line, workdir)
    with devices_ready(line.config.mesh, line.options):
        is_done = grpo(line.config, workdir, changes=line.given)
    if not is_done:
        sys.exit(STOPPED)


def grpo(config: Config, workdir: Path, changes: Collection[str] = ()) -> bool:
    """Runs, or continues, the training in `workdir` on drawn answers; see run_training.

    Raises UserError as that does, for reward functions that cannot be used or fail too often, and where
    drawing and training disagree by more than the compute dtype explains.
    """
    require_objective(config, draws=True)
    return run_training(config, workdir, AnswerSupplier, changes)


if __name__ == "__main__":
    with ends_in_time(), readable_errors():
        main()
