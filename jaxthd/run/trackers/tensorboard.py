"""TensorBoard event files."""

import math
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from jaxthd.files.jsonl import naming
from jaxthd.run.trackers.tracker import scalars

FLUSH_SECONDS = 5.0
"""Most seconds that TensorBoard waits for a written step."""


class EventFile:
    """The run's TensorBoard file, in `folder`, written anew from the lines so far.

    So it has every step once, also those that a killed process had not written yet, and a lost file is
    restored. tensorboardX's SummaryWriter is not used: it writes from a thread, and after a write error, as
    on a full disk, its queue fills and the next call blocks for ever. Its RecordWriter raises.
    """

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        now = time.time()
        self._path = folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}"
        self._file, self._flushed = RecordWriter(str(self._path)), -math.inf
        # SessionLog.START makes a running TensorBoard forget what it has read of the old file.
        start = SessionLog(status=SessionLog.START)
        for event in (Event(file_version="brain.Event:2"), Event(session_log=start)):
            event.wall_time = now
            self._file.write(event.SerializeToString())
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a step."""
        summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in scalars(line).items()])
        event = Event(wall_time=line.get("time", time.time()), step=line["step"], summary=summary)
        with naming(self._path):
            self._file.write(event.SerializeToString())
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self, *, failed: bool = False) -> None:
        """Writes what is left and closes the file. Raises OSError, which names it, where that fails."""
        with naming(self._path):
            self._file.close()
