"""The training loop: restore, then step by step train, measure, validate, save, until the end or a signal.

jaxthd train and jaxthd grpo differ in the supplier of their steps alone (jaxthd/run/supplier.py).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import jax

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.weights import start_state
from jaxthd.config import Config
from jaxthd.config.model import TEXT_ONLY
from jaxthd.data.dataset import SpeechData
from jaxthd.figures.curves import draw_curves
from jaxthd.files.jsonl import read_lines
from jaxthd.files.run_folder import Difference
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.validation import Validation
from jaxthd.inference.wer import make_normaliser
from jaxthd.kernels.programs import ProgramCount
from jaxthd.models.adapt import split
from jaxthd.parallel.mesh import make_mesh
from jaxthd.parallel.processes import is_first, require_same
from jaxthd.planning.held_out import with_held_out
from jaxthd.planning.layout_choice import keep_layout, with_layout
from jaxthd.planning.sizes import with_sizes
from jaxthd.run.display import Display
from jaxthd.run.goodput import TimeAccount, stored_seconds
from jaxthd.run.measured_by import measured_by
from jaxthd.run.metrics import time_line
from jaxthd.run.metrics_file import lost_text, open_metrics, read_metrics
from jaxthd.run.mirror import mirrored
from jaxthd.run.nonfinite import NonFiniteSteps
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.profile import profiled
from jaxthd.run.report import end_report
from jaxthd.run.signals import StopRequests
from jaxthd.run.startup import prepared
from jaxthd.run.supplier import Run, Say, Stepped, Supplier
from jaxthd.run.watchdog import Watchdog
from jaxthd.run.workdir import OpenedRun, opened
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_refresh
from jaxthd.steps.state import (
    TrainState,
    abstract_state,
    canonical_shardings,
    checkpoint_layout,
    device_layout,
)
from jaxthd.terminal.leaving import command_began

StepFunction = Callable[[TrainState, int], tuple[TrainState, Stepped]]


def run_training(
    config: Config,
    workdir: Path,
    supplied: Callable[[Run], Supplier],
    changes: Collection[str] = (),
) -> bool:
    """Runs, or continues, the training in `workdir`, which may be in a store, up to config.train.steps, or
    until a signal asks it to stop (jaxthd.run.signals). Returns whether the last step is done.

    supplied: makes the supplier of the steps. changes: dotted names of settings of the optimization, such as
    "train.steps", that may differ from those of the run that is continued (jaxthd.run.workdir.OPTIMIZATION).
    Of several processes (jaxthd.run.startup.devices_ready) all call it, with the same arguments.
    Raises UserError for a config that cannot work on this machine, for data that cannot be used, for a
    workdir that is in use or holds a run of another config, after too many updates in a row that are not
    finite, and where a checkpoint cannot be saved.
    """
    # Signals that come while the report is written, or the last is sent to a store, do not cut that off.
    with StopRequests(config.train.max_seconds, command_began()) as stopping, mirrored(workdir) as folder:
        return _run(config, folder, supplied, changes, stopping)


def _run(
    config: Config,
    workdir: Path,
    supplied: Callable[[Run], Supplier],
    changes: Collection[str],
    stopping: StopRequests,
) -> bool:
    """run_training in a folder."""
    # The workdir keeps the config as it was given: another machine may admit other kernels.
    given = with_sizes(with_held_out(config, workdir), workdir)
    config = prepared(with_layout(given, workdir))
    with ExitStack() as stack:
        stack.enter_context(goes_on_unread())
        held = stack.enter_context(opened(workdir, given, changes))
        account = stack.enter_context(TimeAccount(workdir, stopping.began))
        stack.enter_context(Watchdog(lambda: account.cause, account.stalled))
        require_same("the configuration", asdict(config))
        keep_layout(given, config, workdir)
        outputs = OutputFolder(workdir)
        data = stack.enter_context(closing(SpeechData(config, workdir)))
        folder, keep, best_by = workdir / "checkpoints", config.train.keep_checkpoints, config.train.best_by
        checkpoints = stack.enter_context(Checkpoints(folder, keep, best_by, measured_by(config, data)))
        run = Run(config, Blueprint(config), make_mesh(config.mesh), data, outputs, account)
        ended = _train(run, supplied, held, checkpoints, stopping)
        account.switch("saving")  # the last checkpoint is written while all is closed
    if ended.display is not None and is_first():
        _report(run, ended.display, ended.parts)
    return ended.is_done


class _Ended(NamedTuple):
    """The end of a command's training. is_done: whether the last step is done. display: how the metrics
    are shown; None where there was nothing to do. parts: the supplier's, of the report."""

    is_done: bool
    display: Display | None = None
    parts: Sequence[str] = ()


def _train(
    run: Run,
    supplied: Callable[[Run], Supplier],
    held: OpenedRun,
    checkpoints: Checkpoints,
    stopping: StopRequests,
) -> _Ended:
    """Trains, validates and saves, from the newest checkpoint on."""
    config, blueprint, mesh, data, outputs, account = run
    refresh, refresh_every = make_refresh(blueprint, mesh), config.posttraining.reference_every
    print(f"{parameters_text(blueprint)}; mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")
    with ExitStack() as stack:
        # --- the newest checkpoint, or a new run ---
        supplier = stack.enter_context(closing(supplied(run)))
        validation = Validation(blueprint, mesh, data, outputs, supplier.with_reference)
        validate = account.timed("validating", lambda s, step: validation(s) | supplier.held_out(s, step))
        save = account.timed("saving", checkpoints.save)
        state = _newest_state(run, checkpoints, supplier)
        first, steps = int(state.step) // config.updates_of_a_step, config.train.steps
        if first:
            print(f"continuing from step {first} in {outputs.path}")
        if first >= steps:
            print(f"{outputs.path} already holds step {first} of {steps}: nothing to do")
            return _Ended(is_done=True)
        if lost := lost_text(outputs.path, first):
            print(lost)
        changed = _changed_settings(held.keep(first), first)
        display = supplier.display(config)
        metrics = stack.enter_context(open_metrics(outputs.path, first, config, account, display))
        non_finite = NonFiniteSteps(outputs, first, config.updates_of_a_step, metrics.say)
        stopping.listen()
        # Before anything is compiled: data without a usable item ends here.
        supplier.begin(state, first, metrics.say)
        # --- steps ---
        if first == 0 and validation.is_due(0):
            metrics.step({"step": 0, **validate(state, 0), **time_line(account.seconds)})
        account.switch("stepping")
        wanted, path = range(first + 1, steps + 1), outputs.path
        numbers = profiled(wanted, config.train, path, metrics.say, account.during)
        next_step = _announced(supplier.step, first + 1, metrics.say, account)
        for step in stack.enter_context(numbers):
            state, stepped = next_step(state, step)
            if refresh_every and step % refresh_every == 0:
                state = refresh(state)
            stopped = stopping()
            last = bool(stopped) or step == steps
            data.watch(metrics.say)
            validated = validate(state, step) if validation.is_due(step) else {}
            line = stepped.line | time_line(account.seconds)
            metrics.step(line | validated | (changed if step == first + 1 else {}))
            if stepped.skipped_in_a_row:
                non_finite.add(line, stepped.documents(), stepped.skipped_in_a_row)
            if last or validated or step % config.train.checkpoint_every == 0:
                save(step, checkpoint_layout(state, blueprint, mesh), supplier.get_state(), validated)
            if last:
                break
        if step < steps:
            metrics.say(f"stopped {stopped} after step {step}, which is saved: the same command continues")
        parts = supplier.end()
    return _Ended(step >= steps, display, parts)


def _announced(step: StepFunction, first: int, say: Say, account: TimeAccount) -> StepFunction:
    """The function; around the step `first` it says that programs are compiled, and then which were."""

    def announced(state: TrainState, number: int) -> tuple[TrainState, Stepped]:
        """Takes the step."""
        if number != first:
            return step(state, number)
        say(f"step {number}: compiling its programs, or reading them from the cache")
        before = account.seconds["compiling"]
        state, stepped = step(state, number)
        seconds, line = account.seconds["compiling"] - before, stepped.line
        count = ProgramCount(line.get("compilations", 0), line.get("cached_compilations", 0))
        say(f"step {number}: {count.text()} ({seconds:.1f} s)")
        return state, stepped

    return announced


def _newest_state(run: Run, checkpoints: Checkpoints, supplier: Supplier) -> TrainState:
    """The newest checkpoint's state, with the supplier set to where its data goes on; else a new run's."""
    blueprint, mesh = run.blueprint, run.mesh
    shardings = canonical_shardings(blueprint, mesh)
    with run.account.during("restoring"):
        restored = checkpoints.restore_latest(abstract_state(blueprint), shardings)
    if restored is None:
        return start_state(blueprint, mesh)
    state, position = restored
    supplier.set_state(position)
    if is_first() and checkpoints.new_measure:
        print(checkpoints.new_measure)
    return device_layout(state, blueprint, mesh)


def _changed_settings(changes: Collection[Difference], step: int) -> dict[str, str]:
    """Says what has changed since the steps before; returns it as a field of the next step's metrics line."""
    if not changes:
        return {}
    text = ", ".join(f"{x.name} {x.there} -> {x.here}" for x in changes)
    print(f"from step {step + 1} on: {text}")
    return {"changed": text}


def _report(run: Run, display: Display, parts: Sequence[str]) -> None:
    """Draws curves.png, and writes and prints report.txt."""
    workdir, lines = run.outputs.path, read_metrics(run.outputs.path)
    draw_curves(lines, workdir / "curves.png", display, stored_seconds(workdir))
    text = end_report(
        workdir,
        run.config,
        lines,
        read_lines(workdir / "hypotheses.jsonl"),
        display=display,
        supplied=parts,
        parameters=parameters_text(run.blueprint),
        skipped=run.data.skipped_text(),
        normalise=make_normaliser(run.config.train.normaliser),
    )
    run.outputs.write_text("report.txt", text + "\n")
    print(text)


def parameters_text(blueprint: Blueprint) -> str:
    """The number of parameters that train, and of the frozen ones, for people."""
    own, frozen = split(abstract_state(blueprint).params, blueprint.trained)
    own_size, frozen_size = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (own, frozen))
    of_text = f" of {TEXT_ONLY}" * (blueprint.config.model.encoder is None)
    return f"{own_size:,} parameters" + f" to train and {frozen_size:,} frozen" * (frozen_size > 0) + of_text
