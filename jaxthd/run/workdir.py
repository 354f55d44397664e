"""The workdir of a run: one run at a time, with one config.

WORKDIR/lock           locked while a process trains there
WORKDIR/config.json    the settings of the run
"""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TextIO

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.run_folder import DamagedConfigError, differences, read_settings, write_config
from jaxthd.parallel.processes import is_first

FREE = (
    "mesh.*",
    "compute.*",
    "data.manifest",  # a data set may have moved; the data position checks its content
    "data.tarred_audio",
    "data.validation_manifest",
    "data.validation_tarred_audio",
    "data.workers",
    "data.prefetch",
    "train.steps",
    "train.validate_every",
    "train.validation_batches",
    "train.max_new_tokens",
    "train.normaliser",
    "train.max_skipped_steps",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.tensorboard",
    "train.draw_last_batch",
)
"""Fields that may differ when a run is continued: they do not change what is learned."""
HELD = ("compute.dtype", "compute.fp8")
"""Fields that FREE matches and that may not differ all the same: they change every number."""


@contextmanager
def opened(workdir: Path, config: Config) -> Iterator[None]:
    """Holds the workdir, which is made where it is missing, for this run until the end, however it ends.

    Process 0 does so; in other processes nothing happens. Writes config.json.
    Raises UserError where another run holds the workdir, where it holds a run of another config (one that
    differs in a field that is not FREE), and where its config.json is one of an older jaxthd. A config.json
    that is missing or damaged beside a run is reported and left as it is: this config may not be the run's.
    """
    if not is_first():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    # The kernel's lock ends with the process, after a kill -9 too. Child processes do not inherit the file.
    with (workdir / "lock").open("a+") as file:
        _lock(file, workdir)
        if not _holds_a_run(workdir) or _is_of(workdir, config):
            write_config(workdir, config)
        yield


def _lock(file: TextIO, workdir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise UserError(
            f"{workdir} is in use by another run ({file.read()}); expected one at a time: wait for it, "
            "stop it, or choose another --workdir"
        ) from error
    except OSError as error:
        print(
            f"warning: {workdir} cannot be locked ({error}); make sure that no other run uses it",
            file=sys.stderr,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _holds_a_run(workdir: Path) -> bool:
    metrics = workdir / "metrics.jsonl"
    checkpoints = (path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints)


def _is_of(workdir: Path, config: Config) -> bool:
    """Whether the run there has this config; False where its config.json cannot be read.

    Raises UserError where it has another config.
    """
    try:
        stored = read_settings(workdir)
    except DamagedConfigError as error:
        print(f"warning: {error}. Until then they are not compared with these", file=sys.stderr)
        return False
    differing = [x for x in differences(stored, config) if not _is_free(x.name)]
    if differing:
        lines = "".join(f"\n  {x.name}: {x.there} in the run, {x.here} now" for x in differing)
        raise UserError(
            f"{workdir} holds a run of another config; fields that differ:{lines}\n"
            "Restore these settings to continue it, or choose another --workdir"
        )
    return True


def _is_free(name: str) -> bool:
    return name not in HELD and any(fnmatch(name, pattern) for pattern in FREE)
