"""The trackers that train.trackers may name. The module of one is imported when it is opened."""

from collections.abc import Callable, Mapping

from jaxthd.run.trackers.mlflow import MLflow
from jaxthd.run.trackers.tensorboard import EventFile
from jaxthd.run.trackers.tracker import TrackedRun, Tracker
from jaxthd.run.trackers.wandb import WandB, leave_behind

TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": lambda run: EventFile(run.workdir / "tensorboard", run.lines),
    "wandb": WandB,
    "mlflow": MLflow,
}
LEAVE_BEHIND: Mapping[str, Callable[[], None]] = {"wandb": leave_behind}
"""Actions for a tracker that does not end, so that it does not keep the process alive."""
