"""The training run: config -> data -> step -> checkpoints and metrics.

    python -m jaxthd.train --config configs/cp2.py --workdir runs/cp2

A workdir that holds a checkpoint is continued. It receives
    metrics.jsonl      one object a step; tensorboard/ the same for TensorBoard
    curves.png         loss, word error rate, speed over the steps
    hypotheses.jsonl   what the last validation decoded, next to what it should be
    skipped.jsonl      every document skipped, with the reason
    not_finite.jsonl   steps whose update was skipped, with their documents
    checkpoints/       parameters, optimizer, batch statistics, data position
    config.json        the settings of the run

Several processes train together: SLURM's srun starts them, or each is told --coordinator HOST:PORT
--processes N --process I. They share the workdir; all but the arrays of checkpoints is written by process 0.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.weights import start_state
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData, whole_position
from jaxthd.errors import UserError, readable_errors
from jaxthd.figures.curves import draw_batch, draw_curves
from jaxthd.files.jsonl import append_line, keep_lines, write_lines
from jaxthd.inference.evaluator import Evaluator, validation_metrics
from jaxthd.models.adapt import split
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.parallel.processes import exchange, is_first, require_same
from jaxthd.run.metrics import Metrics, NoMetrics, metrics_line, read_metrics, summary
from jaxthd.run.signals import stop_requested
from jaxthd.run.workdir import opened
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState, abstract_state, canonical_form, canonical_shardings, training_form
from jaxthd.steps.training import make_train_step
from jaxthd.terminal.command_line import PROCESS_OPTIONS, parse_command_line, ready


def main(argv: list[str] | None = None) -> None:
    config, config_path, options = parse_command_line("train", argv, PROCESS_OPTIONS)
    workdir = options.workdir or Path("runs") / config_path.stem
    with ready(config, options) as config:
        train(config, workdir)


def train(config: Config, workdir: Path) -> None:
    """Runs, or continues, the training of `workdir` up to config.train.steps, or until SIGTERM or Ctrl-C.

    If there are several processes (jaxthd.parallel.processes), all call it; they share the workdir. The config is
    taken as validated. Raises UserError for data that cannot be used, for a workdir of another config or in
    use, where too many updates in a row are not finite, and where a checkpoint cannot be saved.
    """
    with ExitStack() as stack:
        if is_first():
            stack.enter_context(opened(workdir, config))
        require_same("the configuration", asdict(config))
        data = stack.enter_context(closing(SpeechData(config, workdir)))
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints))
        first, steps = _train(config, workdir, data, checkpoints), config.train.steps
    if first < steps and is_first():
        lines = read_metrics(workdir)
        draw_curves(lines, workdir / "curves.png")
        print(summary(lines))
        if len(data.skipped):
            print(f"documents skipped are listed in {data.skipped.path}")


def _train(config: Config, workdir: Path, data: SpeechData, checkpoints: Checkpoints) -> int:
    """Returns the step at which the run was taken up."""
    # --- model, on the mesh ---
    mesh = make_mesh(config.mesh)
    train_step = make_train_step(Blueprint(config), mesh)
    evaluator = Evaluator(config, mesh, data.end_id)
    abstract = abstract_state(Blueprint(config))
    own, frozen = split(abstract.params, Blueprint(config).trained)
    own_size, frozen_size = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (own, frozen))
    parameters = f"{own_size:,} parameters" + f" to train and {frozen_size:,} frozen" * (frozen_size > 0)
    print(f"{parameters}; mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")

    with ExitStack() as stack:
        # --- continue where a checkpoint stands ---
        rows = local_rows(mesh, config.data.rows)
        loader = stack.enter_context(closing(data.training(rows)))
        restored = checkpoints.restore_latest(abstract, canonical_shardings(Blueprint(config), mesh))
        if restored is None:
            state = start_state(config, mesh)
        else:
            state, position = training_form(restored[0], Blueprint(config), mesh), restored[1]
            loader.set_state(position)
            print(f"continuing from step {int(state.step)} in {workdir}")
        first, steps = int(state.step), config.train.steps
        if first >= steps:
            print(f"{workdir} already holds step {first} of {steps}: nothing to do")
            return first
        # What was written after the restored step is of a run that was cut off.
        not_finite = workdir / "not_finite.jsonl"
        if is_first():
            keep_lines(not_finite, lambda line: line["step"] <= first)
            metrics = Metrics(workdir, first, steps, tensorboard=config.train.tensorboard)
        else:
            metrics = NoMetrics()
        stack.enter_context(metrics)
        stopping = stack.enter_context(stop_requested())

        def validation(state: TrainState) -> dict[str, float]:
            sets, scores, heard = config.data.validation_sets, [], []
            for each in sets:
                with closing(data.validation(rows, each.name)) as batches:
                    found = evaluator(state, islice(batches, config.train.validation_batches))
                scores.append(found.scores)
                of_set = {"set": each.name} if each.is_named else {}
                heard += [of_set | h._asdict() for h in found.hypotheses]
            if is_first():
                write_lines(workdir / "hypotheses.jsonl", heard)
            return validation_metrics(sets, scores)

        # --- steps ---
        every = config.train.validate_every if data.has_validation else 0
        if every and first == 0:
            metrics.step({"step": 0, **validation(state)})
        metrics.say("compiling the training step")
        batch, report = next(loader)
        on_mesh = put_batch(batch, mesh)
        for step in range(first + 1, steps + 1):
            start = time.perf_counter()
            state, on_device = train_step(state, on_mesh)
            # The data position after this step's batch; the next one is taken while the devices work.
            position, this_batch, this_report = loader.get_state(), batch, report
            if step < steps:
                batch, report = next(loader)
                on_mesh = put_batch(batch, mesh)
            stop = any(exchange(stopping()))
            measured = jax.tree.map(lambda x: x.item(), on_device)
            scalars: dict[str, float | int] = {
                "loss": measured.loss,
                "grad_norm": measured.grad_norm,
                "learning_rate": measured.learning_rate,
                "skipped_updates": measured.skipped,
                "compilations": compilations(train_step),
                "skipped_documents": len(data.skipped),
            }
            if measured.mtp_loss is not None:
                scalars["mtp_loss"] = measured.mtp_loss
            if measured.max_expert_load is not None:
                scalars |= {"max_expert_load": measured.max_expert_load, "aux_loss": measured.aux_loss}
            line = metrics_line(step, scalars, this_report, time.perf_counter() - start)
            last = step == steps or stop
            validated = validation(state) if every and (step == steps or step % every == 0) else {}
            metrics.step(line | validated)
            if measured.skipped_in_a_row:
                documents = [key for row in loader.keys(this_report) for key in row]
                what = {name: line[name] for name in ("step", "loss", "grad_norm")}
                if is_first():
                    append_line(not_finite, what | {"documents": documents})
                metrics.say(f"warning: {_skipped(what, documents)}")
                if measured.skipped_in_a_row >= config.train.max_skipped_steps:
                    raise UserError(
                        f"{_skipped(what, documents)}. So were {measured.skipped_in_a_row} in a row "
                        "(train.max_skipped_steps); expected finite numbers. Lower train.learning_rate or "
                        f"train.clip_norm, or look at the documents listed in {not_finite}. The checkpoints "
                        "are of before"
                    )
            if last or validated or step % config.train.checkpoint_every == 0:
                saved = canonical_form(state, Blueprint(config), mesh)
                checkpoints.save(step, saved, whole_position(position), validated)
            if last:
                break
        if step < steps:
            metrics.say(f"stopped by a signal after step {step}, which is saved: the same command continues")
        if config.train.draw_last_batch and is_first():
            draw_batch(this_batch, this_report, config, workdir / "last_batch.png")
    return first


def _skipped(what: Mapping[str, Any], documents: Sequence[str]) -> str:
    """what: step, loss, grad_norm."""
    others = f" and {len(documents) - 5} more" if len(documents) > 5 else ""
    return (
        f"step {what['step']}: loss {what['loss']}, gradient norm {what['grad_norm']}: its update is "
        f"skipped. Documents: {', '.join(documents[:5])}{others}"
    )


def compilations(step: Any) -> int:
    """Executables that a jitted function has made so far."""
    return step._cache_size()


if __name__ == "__main__":
    with readable_errors():
        main()
