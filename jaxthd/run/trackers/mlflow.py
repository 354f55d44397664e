"""MLflow (pip install 'jaxthd[mlflow]').

MLFLOW_TRACKING_URI says where the run is kept, and MLFLOW_EXPERIMENT_NAME in which experiment. Without the
former it is kept in files, in WORKDIR/mlruns.
"""

import os
from contextlib import suppress
from itertools import dropwhile
from typing import Any

from jaxthd.run.trackers.tracker import Line, Sent, TrackedRun, scalars
from jaxthd.terminal.leaving import may_hang

EXPERIMENT = "jaxthd"
MOST_PARAMETERS = 100
"""Parameters that MLflow takes at once."""
MOST_LETTERS = 500
"""Letters of a parameter's value that every store takes."""


class MLflow:
    """The run's MLflow run. When the run is continued, so is its MLflow run, with the steps that it lacks."""

    def __init__(self, run: TrackedRun) -> None:
        may_hang("the tracker mlflow")
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            where = (run.workdir.absolute() / "mlruns").as_uri()
            # MLflow 3 keeps runs in files only where it is told to.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self._client, self._entities = mlflow.MlflowClient(where), mlflow.entities
        self._sent = Sent("mlflow", run)
        # A kill may have come while the next step was sent: MLflow takes its numbers one by one, in order.
        self._may_hold_some = bool(self._sent.id)
        if self._sent.id:
            self._client.update_run(self._sent.id, status="RUNNING")
        else:
            self._start(run)
        for line in run.lines:
            self.write(line)

    def _start(self, run: TrackedRun) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=run.workdir.name)
        self._sent.started(created.info.run_id)
        parameters = [
            self._entities.Param(name, str(value)[:MOST_LETTERS]) for name, value in run.settings.items()
        ]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._sent.id, params=parameters[first : first + MOST_PARAMETERS])

    def write(self, line: Line) -> None:
        """Adds a line of metrics.jsonl, without the numbers that MLflow has of it."""
        step = line["step"]
        if not self._sent.is_news(step):
            return
        metrics: list[Any] = [
            self._entities.Metric(tag, float(value), int(1000 * line["time"]), step)
            for tag, value in scalars(line).items()
        ]
        if self._may_hold_some:
            metrics = list(dropwhile(self._holds, metrics))
            self._may_hold_some = False
        self._client.log_batch(self._sent.id, metrics=metrics)
        if "changed" in line:
            self._client.set_tag(self._sent.id, f"changed at step {step}", line["changed"])
        self._sent.add(step)

    def _holds(self, metric: Any) -> bool:
        """Whether MLflow has a number of this name and step; False where it cannot read what it has."""
        with suppress(Exception):
            history = self._client.get_metric_history(self._sent.id, metric.key)
            return any(point.step == metric.step for point in history)
        return False

    def close(self, *, failed: bool) -> None:
        """Marks the run as finished, or as failed."""
        self._client.set_terminated(self._sent.id, "FAILED" if failed else "FINISHED")
