"""The training run: config -> data -> step -> checkpoints and metrics.

    python -m jaxthd.train --config configs/cp2.py --workdir runs/cp2

A workdir that holds a checkpoint is continued. It receives
    metrics.jsonl    one object a step
    skipped.jsonl    every utterance left out, with the reason
    checkpoints/     parameters, optimizer, batch statistics, data position
    config.txt       the settings of the run
"""

import json
import math
import pprint
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxthd.checkpoint import Checkpoints
from jaxthd.cli import parse_command_line, simulate_devices
from jaxthd.config import Config
from jaxthd.data.loaders import SpeechData
from jaxthd.data.tokenizer import load_tokenizer
from jaxthd.errors import UserError, readable_errors
from jaxthd.evaluation import evaluate
from jaxthd.jsonl import append_line, keep_lines
from jaxthd.mesh import make_mesh, put_batch
from jaxthd.step import (
    TrainState,
    abstract_state,
    init_state,
    learning_rate_schedule,
    make_train_step,
    make_validation_step,
    model_graph,
)
from jaxthd.validate import DeviceFacts, validate

REPORTED = (
    "real_tokens",
    "supervised_tokens",
    "capacity_tokens",
    "documents",
    "audio_seconds",
    "imbalance",
)
"""What a metrics line takes from the loader's report."""


def main(argv: list[str] | None = None) -> None:
    config, config_path, options = parse_command_line("train", argv)
    workdir = options.workdir or Path("runs") / config_path.stem
    if simulate_devices(config.mesh.devices):
        several = f"{config.mesh.devices} CPU devices are simulated"
        print(f"no accelerator found: {several if config.mesh.devices > 1 else 'running on the CPU'}")
    vocabulary = load_tokenizer(config.data.tokenizer).vocab_size
    for warning in validate(config, DeviceFacts.of_this_machine(vocabulary)):
        print(f"warning: {warning}", file=sys.stderr)
    train(config, workdir)


def train(config: Config, workdir: Path) -> list[dict[str, Any]]:
    """Runs, or continues, the training of `workdir` up to config.train.steps; returns this call's metrics.

    The config is taken as validated. Raises UserError for data that cannot be used, for a workdir of another
    model or other data, and when the loss is no longer finite.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints) as checkpoints:
        return _train(config, workdir, checkpoints)


def _train(config: Config, workdir: Path, checkpoints: Checkpoints) -> list[dict[str, Any]]:
    # --- data ---
    data = SpeechData(config, workdir)
    loader = data.training()

    # --- model, on the mesh ---
    mesh = make_mesh(config.mesh)
    graph = model_graph(config)
    train_step = make_train_step(config, graph, mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    validation_step = make_validation_step(
        graph, mesh, end_id=tokenizer.eos_id, new_tokens=config.train.max_new_tokens
    )
    schedule = learning_rate_schedule(config.train)
    abstract = abstract_state(config)
    parameters = sum(x.size for x in jax.tree.leaves(abstract.params))
    print(f"{parameters:,} parameters; mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")

    # --- continue where a checkpoint stands ---
    everywhere = NamedSharding(mesh, PartitionSpec())
    restored = checkpoints.restore_latest(abstract, everywhere)
    if restored is None:
        state = init_state(config, mesh)
    else:
        state, position = restored
        loader.set_state(position)
        print(f"continuing from step {int(state.step)} in {workdir}")
    first, steps = int(state.step), config.train.steps
    if first >= steps:
        print(f"{workdir} already holds step {first} of {steps}: nothing to do")
        return []
    (workdir / "config.txt").write_text(pprint.pformat(config, width=100) + "\n")
    # Lines after the restored step are of a run that was cut off.
    metrics_file = workdir / "metrics.jsonl"
    keep_lines(metrics_file, lambda line: line["step"] <= first)

    def validation(state: TrainState) -> dict[str, float]:
        batches = (b for b, _ in zip(data.validation(), range(config.train.validation_batches), strict=False))
        scores, hypotheses = evaluate(config, batches, state, validation_step, mesh, tokenizer)
        lines = [json.dumps(h._asdict()) + "\n" for h in hypotheses]
        (workdir / "hypotheses.jsonl").write_text("".join(lines))
        return {f"validation_{k}": v for k, v in scores.items()}

    # --- steps ---
    print("compiling the training step", flush=True)
    history: list[dict[str, Any]] = []
    batch, report = next(loader)
    for step in range(first + 1, steps + 1):
        start = time.perf_counter()
        state, on_device = train_step(state, put_batch(batch, mesh))
        # The data position after this step's batch; the next one is read while the devices work.
        position, this_report = loader.get_state(), report
        if step < steps:
            batch, report = next(loader)
        loss, grad_norm = (float(x) for x in on_device[:2])
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise UserError(
                f"step {step}: loss {loss}, gradient norm {grad_norm}; expected finite numbers. Lower "
                f"train.learning_rate or train.clip_norm; the checkpoints in {workdir} are of earlier steps. "
                f"The documents of this step: {', '.join(key for row in this_report['keys'] for key in row)}"
            )
        seconds = time.perf_counter() - start
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(schedule(step - 1)),
            **{name: this_report[name] for name in REPORTED},
            "tokens_per_second": this_report["real_tokens"] / seconds,
            "step_seconds": seconds,
            "compilations": compilations(train_step),
        }
        last = step == steps
        every = config.train.validate_every
        if data.has_validation and every and (last or step % every == 0):
            line |= validation(state)
        line["skipped"] = len(data.skipped)
        append_line(metrics_file, line)
        history.append(line)
        print(progress_line(line, steps), flush=True)
        if last or step % config.train.checkpoint_every == 0:
            checkpoints.save(step, state, position)

    # --- what happened ---
    print(
        f"done: {len(history)} steps, loss {history[0]['loss']:.4f} -> {history[-1]['loss']:.4f}, "
        f"{history[-1]['compilations']} compilation(s) of the step, "
        f"{len(data.skipped)} utterances left out"
        + (f" (listed in {data.skipped.path})" if len(data.skipped) else "")
    )
    return history


def compilations(step: Any) -> int:
    """Executables that a jitted function has made so far."""
    return step._cache_size()


def progress_line(line: dict[str, Any], steps: int) -> str:
    padding = 1 - line["real_tokens"] / line["capacity_tokens"]
    text = (
        f"step {line['step']}/{steps}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.2f}  "
        f"{line['documents']} documents  {line['tokens_per_second']:.0f} real tokens/s  "
        f"padding {padding:.0%}  {line['step_seconds']:.2f} s"
    )
    if "validation_loss" in line:
        text += (
            f"  validation loss {line['validation_loss']:.4f}, {line['validation_documents']:.0f} documents"
            f"  accuracy {line['validation_accuracy']:.3f} WER {line.get('validation_wer', 0):.1%}"
        )
    return text


if __name__ == "__main__":
    with readable_errors():
        main()
