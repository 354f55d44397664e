"""Weights & Biases (pip install 'jaxthd[wandb]').

It is set up as W&B says: `wandb login`, or WANDB_MODE=offline, which writes into WORKDIR/wandb;
WANDB_PROJECT and WANDB_ENTITY say where the run appears.
"""

import json
import os
import secrets
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxthd.run.trackers.tracker import Line, Sent, TrackedRun, scalars
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
        """Adds a line of metrics.jsonl, unless W&B has its step."""
        step = line["step"]
        if self._sent.is_news(step):
            self._run.log(scalars(line) | {"_timestamp": line["time"]}, step=step, commit=True)
            self._sent.add(step)

    def close(self, *, failed: bool) -> None:
        """Ends the run, as failed or not, and W&B's process unless the program has a run of its own."""
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


HEADER, RECORD, BLOCK = 7, 7, 32768
"""Bytes of a file's header, of a record's, and of a block (LevelDB's log format)."""
WHOLE, LAST = 1, 4
"""Kinds of records that end what was written as one."""


def histories(workdir: Path, run_id: str) -> Iterator[dict[str, Any]]:
    """The lines that were logged to a run offline, a dict by names with "_step", from the first on.

    workdir: that has W&B's folder wandb. Needs the package wandb.
    """
    from wandb.proto import wandb_internal_pb2

    for path in sorted((workdir / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")):
        for record in _records(path.read_bytes()):
            history = wandb_internal_pb2.Record.FromString(record).history
            if history.item:
                items = {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in history.item}
                yield {"_step": history.step.num} | items


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file. What a kill cut short is left out."""
    position, parts = HEADER, b""
    while position + RECORD <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD:  # the rest of a block is filled with zeros
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + RECORD])
        position += RECORD
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
