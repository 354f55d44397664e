"""The contract of a tracker: something that shows a run's metrics, such as TensorBoard, to people."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxthd.files.jsonl import append_line, read_lines, write_lines
from jaxthd.objectives.metric import VALIDATION, Number

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


FOLDER = "trackers"


class Sent:
    """WORKDIR/trackers/NAME.jsonl: the id of the tracker's run, and the last step that it was given.

    id: "" before there is one. step: -1 before any. A new run begins anew.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._path = run.workdir / FOLDER / f"{name}.jsonl"
        self._path.parent.mkdir(exist_ok=True)
        found = [] if run.is_new else read_lines(self._path)
        self.id: str = next((x["id"] for x in found if "id" in x), "")
        self.step: int = max((x["step"] for x in found if "step" in x), default=-1)
        if self.id:
            self.started(self.id)

    def started(self, run_id: str) -> None:
        """The tracker's run has this id."""
        self.id = run_id
        write_lines(self._path, [{"id": run_id}, {"step": self.step}])

    def is_news(self, step: int) -> bool:
        """Whether the tracker lacks the step. One that is run again after a kill, it has already."""
        return step > self.step

    def add(self, step: int) -> None:
        """The tracker has the step. Each is written at once, so that a kill loses none."""
        self.step = step
        append_line(self._path, {"step": step})
