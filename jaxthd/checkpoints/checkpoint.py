"""Checkpoints: the training state and the data position, saved and restored together with orbax.

FOLDER/STEP holds two items: "state", the arrays; "about", JSON: the data position, the validation's metrics,
and each array's dtype, shape and checksum (jaxthd.checkpoints.checksum), all under one digest. Orbax restores most
single flipped bits without a word, so nothing is used before it is compared with these.
"""

import gc
import hashlib
import inspect
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import checkpoint_managers as managers

from jaxthd.checkpoints.checksum import checksums, named_arrays
from jaxthd.errors import UserError
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.steps.state import TrainState

BEST_BY = ("validation_wer", "validation_loss")
"""The metrics that say which checkpoint is best, the lowest first; a later one decides between equals, and
where no checkpoint has the earlier one. Of several validation sets they are the means."""

_REMOVED = "removed"
"""Subfolder into which orbax moves what is no longer kept: a deletion cut short leaves no half checkpoint."""


class Checkpoints:
    """The checkpoints of a run, in `folder`, by step; the newest `keep` of them stay, and the best.

    Several processes share the folder, and all make the same calls. Saving is asynchronous. A context
    manager: leaving it waits until everything is on disk. What cannot be saved (a full disk) raises
    UserError, at the next save or on leaving; the older checkpoints are intact.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder.absolute(), keep
        self._folder.mkdir(parents=True, exist_ok=True)
        # Every process reads by itself: where one failed alone, orbax's manager would have the others wait.
        self._arrays, self._json = _handlers()
        self._saving: int | None = None
        self._whole: int | None = None
        self._failed = False
        self._about: dict[int, dict[str, Any]] = {}
        self._damaged: dict[int, str] = {}
        self._quiet = ExitStack()
        self._quiet.enter_context(_quiet_orbax())
        if is_first():
            for torn in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(torn)
        self._delete_removed()
        self._open()
        for step in self._manager.all_steps():
            try:
                self._about[step] = self._read_about(step)
            except Exception as error:
                self._damaged[step] = _reason(error)
        for step, reason in chain(*exchange(list(self._damaged.items()))):
            self._damaged[step] = reason
            self._about.pop(step, None)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and jax.process_count() > 1:
            return  # finishing waits for all, and one of them may be what went wrong
        known = self._failed
        try:
            with self._readable_errors(), closing(self._manager):
                self._manager.wait_until_finished()
            if not known:  # else threads of the save that failed may still be about to complain
                self._quiet.close()
        except UserError as failure:
            # Neither the run's own error nor what a save has raised already is hidden by this one.
            if error is None and not known:
                raise
            if not known:
                print(f"warning: {failure}", file=sys.stderr)
        finally:
            self._delete_removed()

    @property
    def best_step(self) -> int | None:
        """The step with the best validation, as BEST_BY says; None where none was validated.

        A checkpoint counts with the metrics of its own step; one that is not finite does not count.
        """
        return self._best(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: TrainState,
        position: dict[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts saving; the state may be donated as soon as this returns.

        position: JSON-serialisable state of the data loader at this step. metrics: of this step's validation;
        those of BEST_BY are kept. Raises UserError where this save, or the one before, fails.
        """
        self._wait()
        self._delete_removed()
        finite = {k: v for k, v in (metrics or {}).items() if k in BEST_BY and math.isfinite(v)}
        sums = checksums(state)
        arrays = {name: [*kind, sums[name]] for name, kind in _kinds(state).items()}
        about = {"position": position, "metrics": finite, "arrays": arrays}
        self._about[step] = about
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state._asdict()),
            about=ocp.args.JsonSave({"content": about, "blake2b": _digest(about)}),
        )
        self._saving = step
        with self._readable_errors():
            if not self._manager.save(step, args=args):
                raise RuntimeError(f"it holds step {self._manager.latest_step()} already")

    def restore_latest(
        self, abstract: TrainState, sharding: Sharding | TrainState
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest intact checkpoint's state, laid out as `sharding` says, and its data position; or None.

        abstract: shapes and dtypes to expect. sharding: of all arrays, or a TrainState of each one's.
        Damaged checkpoints are reported, and renamed once an older one is restored. Raises UserError where a
        checkpoint's arrays have other names, shapes or dtypes, before any is read; and where there are
        checkpoints, none of them intact: then none is renamed, since that may have another cause.
        """
        newest = self._newest_intact(abstract, sharding)
        if self._damaged:
            gc.collect()  # while orbax is quiet: what failed complains when it is collected
        if newest is not None:
            self._whole, state = newest
            self._set_damaged_aside(self._whole)
            return state, self._about[self._whole]["position"]
        if self._damaged:
            found = "".join(f"\n  step {step}: {reason}" for step, reason in sorted(self._damaged.items()))
            raise UserError(
                f"no checkpoint in {self._folder} can be restored:{found}\nExpected one that is intact. Put "
                "a copy of one in place; or move the folder away and run the same command: it starts anew"
            )
        return None

    def _newest_intact(
        self, abstract: TrainState, sharding: Sharding | TrainState
    ) -> tuple[int, TrainState] | None:
        """(its step, its state); notes those found to be damaged."""
        for step in sorted(self._about, reverse=True):
            try:
                return step, self._restore(step, abstract, sharding)
            except UserError:
                raise
            except Exception as error:
                self._damaged[step] = _reason(error)
        return None

    def _open(self) -> None:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(self._keep), _Best(self)]),
            todelete_subdir=_REMOVED,
            # Where a folder cannot be made, threads that wait for it would hold up the exit for 5 minutes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            lightweight_initialize=True,  # else it reads files of every step, and raises where one is damaged
        )
        handlers = dict(zip(("state", "about"), _handlers(), strict=True))
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def _read_about(self, step: int) -> dict[str, Any]:
        about = self._json.restore(epath.Path(self._folder / str(step) / "about"))
        if about["blake2b"] != _digest(about["content"]):
            raise ValueError("the data position and the checksums do not match their digest")
        return about["content"]

    def _restore(self, step: int, abstract: TrainState, sharding: Sharding | TrainState) -> TrainState:
        arrays = self._about[step]["arrays"]
        saved, wanted = {name: kind for name, (*kind, _) in arrays.items()}, _kinds(abstract)
        differing = [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]
        if differing and not any(name.startswith("opt_state") for name in saved):
            raise UserError(
                f"{self._folder} holds weights alone, not a run that can be continued: give its folder as "
                "train.init_from, and choose another --workdir"
            )
        if differing:
            name = differing[0]
            raise UserError(
                f"the checkpoint of step {step} in {self._folder} is of another model: {len(differing)} "
                f"arrays differ, {name} is {saved.get(name)} there and {wanted.get(name)} here. Restore the "
                "settings it was made with, or choose another --workdir"
            )
        if isinstance(sharding, Sharding):
            sharding = jax.tree.map(lambda _: sharding, abstract)
        target = jax.tree.map(
            lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), abstract, sharding
        )._asdict()
        how = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=how)
        failed: Exception | None = None
        try:
            state = TrainState(
                **self._arrays.restore(epath.Path(self._folder / str(step) / "state"), args=args)
            )
        except Exception as error:
            failed = error
        elsewhere = [reason for reason in exchange(failed and _reason(failed)) if reason]
        if elsewhere:
            raise failed or ValueError(elsewhere[0])
        damaged = [name for name, found in checksums(state).items() if found != arrays[name][-1]]
        if damaged:
            raise ValueError(f"{len(damaged)} of {len(arrays)} arrays changed: {', '.join(damaged[:3])}, ...")
        return state

    def _set_damaged_aside(self, restored: int) -> None:
        """Renames every damaged checkpoint, so that nothing is lost and its step can be saved again."""
        for step, reason in sorted(self._damaged.items()):
            self._about.pop(step, None)
            if not is_first():
                continue
            aside = self._folder / f"{step}.damaged"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            os.rename(self._folder / str(step), aside)
            print(
                f"warning: the checkpoint of step {step} is damaged ({reason}). It was renamed to {aside}; "
                f"the one of step {restored} is used",
                file=sys.stderr,
            )
        if self._damaged:
            self._damaged = {}
            exchange("renamed")
            # Orbax lists the folder's steps when it is opened.
            self._manager.close()
            self._open()

    def _best(self, steps: Sequence[int]) -> int | None:
        """Of these steps; the newest of equals."""
        return _best_of({step: self._about[step] for step in steps if step in self._about})

    def _wait(self) -> None:
        with self._readable_errors():
            self._manager.wait_until_finished()
        self._whole = self._whole if self._saving is None else self._saving

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            intact = "no other was saved" if self._whole is None else f"that of step {self._whole} is intact"
            raise UserError(
                f"the checkpoint of step {self._saving} could not be saved in {self._folder} "
                f"({_reason(error)}); {intact}. Make room on the disk, or mend what else is in the way, and "
                "run the same command again: it continues"
            ) from error

    def _delete_removed(self) -> None:
        if is_first():
            shutil.rmtree(self._folder / _REMOVED, ignore_errors=True)


def _best_of(about: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The step with the best metrics, the newest of equals; None where none has any."""

    def rank(step: int) -> tuple[float, ...]:
        return *(about[step]["metrics"].get(name, math.inf) for name in BEST_BY), float(-step)

    return min((step for step in about if about[step]["metrics"]), key=rank, default=None)


def find_checkpoint(folder: Path, which: str = "newest") -> tuple[int, dict[str, list[Any]]]:
    """A checkpoint's step, and of each of its arrays dtype, shape and checksum, by name.

    which: "newest", "best" (see BEST_BY), or a step. Raises UserError where there is none that is whole.
    """
    _, reader = _handlers()
    found = {}
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    for number in steps:
        with suppress(Exception):
            about = reader.restore(epath.Path((folder / str(number) / "about").absolute()))
            if about["blake2b"] == _digest(about["content"]):
                found[number] = about["content"]
    named: dict[str, int | None] = {"newest": max(found, default=None), "best": _best_of(found)}
    step = named[which] if which in named else int(which)
    if step is None or step not in found:
        raise UserError(
            f"{folder} has no whole checkpoint that is {which!r}; it has those of steps {sorted(found)}, "
            f"{len(steps) - len(found)} are damaged: choose another"
        )
    return step, found[step]["arrays"]


def restore_arrays(folder: Path, step: int, wanted: Any, about: Mapping[str, list[Any]]) -> Any:
    """Arrays of one checkpoint, without the others. wanted: a part of TrainState's dict, with shapes, dtypes
    and shardings for arrays. about: what find_checkpoint says of them. Raises UserError where one is damaged.
    """
    arrays, _ = _handlers()
    how = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
    try:
        with _quiet_orbax():
            found = arrays.restore(epath.Path((folder / str(step) / "state").absolute()), args=args)
    except Exception as error:
        raise UserError(
            f"the checkpoint of step {step} in {folder} cannot be read ({_reason(error)}); expected a "
            "whole one: copy it anew"
        ) from error
    damaged = [name for name, sum_ in checksums(found).items() if about[name][-1] != sum_]
    if damaged:
        raise UserError(
            f"the checkpoint of step {step} in {folder} is damaged: {', '.join(damaged[:3])}; expected a "
            "whole one: copy it anew"
        )
    return found


def _handlers() -> tuple[ocp.PyTreeCheckpointHandler, ocp.JsonCheckpointHandler]:
    """Of a checkpoint's two items."""
    # A small array that lies on several devices is written by one of them. By default each writes a part,
    # and a program that cuts it out is compiled for every shape: seconds, at the first save.
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**26)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry), ocp.JsonCheckpointHandler()


class _Best:
    """Orbax's own policy reads metrics from files that no digest protects."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self._checkpoints._best(steps)
        return [step == best for step in steps]


def _kinds(state: TrainState) -> dict[str, list[Any]]:
    """Each array's [dtype, shape], by name."""
    return {name: [str(x.dtype), list(x.shape)] for name, x in named_arrays(state).items()}


def _digest(about: dict[str, Any]) -> str:
    # Through JSON first, which makes strings of the keys that are numbers: as it is when read back.
    canonical = json.dumps(json.loads(json.dumps(about)), sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _reason(error: Exception) -> str:
    """An error in one line: the first of its own, which may be many and long."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:500]}"


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """What fails in orbax raises. Here it does not also write a traceback for every thread and array.

    It logs them; the writes under way find the event loop of the failed one closed; futures and coroutines
    that nobody awaits any more complain when they are collected. Nothing else here uses asyncio.
    """
    loggers, report = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or not {"orbax", "asyncio"} & set(Path(record.pathname).parts)

    def report_others(found: Any) -> None:
        if not inspect.iscoroutine(found.object) and str(found.exc_value) != "Event loop is closed":
            report(found)

    for logger in loggers:
        logger.addFilter(wanted)
    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
        for logger in loggers:
            logger.removeFilter(wanted)
