"""Trains a model, or continues the training in a workdir.

    jaxthd train configs/cp2.py                         starts runs/cp2, or continues it
    jaxthd train runs/cp2 --train.steps 4000            continues it with its own settings but that

A workdir that holds a checkpoint is continued, on any mesh. It receives
    metrics.jsonl      a JSON object for each step; the same for the trackers: TensorBoard in tensorboard/
    curves.png         loss, word error rate and speed over the steps
    report.txt         what was trained, the figures, answers right and wrong
    hypotheses.jsonl   hypotheses and references of the last validation
    skipped.jsonl      every document that was skipped, with the reason
    not_finite.jsonl   steps whose update was skipped, with their documents
    checkpoints/       parameters, optimizer state, batch statistics, data position
    reference/         the reference policy's log-probabilities, with posttraining.reference cached
    layout.json        the context layout, where the run chose it
    config.json        the settings of the run; tokenizer/ a copy of its tokenizer
    changes.jsonl      settings that changed when the run was continued

Several processes can train together: SLURM's srun starts them, or each is given --coordinator HOST:PORT
--processes N --process I. They share the workdir; each writes its arrays of the checkpoints, and process 0
everything else.
"""

import time
from collections.abc import Collection
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData, SynchronizedLoader, whole_position
from jaxthd.data.loader import BatchReport
from jaxthd.errors import readable_errors
from jaxthd.figures.curves import draw_curves
from jaxthd.files.jsonl import read_lines
from jaxthd.inference.validation import Validation
from jaxthd.inference.wer import make_normaliser
from jaxthd.kernels.machine import peak_flops
from jaxthd.models.adapt import split
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.parallel.processes import is_first, require_same
from jaxthd.planning.layout_choice import keep_layout, with_layout
from jaxthd.planning.model_flops import model_flops
from jaxthd.planning.stage_memory import decided_here
from jaxthd.posttraining.cached_reference import WithReference, cached_reference
from jaxthd.run.before import run_before
from jaxthd.run.continuing import OPTIONS, changed_settings, newest_state, require_objective, workdir_of
from jaxthd.run.goodput import TimeAccount, stored_seconds
from jaxthd.run.ladder import RungWatch
from jaxthd.run.measured_by import measured_by
from jaxthd.run.metrics import StepFacts, metrics_line, time_line
from jaxthd.run.metrics_file import open_metrics, read_metrics
from jaxthd.run.nonfinite import NonFiniteSteps
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.padding import PaddingWatch
from jaxthd.run.profile import profiled
from jaxthd.run.report import end_report
from jaxthd.run.signals import StopRequests
from jaxthd.run.startup import devices_ready, prepared
from jaxthd.run.workdir import OpenedRun, opened
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.ladder import LadderStep
from jaxthd.steps.reference_scores import make_refresh
from jaxthd.steps.state import abstract_state, canonical_form
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.leaving import ends_in_time


def main(argv: list[str] | None = None) -> None:
    line = parse_command_line("train", argv, OPTIONS, __doc__)
    workdir = workdir_of(line)
    require_objective(line.config, draws=False)
    run_before(line, workdir)
    with devices_ready(line.config.mesh, line.options):
        train(line.config, workdir, changes=line.given)


def train(config: Config, workdir: Path, changes: Collection[str] = ()) -> None:
    """Runs, or continues, the training in `workdir` up to config.train.steps, or until a signal
    asks it to stop (jaxthd.run.signals).

    changes: dotted names of settings of the optimization, such as "train.steps", that may differ from those
    of the run that is continued (jaxthd.run.workdir.OPTIMIZATION).
    Of several processes (jaxthd.run.startup.devices_ready) all call it, with the same arguments.
    Raises UserError for a config that cannot work on this machine, for data that cannot be used, for a
    workdir that is in use or holds a run of another config, after too many updates in a row that are not
    finite, and where a checkpoint cannot be saved.
    """
    require_objective(config, draws=False)
    # The workdir keeps the config as it was given: another machine may admit other kernels.
    given, start = config, time.monotonic()
    config = decided_here(prepared(with_layout(config, workdir)))
    with ExitStack() as stack:
        held = stack.enter_context(opened(workdir, given, changes))
        account = stack.enter_context(TimeAccount(workdir, start))
        require_same("the configuration", asdict(config))
        keep_layout(given, config, workdir)
        outputs = OutputFolder(workdir)
        data = stack.enter_context(closing(SpeechData(config, workdir)))
        stopping = stack.enter_context(StopRequests(config.train.max_seconds, account.began))
        folder, keep, best_by = workdir / "checkpoints", config.train.keep_checkpoints, config.train.best_by
        checkpoints = stack.enter_context(Checkpoints(folder, keep, best_by, measured_by(config, data)))
        steps_done = _train(config, held, outputs, data, checkpoints, account, stopping)
        account.switch("saving")  # the last checkpoint is written while all is closed
    if steps_done and is_first():
        lines = read_metrics(workdir)
        draw_curves(lines, workdir / "curves.png", stored_seconds(workdir))
        hypotheses = read_lines(workdir / "hypotheses.jsonl")
        text = end_report(
            workdir,
            config,
            lines,
            hypotheses,
            parameters=_parameters(Blueprint(config)),
            skipped=data.skipped_text(),
            normalise=make_normaliser(config.train.normaliser),
        )
        outputs.write_text("report.txt", text + "\n")
        print(text)


def _train(
    config: Config,
    held: OpenedRun,
    outputs: OutputFolder,
    data: SpeechData,
    checkpoints: Checkpoints,
    account: TimeAccount,
    stopping: StopRequests,
) -> int:
    """Returns the number of steps that it has trained."""
    # --- the model on the mesh ---
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    train_step = LadderStep(blueprint, mesh)
    refresh, refresh_every = make_refresh(blueprint, mesh), config.posttraining.reference_every
    validation = Validation(blueprint, mesh, data, outputs)
    validate, save = account.timed("validating", validation), account.timed("saving", checkpoints.save)
    peak = peak_flops(jax.devices()[0].device_kind) if config.compute.dtype == "bfloat16" else None
    flops_of = model_flops(config) if peak else None
    print(f"{_parameters(blueprint)}; mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")

    with ExitStack() as stack:
        # --- the newest checkpoint, or a new run ---
        loader = stack.enter_context(closing(data.training(local_rows(mesh, config.data.rows))))
        state = newest_state(blueprint, mesh, checkpoints, loader)
        first, steps = int(state.step), config.train.steps
        if first:
            print(f"continuing from step {first} in {outputs.path}")
        if first >= steps:
            print(f"{outputs.path} already holds step {first} of {steps}: nothing to do")
            return 0
        changed = changed_settings(held.keep(first), first)
        metrics = stack.enter_context(open_metrics(outputs.path, first, config, account))
        non_finite = NonFiniteSteps(outputs, first, 1, metrics.say)
        watch_padding = PaddingWatch(config, metrics.say)
        watch_rungs = stack.enter_context(RungWatch(config.data, metrics.say))
        stopping.listen()
        with_reference = cached_reference(blueprint, mesh, data, outputs.path, state)
        validation.with_reference = with_reference
        # --- steps ---
        with account.during("data_wait"):  # before anything is compiled: data without a usable item ends here
            on_mesh, upcoming = _load(loader, mesh, with_reference)
        if first == 0 and validation.is_due(0):
            metrics.step({"step": 0, **validate(state), **time_line(account.seconds)})
        account.switch("stepping")
        wanted, path = range(first + 1, steps + 1), outputs.path
        numbers = profiled(wanted, config.train, path, metrics.say, account.during)
        for step in stack.enter_context(numbers):
            began, current = time.perf_counter(), upcoming
            watch_rungs(step, current.report.rung)
            state, on_device = train_step(current.report.rung, state, on_mesh)
            if refresh_every and step % refresh_every == 0:
                state = refresh(state)
            if step < steps:  # the next batch is loaded while the devices work
                with account.loading(on_device):
                    on_mesh, upcoming = _load(loader, mesh, with_reference)
            stopped = stopping()
            last = bool(stopped) or step == steps
            results = jax.tree.map(lambda x: x.item(), on_device)
            seconds, skipped = time.perf_counter() - began, data.skipped.total
            data.watch(metrics.say)
            watch_padding(step, current.report)
            flops = flops_of and flops_of(current.report)
            of_all = train_step.compilations, skipped, mesh.size, flops, peak, bool(config.data.rungs)
            facts = StepFacts(step, results, current.report, seconds, *of_all)
            validated = validate(state) if validation.is_due(step) else {}
            line = metrics_line(facts) | time_line(account.seconds)
            metrics.step(line | validated | (changed if step == first + 1 else {}))
            if results.skipped_in_a_row:
                documents = list(chain(*loader.keys(current.report)))
                non_finite.add(line, documents, results.skipped_in_a_row)
            if last or validated or step % config.train.checkpoint_every == 0:
                position = whole_position(current.position)
                save(step, canonical_form(state, blueprint, mesh), position, validated)
            if last:
                break
        if step < steps:
            metrics.say(f"stopped {stopped} after step {step}, which is saved: the same command continues")
    return step - first


class _Loaded(NamedTuple):
    """A batch on the host. position: where the data goes on after it."""

    batch: Batch
    report: BatchReport
    position: dict[str, Any]


def _load(loader: SynchronizedLoader, mesh: Mesh, with_reference: WithReference) -> tuple[Batch, _Loaded]:
    """(the next batch on the mesh, the same on the host)."""
    batch, report = next(loader)
    batch = with_reference(batch)
    return put_batch(batch, mesh), _Loaded(batch, report, loader.get_state())


def _parameters(blueprint: Blueprint) -> str:
    """Their number, as text."""
    own, frozen = split(abstract_state(blueprint).params, blueprint.trained)
    own_size, frozen_size = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (own, frozen))
    return f"{own_size:,} parameters" + f" to train and {frozen_size:,} frozen" * (frozen_size > 0)


if __name__ == "__main__":
    with ends_in_time(), readable_errors():
        main()
