"""The contract of a tracker: something that shows a run's metrics, such as TensorBoard, to people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxthd.run.metrics import VALIDATION, Number

Line = Mapping[str, Any]


class TrackedRun(NamedTuple):
    """The run that a tracker is opened for.

    settings: those of the run, by their dotted names. lines: its lines of metrics.jsonl so far.
    is_new: nothing was measured in the workdir before this command.
    """

    workdir: Path
    settings: Mapping[str, Any]
    lines: Sequence[Line]
    is_new: bool


class Tracker(Protocol):
    """An open tracker. Any method may raise anything: jaxthd.run.trackers.background deals with it.

    It is made from a TrackedRun, and then has the run's lines so far.
    """

    def write(self, line: Line) -> None:
        """Adds a line of metrics.jsonl."""

    def close(self, *, failed: bool) -> None:
        """Ends. failed: the command ends with an error."""


def scalars(line: Line) -> dict[str, Number]:
    """The numbers of a metrics line by their tags: validation/loss of "validation_loss", else train/NAME."""
    return {
        (f"validation/{k.removeprefix(VALIDATION)}" if k.startswith(VALIDATION) else f"train/{k}"): v
        for k, v in line.items()
        if k not in ("step", "time") and not isinstance(v, str)
    }
