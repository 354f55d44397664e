"""Reads what W&B wrote offline. Its process keeps the newest records in memory, which a kill loses."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
