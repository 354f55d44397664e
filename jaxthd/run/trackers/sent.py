"""The part of a run that a tracker with a store of its own, such as W&B, has: kept for when it continues."""

from jaxthd.files.jsonl import append_line, read_lines, write_lines
from jaxthd.run.trackers.tracker import TrackedRun

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
