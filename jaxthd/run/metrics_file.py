"""Metrics kept and shown: a line a step in metrics.jsonl, the same for trackers, and the progress."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.jsonl import append_line, keep_lines, read_lines
from jaxthd.files.run_folder import flat
from jaxthd.objectives.sft import SFT
from jaxthd.parallel.processes import is_first
from jaxthd.run.display import Display, display_of
from jaxthd.run.goodput import TimeAccount
from jaxthd.run.progress import Progress
from jaxthd.run.trackers.background import BackgroundTracker
from jaxthd.run.trackers.mlflow import MLflow
from jaxthd.run.trackers.tensorboard import EventFile
from jaxthd.run.trackers.tracker import TrackedRun, Tracker
from jaxthd.run.trackers.wandb import WandB, leave_behind

FILE = "metrics.jsonl"
TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": lambda run: EventFile(run.workdir / "tensorboard", run.lines),
    "wandb": WandB,
    "mlflow": MLflow,
}
"""What train.trackers may name. The library of one is imported when it is opened."""
LEAVE_BEHIND: Mapping[str, Callable[[], None]] = {"wandb": leave_behind}
"""Actions for a tracker that does not end, so that it does not keep the process alive."""


class Metrics(AbstractContextManager["Metrics"]):
    """Keeps the metrics of the run in `workdir`, and shows its progress. A context manager.

    Of several processes process 0 does so; in the others nothing happens.
    last_step: of the restored checkpoint. Later lines are of a run that was cut off, and are removed; where
    it is 0, all are.
    steps: the run's last step. display: how its metrics are shown; None: as those of SFT. trackers: names in
    TRACKERS (jaxthd.run.metrics_file) of what shows the metrics too. settings: those of the run, for
    trackers, by their dotted names.
    Raises OSError, naming the file, when metrics.jsonl cannot be written. A tracker never raises.
    """

    def __init__(
        self,
        workdir: Path,
        last_step: int,
        steps: int,
        *,
        display: Display | None = None,
        trackers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._path, self._writes = workdir / FILE, is_first()
        self._progress = Progress(steps, display or display_of(SFT()))
        self._trackers: list[BackgroundTracker] = []
        if not self._writes:
            return
        is_new = not self._path.exists()
        kept = keep_lines(self._path, lambda line: last_step > 0 and line["step"] <= last_step)
        run = TrackedRun(workdir, settings, [_null_is_nan(line) for line in kept], is_new)
        self._trackers = [
            BackgroundTracker(name, TRACKERS[name], run, self.say, LEAVE_BEHIND.get(name, lambda: None))
            for name in dict.fromkeys(trackers)
        ]

    def step(self, line: Mapping[str, Any]) -> None:
        """Adds a line (metrics_line, with validation results if there are any) and its "time", Unix seconds.

        The line of step 0 may hold validation results alone: those of the model before training.
        """
        if not self._writes:
            return
        timed = {**line, "time": round(time.time(), 3)}
        append_line(self._path, timed)
        for tracker in self._trackers:
            tracker.write(timed)
        self._progress.step(timed)

    def say(self, text: str) -> None:
        """Prints a line of its own, which leaves the live progress line whole."""
        if self._writes:
            self._progress.say(text)

    def __exit__(self, *error: object) -> None:
        self._progress.close()
        for tracker in self._trackers:
            tracker.close(failed=error[0] is not None)


def open_metrics(
    workdir: Path, last_step: int, config: Config, account: TimeAccount, display: Display
) -> Metrics:
    """The Metrics of a run, whose account goes on from the lines that there are."""
    account.continued(workdir / FILE, last_step)
    train, settings = config.train, flat(asdict(config))
    return Metrics(
        workdir, last_step, train.steps, display=display, trackers=train.trackers, settings=settings
    )


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, a dict a step. Numbers that were not finite are NaN.

    Raises UserError where no run has left any.
    """
    path = workdir / FILE
    lines = [_null_is_nan(line) for line in read_lines(path)]
    if not lines:
        found = "holds no line" if path.exists() else "does not exist"
        raise UserError(f"{path} {found}; expected the metrics of a run: give its workdir")
    return lines


def lost_text(workdir: Path, last_step: int) -> str:
    """A sentence on the steps that ran after the checkpoint of `last_step`, and run again; "" for none.

    Call it before open_metrics, which removes their lines.
    """
    lost = [line for line in read_lines(workdir / FILE) if line["step"] > last_step]
    if not lost:
        return ""
    seconds = sum(line.get("step_seconds") or 0.0 for line in lost)
    steps = f"steps {last_step + 1} to {lost[-1]['step']}" if len(lost) > 1 else f"step {lost[0]['step']}"
    when = "after the checkpoint that is continued" if last_step else "before a checkpoint was saved"
    return f"{len(lost)} step(s) are lost, {seconds:,.1f} s of work: {steps} ran {when}, and run again"


def _null_is_nan(line: dict[str, Any]) -> dict[str, Any]:
    return {k: math.nan if v is None else v for k, v in line.items()}
