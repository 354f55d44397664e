"""The workdir of a run: one process at a time, one config.

WORKDIR/lock           locked for the life of the process that trains there
WORKDIR/config.json    the settings of the run
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_type_hints

from jaxthd.config import Config, ModelConfig
from jaxthd.errors import UserError

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
"""Fields among those that may not: they change every number."""


@contextmanager
def opened(workdir: Path, config: Config) -> Iterator[None]:
    """The workdir, made where it is missing, is this process's until the end, however it ends.

    Writes config.json. Raises UserError where another process holds the workdir, or where it holds a run of
    another config: one that differs in a field that is not FREE. A config.json that is missing or damaged
    beside a run is reported, and left so: this config may not be the run's.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    # A lock of the kernel's: it ends with the process, a kill -9 included. A child that is started as a new
    # program does not inherit the file.
    with (workdir / "lock").open("a+") as file:
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
        if not _holds_a_run(workdir) or _is_of(workdir / "config.json", config):
            write_config(workdir, config)
        yield


def write_config(workdir: Path, config: Config) -> None:
    write_atomically(workdir / "config.json", json.dumps(asdict(config), indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of the text, or what it held before, whenever the process or the machine stops."""
    scratch = path.with_name(f"{path.name}.tmp")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def is_run(folder: Path) -> bool:
    """Whether the folder holds checkpoints of a run."""
    return (folder / "checkpoints").is_dir()


def read_config(workdir: Path) -> Config:
    """The settings of the run there. A field that was added since then has its default.

    Raises UserError where config.json is missing, damaged, or has fields that there are no more.
    """
    file = workdir / "config.json"
    try:
        return _built(Config, json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); expected the settings of the run beside it: copy it anew"
        ) from error


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    """A dataclass from what asdict made of it, by way of JSON."""
    kinds = get_type_hints(kind)
    unknown = sorted(fields.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    return kind(
        **{
            name: _built(kinds[name], value)
            if is_dataclass(kinds[name])
            else tuple(value)
            if isinstance(value, list)
            else value
            for name, value in fields.items()
        }
    )


def compare_models(path: Path, there: ModelConfig, here: ModelConfig) -> None:
    """Raises UserError where the weights in `path`, of the model `there`, mean something else `here`.

    Multi-token prediction may be missing on one side; weights that all depths share serve any number of them.
    """
    then, now = (_flat(asdict(model), "model.") for model in (there, here))
    free = []
    if not (there.llm.mtp_pattern and here.llm.mtp_pattern):
        free.append("model.llm.mtp_*")
    elif there.llm.mtp_shared and here.llm.mtp_shared:
        free.append("model.llm.mtp_depths")
    differing = [
        f"\n  {name}: {then[name]} there, {value} here"
        for name, value in now.items()
        if value != then[name] and not any(fnmatch(name, pattern) for pattern in free)
    ]
    if differing:
        raise UserError(
            f"{path} holds weights of another model:{''.join(differing)}\n"
            "Set these fields as they are there (of published checkpoints jaxthd.hf.checkpoint.model_config "
            "reads them), or choose other weights"
        )


def _holds_a_run(workdir: Path) -> bool:
    metrics = workdir / "metrics.jsonl"
    checkpoints = (path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints)


def _is_of(file: Path, config: Config) -> bool:
    """False where the file cannot be read. Raises UserError where it holds another config."""
    try:
        stored = json.loads(file.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        print(
            f"warning: {file} cannot be read ({error}): the settings of the run beside it are not compared "
            "with these",
            file=sys.stderr,
        )
        return False
    # A field that was added since the run began had its default then.
    defaults, now = (_flat(json.loads(json.dumps(asdict(c)))) for c in (Config(), config))
    then = defaults | _flat(stored)
    differing = []
    for name, value in then.items():
        if not _is_free(name) and (name not in now or now[name] != value):
            shown = json.dumps(now[name]) if name in now else "unknown"
            differing.append(f"\n  {name}: {json.dumps(value)} in the run, {shown} now")
    if differing:
        raise UserError(
            f"{file.parent} holds a run of another config; fields that differ:{''.join(differing)}\n"
            "Restore these settings to continue it, or choose another --workdir"
        )
    return True


def _is_free(name: str) -> bool:
    return name not in HELD and any(fnmatch(name, pattern) for pattern in FREE)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names; the pattern without its marks, which say nothing about the model."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        value = value.replace("|", "") if name == "pattern" and isinstance(value, str) else value
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
