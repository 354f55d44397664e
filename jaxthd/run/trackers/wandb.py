"""Weights & Biases (pip install 'jaxthd[wandb]').

It is set up as W&B says: `wandb login`, or WANDB_MODE=offline, which writes into WORKDIR/wandb;
WANDB_PROJECT and WANDB_ENTITY say where the run appears.
"""

import os
import secrets
import sys
import threading
from typing import Any

from jaxthd.run.trackers.sent import Sent
from jaxthd.run.trackers.tracker import Line, TrackedRun, scalars
from jaxthd.run.trackers.wandb_files import histories
from jaxthd.terminal.leaving import may_hang

PROJECT = "jaxthd"
LEAVE_SECONDS = 1.0
"""Seconds that W&B may take to forget its exit hook."""
FLUSH_SECONDS = 1.0
"""Most seconds that W&B keeps a step in memory alone, in versions of it that can be told."""


class WandB:
    """The run's W&B run. When the run is continued, so is its W&B run, with the steps that it lacks.

    Offline, every command leaves a folder of the same run: `wandb sync --append` joins them.
    """

    def __init__(self, run: TrackedRun) -> None:
        may_hang("the tracker wandb")
        import wandb

        self._wandb: Any = wandb
        self._sent = Sent("wandb", run)
        if not self._sent.id:
            self._sent.started(secrets.token_hex(8))
        is_offline = os.environ.get("WANDB_MODE") == "offline"
        # The console belongs to jaxthd's progress: W&B does not capture it.
        settings = wandb.Settings(console="off")
        if "x_transaction_log_flush_interval" in type(settings).model_fields:
            settings.x_transaction_log_flush_interval = FLUSH_SECONDS
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.workdir.name,
            id=self._sent.id,
            resume=None if is_offline else "allow",
            dir=str(run.workdir.absolute()),
            config=dict(run.settings),
            allow_val_change=True,
            settings=settings,
        )
        # What W&B holds counts, not what it was given before a kill.
        if is_offline:
            self._sent.step = max((x["_step"] for x in histories(run.workdir, self._sent.id)), default=-1)
        elif self._run.resumed:
            self._sent.step = self._run.step - 1
        for line in run.lines:
            self.write(line)

    def write(self, line: Line) -> None:
        step = line["step"]
        if self._sent.is_news(step):
            self._run.log(scalars(line) | {"_timestamp": line["time"]}, step=step, commit=True)
            self._sent.add(step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        if self._wandb.run is None:  # the program has no run of its own
            # Ends W&B's process here, where that takes a bounded time; else W&B waits for it as Python exits.
            self._wandb.teardown()


def leave_behind() -> None:
    """W&B is not waited for any more, neither here nor as Python exits.

    wandb.teardown removes W&B's exit hook before it waits for its process, so it may wait in a thread.
    """
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        leaving = threading.Thread(target=wandb.teardown, name="end of wandb", daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)
