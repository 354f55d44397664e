"""The checkpoints of a run: the training state and the data position, saved and restored together with orbax.

What a checkpoint holds and how it is checked: stored.py.
"""

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import chain, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding
from orbax.checkpoint import checkpoint_managers as managers

from jaxthd.checkpoints.checksum import named_arrays
from jaxthd.checkpoints.stored import (
    About,
    best_of,
    describe,
    handlers,
    kind,
    measured_otherwise,
    quiet_orbax,
    read_about,
    reason,
    restore_arrays,
)
from jaxthd.errors import UserError
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.steps.state import TrainState

_REMOVED = "removed"
"""Subfolder into which orbax moves what it deletes: a deletion cut short leaves no half checkpoint."""
_OPTIONAL = {
    "reference": ("copy of a reference policy", "train.objective_options and posttraining"),
    "ema": ("moving average of its parameters", "train.ema_decay"),
}
"""Fields of a state that some runs do not have: what each is, and the settings that decide about it."""


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in `folder`, by step. The newest `keep` of them stay, and the best by `best_by`, one of
    BEST_BY in stored.py. measured_by: see About.

    Several processes share the folder, and all make the same calls. Saving is asynchronous. This is a context
    manager; leaving it waits until everything is on disk. A save that fails (a full disk) raises UserError at
    the next save or on leaving; the older checkpoints stay intact.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        best_by: str = "wer",
        measured_by: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._keep, self._best_by = folder.absolute(), keep, best_by
        self._measured_by = measured_by
        self._folder.mkdir(parents=True, exist_ok=True)
        self._saving: int | None = None
        self._newest_whole: int | None = None
        self._failed = False
        self._about: dict[int, About] = {}
        self._damaged: dict[int, str] = {}
        self._quiet = ExitStack()
        self._quiet.enter_context(quiet_orbax())
        if is_first():
            for torn in self._folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(torn)
        self._delete_removed()
        self._open()
        for step in self._manager.all_steps():
            try:
                self._about[step] = read_about(self._folder, step)
            except Exception as error:
                self._damaged[step] = reason(error)
        for step, why in chain(*exchange(list(self._damaged.items()))):
            self._damaged[step] = why
            self._about.pop(step, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and jax.process_count() > 1:
            return  # finishing waits for all processes, and one of them may have failed
        known = self._failed
        try:
            with self._readable_errors(), closing(self._manager):
                self._manager.wait_until_finished()
            if not known:  # else threads of the failed save may still be about to complain
                self._quiet.close()
        except UserError as failure:
            # This error hides neither the run's own error nor one that a save has raised already.
            if error is None and not known:
                raise
            if not known:
                print(f"warning: {failure}", file=sys.stderr)
        finally:
            self._delete_removed()

    @property
    def new_measure(self) -> str:
        """Returns the message for a next validation that is measured otherwise than the newest; else ""."""
        validated = {step: about for step, about in self._about.items() if about.metrics}
        if not validated or not self._measured_by:
            return ""
        differs = measured_otherwise(validated[max(validated)].measured_by, self._measured_by)
        if not differs:
            return ""
        steps = ", ".join(map(str, sorted(validated)))
        return (
            f"validation is another than that of the checkpoints of steps {steps} ({differs}): from the next "
            "validation on they are not compared with new ones, @best is the best of the new ones, and they "
            f"are deleted as older ones are (train.keep_checkpoints {self._keep}). To keep one, copy "
            f"{self._folder.parent}, or start a new run from it (--train.init-from "
            f"{self._folder.parent}@{self._best(list(validated))})"
        )

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
        self._about[step] = about = describe(state, position, metrics or {}, self._best_by, self._measured_by)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_present(state)), about=ocp.args.JsonSave(about.to_json())
        )
        self._saving = step
        with self._readable_errors():
            if not self._manager.save(step, args=args):
                raise RuntimeError(f"it holds step {self._manager.latest_step()} already")

    def restore_latest(
        self, abstract: TrainState, sharding: Sharding | TrainState
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """(state, data position) of the newest intact checkpoint; None where there are no checkpoints.

        abstract: the shapes and dtypes to expect. sharding: of the state, one for all arrays or a TrainState.
        Damaged checkpoints are reported, and renamed once an older one is restored. Raises UserError where a
        checkpoint's arrays have other names, shapes or dtypes, before any is read. Raises it too where there
        are checkpoints and none is intact; then none is renamed, since the cause may be another one.
        """
        newest = self._newest_intact(abstract, sharding)
        if self._damaged:
            gc.collect()  # while orbax is quiet: what failed complains when it is collected
        if newest is not None:
            self._newest_whole, state = newest
            self._set_damaged_aside(self._newest_whole)
            return state, self._about[self._newest_whole].position
        if self._damaged:
            found = "".join(f"\n  step {step}: {why}" for step, why in sorted(self._damaged.items()))
            raise UserError(
                f"no checkpoint in {self._folder} can be restored:{found}\nExpected one that is intact. Put "
                "a copy of one in place; or move the folder away and run the same command: it starts anew"
            )
        return None

    def _newest_intact(
        self, abstract: TrainState, sharding: Sharding | TrainState
    ) -> tuple[int, TrainState] | None:
        """(its step, its state). Notes the ones found to be damaged."""
        for step in sorted(self._about, reverse=True):
            try:
                return step, self._restore(step, abstract, sharding)
            except UserError:
                raise
            except Exception as error:
                self._damaged[step] = reason(error)
        return None

    def _open(self) -> None:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy(
                [managers.LatestN(self._keep), _Best(self._best)]
            ),
            todelete_subdir=_REMOVED,
            # Where a folder cannot be made, threads that wait for it would hold up the exit for 5 minutes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            lightweight_initialize=True,  # else it reads files of every step, and raises where one is damaged
        )
        items = dict(zip(("state", "about"), handlers(), strict=True))
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=items)

    def _restore(self, step: int, abstract: TrainState, sharding: Sharding | TrainState) -> TrainState:
        """Raises UserError for another model's checkpoint, and other exceptions for a damaged one."""
        self._compare(step, abstract)
        if isinstance(sharding, Sharding):
            sharding = jax.tree.map(lambda _: sharding, abstract)
        target = jax.tree.map(
            lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), abstract, sharding
        )
        found = restore_arrays(self._folder, step, _present(target), self._about[step].arrays)
        return TrainState(**found)

    def _compare(self, step: int, abstract: TrainState) -> None:
        """Raises UserError where the checkpoint's arrays are not those of this state."""
        saved = {name: kind(array) for name, array in self._about[step].arrays.items()}
        wanted = {name: kind(x) for name, x in named_arrays(abstract).items()}
        differing = [name for name in {**wanted, **saved} if wanted.get(name) != saved.get(name)]
        if not differing:
            return
        if not any(name.startswith("opt_state") for name in saved):
            raise UserError(
                f"{self._folder} holds weights alone, not a run that can be continued: give its folder as "
                "--train.init-from, and choose another --workdir"
            )
        name = differing[0]
        for field, (what, settings) in _OPTIONAL.items():
            if all(each.startswith(field) for each in differing):
                found = f"{'a' if name in saved else 'no'} {what}"
                raise UserError(
                    f"the run in {self._folder.parent} keeps {found}, and with these settings it would be "
                    f"the other way round; expected {settings} as the run began with: restore it, or start a "
                    "new run (--train.init-from)"
                )
        if _is_of_another_optimizer(saved, wanted, differing):
            raise UserError(
                f"the run in {self._folder.parent} has the moments of another optimizer, or of other options "
                f"of it ({len(differing)} arrays differ, such as {name}); expected train.optimizer and "
                "train.optimizer_options as the run began with: restore them, or start a new run from its "
                f"weights: --workdir NEW --train.init-from {self._folder.parent}"
            )
        raise UserError(
            f"the checkpoint of step {step} in {self._folder} is of another model: {len(differing)} arrays "
            f"differ, {name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here. "
            "Restore the settings it was made with, or choose another --workdir"
        )

    def _set_damaged_aside(self, restored: int) -> None:
        """Renames every damaged checkpoint, so that nothing is lost and its step can be saved again."""
        for step, why in sorted(self._damaged.items()):
            self._about.pop(step, None)
            if not is_first():
                continue
            aside = self._folder / f"{step}.damaged"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            os.rename(self._folder / str(step), aside)
            print(
                f"warning: the checkpoint of step {step} is damaged ({why}). It was renamed to {aside}; "
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
        """The best of these steps; the newest of equals."""
        return best_of({step: self._about[step] for step in steps if step in self._about})

    def _wait(self) -> None:
        with self._readable_errors():
            self._manager.wait_until_finished()
        self._newest_whole = self._newest_whole if self._saving is None else self._saving

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            newest = self._newest_whole
            intact = "no other was saved" if newest is None else f"that of step {newest} is intact"
            raise UserError(
                f"the checkpoint of step {self._saving} could not be saved in {self._folder} "
                f"({reason(error)}); {intact}. Free space on the disk, or remove another cause, and run the "
                "same command again: it continues"
            ) from error

    def _delete_removed(self) -> None:
        if is_first():
            shutil.rmtree(self._folder / _REMOVED, ignore_errors=True)


def _present(state: TrainState) -> dict[str, Any]:
    """The state's fields that there are: a run without a reference policy has none of its arrays."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def _is_of_another_optimizer(
    saved: Mapping[str, str], wanted: Mapping[str, str], differing: Sequence[str]
) -> bool:
    """Whether states differ in kind or shape of their moments alone, and not in the parameters that train."""
    if not all(name.startswith("opt_state.") for name in differing):
        return False
    modules = {name.split(".")[1] for name in wanted if name.startswith("params.")}

    def kinds(names: Mapping[str, str]) -> set[tuple[str, ...]]:
        moments = (name.split(".") for name in names if name.startswith("opt_state."))
        return {tuple(takewhile(lambda part: part not in modules, parts)) for parts in moments}

    return kinds(saved) != kinds(wanted) or saved.keys() == wanted.keys()


class _Best:
    """A preservation policy: keeps the best step. Orbax's own reads metrics from files without a digest."""

    def __init__(self, best: Callable[[Sequence[int]], int | None]) -> None:
        self._best_of = best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Whether each of the checkpoints is the best."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self._best_of(steps)
        return [step == best for step in steps]
