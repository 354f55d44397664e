"""One checkpoint on the disk: its record, and its arrays.

FOLDER/STEP holds two items: "state", the arrays; "about", JSON: the data position, the validation's metrics,
and each array's dtype, shape and checksum (checksum.py), all under one digest. Orbax restores most single
flipped bits without an error, so nothing is used before it is compared with these.
"""

import hashlib
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxthd.checkpoints.checksum import checksums, named_arrays
from jaxthd.config.removed import renewed_paths
from jaxthd.errors import UserError
from jaxthd.files.run_folder import EMA
from jaxthd.parallel.processes import exchange, is_first

BEST_BY = {
    "wer": ("validation_wer", "validation_loss"),
    "reward": ("validation_reward", "validation_wer", "validation_loss"),
    "preferences": ("validation_preference_loss", "validation_wer", "validation_loss"),
}
"""train.best_by -> the metrics that decide which checkpoint is best: the lowest, of rewards the highest. The
next one decides between equals, and where no checkpoint has those before it. With several validation sets
they are means over the sets. They are compared where About.measured_by is the same."""
_ORDER = ("validation_reward", "validation_preference_loss", "validation_wer", "validation_loss")
_CHOSEN = _ORDER[:2]
"""They decide only where the newest validated checkpoint has them, because train.best_by asks for them."""

_KEPT = 240
"""Characters of each end of a long error message that are kept."""


class SavedArray(NamedTuple):
    """The entry of an array in a checkpoint's record."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


class About(NamedTuple):
    """A checkpoint's record: the item "about".

    position: the data loader's state. metrics: those that train.best_by names (BEST_BY), measured at this
    step, that are finite.
    arrays: by name, such as "params.embedding".
    measured_by: what the metrics depend on besides the weights, by name, as JSON; None where nobody knows,
    as in checkpoints of an older jaxthd.
    """

    position: dict[str, Any]
    metrics: dict[str, float]
    arrays: dict[str, SavedArray]
    measured_by: dict[str, Any] | None = None

    @property
    def content(self) -> dict[str, Any]:
        """All fields, as they are written and as the digest covers them. An unknown measured_by is left out:
        older records have none."""
        fields = self._asdict()
        return {name: x for name, x in fields.items() if name != "measured_by" or x is not None}

    @property
    def digest(self) -> str:
        """A digest of `content`."""
        # Through JSON first, which makes strings of the keys that are numbers: as it is when read back.
        canonical = json.dumps(json.loads(json.dumps(self.content)), sort_keys=True)
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The record as it is written."""
        return {"content": self.content, "blake2b": self.digest}


def describe(
    state: Any,
    position: dict[str, Any],
    metrics: Mapping[str, float],
    best_by: str = "wer",
    measured_by: Mapping[str, Any] | None = None,
) -> About:
    """The record of a state that is about to be saved. Of several processes all call it."""
    sums = checksums(state)
    arrays = {
        name: SavedArray(str(x.dtype), tuple(x.shape), sums[name]) for name, x in named_arrays(state).items()
    }
    finite = {k: v for k, v in metrics.items() if k in BEST_BY[best_by] and math.isfinite(v)}
    decides = BEST_BY[best_by][0]
    if decides in _CHOSEN and decides not in finite and (best_by == "reward" or decides in metrics):
        finite = {}  # it could not be measured: others must not decide in its place
    return About(position, finite, arrays, dict(measured_by) if finite and measured_by else None)


def read_about(folder: Path, step: int) -> About:
    """A checkpoint's record. Raises ValueError where it does not match its digest, and what orbax raises."""
    stored = ocp.JsonCheckpointHandler().restore(epath.Path((folder / str(step) / "about").absolute()))
    content = stored["content"]
    arrays = {
        name: SavedArray(dtype, tuple(shape), checksum)
        for name, (dtype, shape, checksum) in content["arrays"].items()
    }
    about = About(content["position"], content["metrics"], arrays, content.get("measured_by"))
    if stored["blake2b"] != about.digest:
        raise ValueError("the data position and the checksums do not match their digest")
    return about


def best_of(found: Mapping[int, About]) -> int | None:
    """The step with the best metrics (BEST_BY), the newest of equals; None where none has any.

    Only steps whose metrics were measured in the same way as the newest ones are compared: a loss over one
    validation set says nothing about a loss over another.
    """
    validated = comparable(found)
    newest = found[max(validated)].metrics if validated else {}
    names = [name for name in _ORDER if name in newest or name not in _CHOSEN]

    def rank(step: int) -> tuple[float, ...]:
        signs = (-1 if name == "validation_reward" else 1 for name in names)
        metrics = found[step].metrics
        own = (s * metrics.get(name, s * math.inf) for s, name in zip(signs, names, strict=True))
        return *own, float(-step)

    return min(validated, key=rank, default=None)


def comparable(found: Mapping[int, About]) -> list[int]:
    """The validated steps whose metrics were measured in the same way as those of the newest of them."""
    validated = [step for step in found if found[step].metrics]
    if not validated:
        return []
    newest = found[max(validated)].measured_by
    return [step for step in validated if not measured_otherwise(found[step].measured_by, newest)]


def measured_otherwise(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Says how two records' measured_by differ; "" where their metrics can be compared.

    Validation sets are compared by content, whatever their names; settings that were removed since, by what
    replaced them.
    """
    if then is None or now is None:
        return "" if then is now else "an older jaxthd did not note how it validated"
    then, now = (json.loads(json.dumps(renewed_paths(x))) for x in (then, now))
    differing = [
        name for name in {**then, **now} if _by_content(then.get(name)) != _by_content(now.get(name))
    ]
    return ", ".join(f"{name} {_shown(then.get(name))} -> {_shown(now.get(name))}" for name in differing)


def _by_content(value: Any) -> Any:
    """A value of measured_by; of named contents their digests alone."""
    return sorted(map(str, value.values())) if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    named = (f"{name} ({digest})" for name, digest in value.items()) if isinstance(value, dict) else ()
    return ", ".join(named) or json.dumps(value)


def find_checkpoint(folder: Path, which: str = "newest") -> tuple[int, dict[str, SavedArray]]:
    """(a checkpoint's step, its arrays by name).

    which: "newest", "best" (see BEST_BY), or a step; as source_of gives it. Raises UserError where no whole
    checkpoint is that one, and where averages are asked for that it does not have.
    """
    which, average, _ = which.partition(EMA)
    found = {}
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    for number in steps:
        with suppress(Exception):
            found[number] = read_about(folder, number)
    named: dict[str, int | None] = {"newest": max(found, default=None), "best": best_of(found)}
    step = named[which] if which in named else int(which)
    if step is None or step not in found:
        raise UserError(
            f"{folder} has no whole checkpoint {which!r}; it has those of steps {sorted(found)}, and "
            f"{len(steps) - len(found)} damaged ones: choose another (WORKDIR, WORKDIR@best or WORKDIR@STEP)"
        )
    if which == "best":
        _say_left_out(folder, found)
    arrays = found[step].arrays
    if average and not any(name.startswith("ema.") for name in arrays):
        raise UserError(
            f"{folder} has no averaged parameters; expected a run with train.ema_decay: leave {EMA} out"
        )
    return step, arrays


def _say_left_out(folder: Path, found: Mapping[int, About]) -> None:
    """Says which validated checkpoints @best does not compare, and why."""
    compared = comparable(found)
    others = sorted(step for step in found if found[step].metrics and step not in compared)
    if others and is_first():
        reason = measured_otherwise(found[others[-1]].measured_by, found[max(compared)].measured_by)
        print(
            f"{folder.parent}@best is the best of steps {', '.join(map(str, sorted(compared)))}; those of "
            f"steps {', '.join(map(str, others))} are not compared, because their validation was another: "
            f"{reason}"
        )


def restore_arrays(folder: Path, step: int, wanted: Any, saved: Mapping[str, SavedArray]) -> Any:
    """Some or all arrays of a checkpoint. Of several processes all call it, and where one fails all do.

    wanted: a part of TrainState's dict, with shapes, dtypes and shardings in the places of arrays. saved: the
    checkpoint's arrays, by name. Raises ValueError where an array is not the one that was saved, and what
    orbax raises.
    """
    arrays, _ = handlers()
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    failed: Exception | None = None
    try:
        with quiet_orbax():
            found = arrays.restore(epath.Path((folder / str(step) / "state").absolute()), args=args)
    except Exception as error:
        failed = error
    elsewhere = [why for why in exchange(failed and reason(failed)) if why]
    if elsewhere:
        raise failed or ValueError(elsewhere[0])
    sums = checksums(found)
    damaged = [name for name, array in saved.items() if sums.get(name, array.checksum) != array.checksum]
    if damaged:
        raise ValueError(f"{len(damaged)} of {len(saved)} arrays changed: {', '.join(damaged[:3])}, ...")
    return found


def handlers() -> tuple[ocp.PyTreeCheckpointHandler, ocp.JsonCheckpointHandler]:
    """Orbax's handlers of the two items, "state" and "about"."""
    # A small array that lies on several devices is written by one of them. By default each of them writes a
    # slice, and the program that takes it is compiled for every shape: seconds, at the first save.
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**26)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry), ocp.JsonCheckpointHandler()


def kind(x: Any) -> str:
    """An array's dtype and shape, such as "float32[40, 33]"."""
    return f"{x.dtype}{list(x.shape)}"


def reason(error: Exception) -> str:
    """An error in one line: its type and the first line of its message.

    A long line loses its middle. Its end stays: tensorstore names the file first, twice, and the cause last,
    but for the array's specification, which is left out.
    """
    line = re.sub(r" \[tensorstore_spec='.*?'\]", "", str(error).strip().partition("\n")[0])
    if len(line) > 2 * _KEPT:
        line = f"{line[:_KEPT]} ... {line[-_KEPT:]}"
    return f"{type(error).__name__}: {line}"


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences what orbax and asyncio log about errors that orbax also raises.

    tensorstore's threads call the event loop of a failed save after it was closed, and coroutines that nobody
    awaits any more complain when they are collected. Neither can be caught: Python hands such errors to
    sys.unraisablehook alone, so that is replaced here; all others are passed on. Nothing else in jaxthd uses
    asyncio.
    """
    loggers, report = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or not {"orbax", "asyncio"} & set(Path(record.pathname).parts)

    def report_others(found: Any) -> None:
        if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
            report(found)

    for logger in loggers:
        logger.addFilter(is_wanted)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
        for logger in loggers:
            logger.removeFilter(is_wanted)
