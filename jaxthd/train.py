"""The training run: config -> data -> step -> checkpoints and metrics.

    python -m jaxthd.train --config configs/cp2.py --workdir runs/cp2

A workdir that holds a checkpoint is continued. It receives
    metrics.jsonl    one object a step
    skipped.jsonl    every utterance left out, with the reason
    checkpoints/     parameters, optimizer, batch statistics, data position
    config.txt       the settings of the run
"""

import json
import os
import pprint
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.checkpoint import Checkpoints
from jaxthd.cli import parse_command_line, simulate_devices
from jaxthd.config import Config
from jaxthd.data.manifest import Utterance, read_manifest
from jaxthd.data.pipeline import Loader, make_loader
from jaxthd.data.speech import SkipLog, SpeechDocuments
from jaxthd.data.synthetic import synthetic_manifests
from jaxthd.data.tokenizer import load_tokenizer
from jaxthd.mesh import make_mesh, put_batch
from jaxthd.step import (
    TrainState,
    init_state,
    learning_rate_schedule,
    make_train_step,
    make_validation_step,
    model_graph,
)
from jaxthd.validate import DeviceFacts, validate


def main(argv: list[str] | None = None) -> None:
    config, config_path, options = parse_command_line("train", argv)
    workdir = options.workdir or Path("runs") / config_path.stem
    simulated = simulate_devices(config.mesh.devices)
    if simulated:
        print(f"no accelerator found: {config.mesh.devices} CPU devices are simulated")
    vocabulary = load_tokenizer(config.data.tokenizer).vocab_size
    for warning in validate(config, DeviceFacts.of_this_machine(vocabulary)):
        print(f"warning: {warning}", file=sys.stderr)
    train(config, workdir)


def train(config: Config, workdir: Path) -> list[dict[str, Any]]:
    """Runs, or continues, the training of `workdir` up to config.train.steps; returns this call's metrics.

    The config is taken as validated.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.txt").write_text(pprint.pformat(config, width=100) + "\n")

    # --- data ---
    data = SpeechData(config, workdir)
    loader = data.training()

    # --- model, on the mesh ---
    mesh = make_mesh(config.mesh)
    graph = model_graph(config)
    train_step = make_train_step(config, graph, mesh)
    validation_step = make_validation_step(graph, mesh)
    schedule = learning_rate_schedule(config.train)
    state = init_state(config, mesh)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    print(f"{parameters:,} parameters; mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")

    # --- continue where a checkpoint stands ---
    checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints)
    restored = checkpoints.restore_latest(jax.eval_shape(lambda: state), NamedSharding(mesh, PartitionSpec()))
    if restored:
        state, position = restored
        loader.set_state(position)
        print(f"continuing from step {int(state.step)} in {workdir}")
    first = int(state.step)
    if first >= config.train.steps:
        print(f"{workdir} already holds step {first} of {config.train.steps}: nothing to do")
        checkpoints.close()
        return []
    metrics_file = MetricsFile(workdir / "metrics.jsonl", keep_up_to=first)

    # --- steps ---
    print("compiling the training step", flush=True)
    history: list[dict[str, Any]] = []
    batch, report = next(loader)
    for step in range(first + 1, config.train.steps + 1):
        start = time.perf_counter()
        state, on_device = train_step(state, put_batch(batch, mesh))
        # The data position after this step's batch; the next one is read while the devices work.
        position, this_report = loader.get_state(), report
        if step < config.train.steps:
            batch, report = next(loader)
        loss, grad_norm = (float(x) for x in on_device)
        seconds = time.perf_counter() - start
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(schedule(step - 1)),
            "real_tokens": this_report["real_tokens"],
            "supervised_tokens": this_report["supervised_tokens"],
            "capacity_tokens": this_report["capacity_tokens"],
            "documents": this_report["documents"],
            "audio_seconds": this_report["audio_seconds"],
            "imbalance": this_report["imbalance"],
            "tokens_per_second": this_report["real_tokens"] / seconds,
            "step_seconds": seconds,
            "compilations": compilations(train_step),
            "skipped": len(data.skipped),
        }
        last = step == config.train.steps
        every = config.train.validate_every
        if data.has_validation and every and (last or step % every == 0):
            line |= validation(config, data, state, validation_step, mesh)
        metrics_file.write(line)
        history.append(line)
        print(progress_line(line, config.train.steps), flush=True)
        if last or step % config.train.checkpoint_every == 0:
            checkpoints.save(step, state, position)
    checkpoints.close()

    # --- what happened ---
    print(
        f"done: {len(history)} steps, loss {history[0]['loss']:.4f} -> {history[-1]['loss']:.4f}, "
        f"{history[-1]['compilations']} compilation(s) of the step, "
        f"{len(data.skipped)} utterances left out"
        + (f" (listed in {data.skipped.path})" if len(data.skipped) else "")
    )
    return history


class SpeechData:
    """The run's manifests as loaders. Faulty lines and recordings go to the skip log."""

    def __init__(self, config: Config, workdir: Path) -> None:
        manifest, validation = config.data.manifest, config.data.validation_manifest
        if "synthetic" in (manifest, validation):
            synthetic = [str(path) for path in synthetic_manifests()]
            manifest = synthetic[0] if manifest == "synthetic" else manifest
            validation = synthetic[1] if validation == "synthetic" else validation
        self._config = config
        self.skipped = SkipLog(workdir / "skipped.jsonl")
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._training = self._read(manifest)
        self._validation = self._read(validation) if validation else []
        print(f"{len(self._training)} training and {len(self._validation)} validation utterances")

    @property
    def has_validation(self) -> bool:
        return bool(self._validation)

    def training(self) -> Loader:
        documents = SpeechDocuments(self._config, self._tokenizer, self.skipped, train=True)
        return make_loader(self._training, documents, self._config, on_skip=self.skipped)

    def validation(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """One pass over the validation set, in the manifest's order."""
        documents = SpeechDocuments(self._config, self._tokenizer, self.skipped, train=False)
        return make_loader(
            self._validation, documents, self._config, repeat=False, shuffle=False, on_skip=self.skipped
        )

    def _read(self, manifest: str) -> list[Utterance]:
        utterances, faults = read_manifest(manifest)
        for fault in faults:
            self.skipped(fault.key, fault.reason)
        return utterances


def validation(
    config: Config, data: SpeechData, state: TrainState, validation_step: Any, mesh: Mesh
) -> dict[str, float]:
    """Mean negative log-likelihood over the validation set's supervised tokens."""
    loss = tokens = jnp.zeros(())
    batches = zip(range(config.train.validation_batches), data.validation(), strict=False)
    for _, (batch, _report) in batches:
        batch_loss, batch_tokens = validation_step(state.params, state.buffers, put_batch(batch, mesh))
        loss, tokens = loss + batch_loss, tokens + batch_tokens
    return {"validation_loss": float(loss / jnp.maximum(tokens, 1)), "validation_tokens": float(tokens)}


class MetricsFile:
    """metrics.jsonl: one JSON object a line. Lines after the restored step are of a run that was cut off."""

    def __init__(self, path: Path, keep_up_to: int) -> None:
        kept = []
        if path.exists():
            lines = path.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= keep_up_to]
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(line + "\n" for line in kept))
        os.replace(scratch, path)
        self._path = path

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> float:
    """A metrics line's step; infinity for a line that a kill cut short."""
    try:
        return float(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")


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
        text += f"  validation loss {line['validation_loss']:.4f}"
    return text


if __name__ == "__main__":
    main()
