"""The workdir of a run: one run at a time, with one config.

WORKDIR/lock            locked while a process trains there
WORKDIR/config.json     the settings of the run, as they were last continued with
WORKDIR/tokenizer/      a copy of its tokenizer, if that has files
WORKDIR/changes.jsonl   settings that changed when the run was continued, and their first steps
"""

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines, write_lines
from jaxthd.files.run_folder import (
    DamagedConfigError,
    Difference,
    differences,
    holds_a_run,
    read_config,
    source_of,
    write_config,
)
from jaxthd.parallel.processes import is_first
from jaxthd.run.continuing import command_of
from jaxthd.run.effects import require_effect
from jaxthd.run.measured_by import is_any
from jaxthd.run.on_failure import RemovedOnFailure

FREE = (
    "mesh.*",
    "compute.*",
    "data.*manifest",  # a data set may have moved; the data position checks its content
    "data.augment.*_manifest",
    "data.workers",
    "data.accept_changes",
    "data.max_skipped_share",
    "rollout.mesh*",
    "rollout.answers_at_once",
    "rollout.validation_prompts",
    "rollout.reward_seconds",
    "rollout.reward_folders",
    "train.best_by",
    "train.validat*",
    "train.max_*",
    "train.normaliser",
    "train.*checkpoint*",
    "train.trackers",
    "train.profile",
)
"""Fields that may differ when a run is continued: they do not change what is learned."""
HELD = ("compute.dtype", "compute.fp8")
"""Fields that FREE matches and that may not differ all the same: they change every number."""
OPTIMIZATION = (
    "rollout.prompts",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.top_?",
    "rollout.rewards",
    "rollout.reward_options",
    "rollout.advantages",
    "rollout.dynamic_sampling",
    "train.objective_options",
    "train.*steps",
    "train.*learning_rate",
    "train.schedule",
    "train.weight_decay",
    "train.router_bias_rate",
    "train.*_loss",
    "train.ctc_max_labels",
    "train.clip_norm",
    "train.microbatches",
    "adapt.lr_factors",
)
"""Fields that may differ where that is asked for: they change what is learned from then on."""
STARTING = ("train.init_from", "train.before")
"""Fields that count when a run starts, and that a run with a checkpoint keeps as it began with them."""
CHANGES = "changes.jsonl"
EARLY_RESULTS = ("reference.jsonl", "rollouts.jsonl")
"""Files of results before the first line of metrics: a cached reference's numbers, drawn answers."""


class OpenedRun(NamedTuple):
    """A workdir that is held. changes: the fields in which its run's config differs from this one.

    keep: (last step done) -> the fields that count from the next step on for the first time. It writes
    config.json and changes.jsonl; call it once there is a step to do. Raises UserError for changes that have
    no effect on the steps to come (effects.py).
    """

    changes: Sequence[Difference]
    keep: Callable[[int], Sequence[Difference]]


@contextmanager
def opened(workdir: Path, config: Config, asked: Collection[str] = ()) -> Iterator[OpenedRun]:
    """Holds the workdir, which is made where it is missing, for this run until the end, however it ends.

    Process 0 does so; in other processes nothing happens. A workdir that was made here is removed where the
    run fails before it has results.
    asked: dotted names of fields of the OPTIMIZATION that may differ from the run's.
    Raises UserError where another run holds the workdir, where it holds a run of another config or one that
    began otherwise (STARTING), and where its config.json is one of an older jaxthd. A config.json that is
    missing or damaged beside a run is reported and left as it is: this config may not be the run's.
    """
    if not is_first():
        yield OpenedRun((), lambda step: ())
        return
    new = RemovedOnFailure(workdir, unless=lambda: _holds_results(workdir))
    workdir.mkdir(parents=True, exist_ok=True)
    # The kernel's lock ends with the process, after a kill -9 too. Child processes do not inherit the file.
    with (workdir / "lock").open("a+") as file:
        _lock(file, workdir)
        with new:  # removed before it is unlocked: no other run can have begun there
            found = _changes(workdir, config, asked) if holds_a_run(workdir) else []
            kept = _as_begun(workdir, config) if found is not None and _has_checkpoint(workdir) else config

            def keep(step: int) -> Sequence[Difference]:
                """Writes config.json and changes.jsonl; returns the changes that count after `step`."""
                if found is None:  # its config.json cannot be read
                    return ()
                if found and step:
                    require_effect(workdir, found, read_config(workdir), config, step)
                write_config(workdir, kept)
                return _noted(workdir / CHANGES, found, step)

            yield OpenedRun(found or (), keep)


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


def _changes(workdir: Path, config: Config, asked: Collection[str]) -> list[Difference] | None:
    """The fields that differ from those of the run there; None where its config.json cannot be read.

    Raises UserError where one of them may not differ.
    """
    try:
        found = differences(workdir, config)
    except DamagedConfigError as error:
        print(f"warning: {error}. Until then they are not compared with these", file=sys.stderr)
        return None
    if _has_checkpoint(workdir):
        _require_as_begun(workdir, [x for x in found if x.name in STARTING], asked)
        found = [x for x in found if x.name not in STARTING]
    unasked = [x for x in found if is_any(x.name, OPTIMIZATION) and x.name not in asked]
    held = [x for x in found if not _is_free(x.name) and not is_any(x.name, OPTIMIZATION)]
    if held or unasked:
        both = [*held, *unasked]
        lines = "".join(f"\n  {x.name}: {x.there} in the run, {x.here} now" for x in both)
        how = []
        command = command_of(config)
        if unasked:
            flags = " ".join(f"--{x.name.replace('_', '-')} {_word(x.here)}" for x in unasked)
            how.append(f"to go on with another optimization, say so: jaxthd {command} {workdir} {flags}")
        how.append(f"to continue the run with the settings that it has: jaxthd {command} {workdir}")
        if held:
            how += [
                f"to start a new run from its weights: --workdir NEW --train.init-from {workdir}",
            ]
        raise UserError(
            f"{workdir} holds a run of another config; fields that differ:{lines}\n" + "\n".join(how)
        )
    return found


def _holds_results(workdir: Path) -> bool:
    return holds_a_run(workdir) or any((workdir / name).exists() for name in EARLY_RESULTS)


def _has_checkpoint(workdir: Path) -> bool:
    return any(path.name.isdecimal() for path in (workdir / "checkpoints").glob("*"))


def _as_begun(workdir: Path, config: Config) -> Config:
    """The config with train.init_from as the run began with it, where it is left out now."""
    begun = read_config(workdir).train
    init_from = config.train.init_from or begun.init_from
    return replace(config, train=replace(config.train, init_from=init_from))


def _require_as_begun(workdir: Path, found: Sequence[Difference], asked: Collection[str]) -> None:
    """Raises UserError for other weights to start from, or commands before the start, which would do nothing.

    Weights that are left out now, or that have been moved, are those that the run began with; so is what is
    to be done before a new run by a config file that has changed.
    """
    refused = [
        x
        for x in found
        if x.name in asked or (x.name == "train.init_from" and json.loads(x.here) and not _has_moved(x))
    ]
    if refused:
        lines = "".join(f"\n  {x.name}: {x.there} in the run, {x.here} now" for x in refused)
        new = next((x for x in refused if x.name == "train.init_from"), None)
        sources = _word(new.here) if new else str(workdir)
        names = " and ".join(x.name for x in refused)
        raise UserError(
            f"{workdir} holds checkpoints, and goes on from the newest; what counts only when a run starts "
            f"would do nothing:{lines}\nto continue the run: leave {names} out, or as it was\nto start a new "
            f"run: --workdir NEW --train.init-from {sources}"
        )


def _has_moved(change: Difference) -> bool:
    """Whether sources have the names that they had, in other places, and are not in the old ones any more."""
    then, now = ([source_of(x) for x in json.loads(side)] for side in (change.there, change.here))
    names = [[(path.name, which) for path, which in side] for side in (then, now)]
    return names[0] == names[1] and not any(path.exists() for path, _ in then)


def _noted(file: Path, found: Sequence[Difference], step: int) -> list[Difference]:
    """Writes the changes into changes.jsonl; returns those that count from the step after `step` on.

    Of a change whose steps are lost, since the run continues from an earlier one, the first step is now this.
    """
    stored: list[dict[str, Any]] = read_lines(file)
    earlier = [x for x in stored if x["first_step"] <= step]
    new: dict[str, Difference] = {}
    for change in [*(Difference(x["field"], x["from"], x["to"]) for x in stored if x not in earlier), *found]:
        before = new.get(change.name, change)
        new[change.name] = change._replace(there=before.there)
    changed = [x for x in new.values() if x.there != x.here]
    lines = [{"first_step": step + 1, "field": x.name, "from": x.there, "to": x.here} for x in changed]
    if stored or lines:
        write_lines(file, [*earlier, *lines])
    return changed


def _word(value: str) -> str:
    """A value in JSON as a word of the command line."""
    parsed = json.loads(value)
    return " ".join(map(str, parsed)) if isinstance(parsed, list) else str(parsed)


def _is_free(name: str) -> bool:
    return name not in HELD and is_any(name, (*FREE, *STARTING))
