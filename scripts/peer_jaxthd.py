"""jaxthd's side of bench_peer.py."""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import soundfile

from jaxthd.checkpoints.sources import load_config
from jaxthd.checkpoints.weights import Weights, load_weights
from jaxthd.config import Config, DataConfig, ModelConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.dataset import SpeechData
from jaxthd.hf.checkpoint import model_config
from jaxthd.inference.generator import Generator
from jaxthd.parallel.mesh import local_rows, make_mesh, put_batch
from jaxthd.planning.fitting import fitting_step
from jaxthd.planning.model_flops import model_flops
from jaxthd.planning.sizes import with_sizes
from jaxthd.run.startup import keep_freed_memory, prepared, simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import new_state
from jaxthd.steps.training import loss_and_gradient
from scripts.benchmark import changed
from scripts.gpu_costs import part_of
from scripts.gpu_models import attention_and_scan_flops, report_of, rows_of
from scripts.gpu_program import parse
from scripts.peer_process import MATRIX, workers_run
from scripts.peer_work import (
    AT_ONCE,
    AUDIO,
    ENTRIES,
    NEW_TOKENS,
    STRETCHES,
    Recordings,
    Shape,
    Side,
    thousand_tokens,
)


def config_of(folder: Path, tuned: str) -> Any:
    """The config of a user who names the model's folders and the data, with these settings over it."""
    if (folder / "published").exists():
        config = load_config(folder / "published")
        manifest = (folder / "manifest").read_text()
        data = replace(config.data, manifest=(manifest,), validation_manifest=f"all={manifest}")
        return changed(replace(config, data=data), tuned.split(","))
    model = model_config(folder / "salm", model=ModelConfig())
    if (folder / "hybrid").exists():
        model = model_config(folder / "hybrid", model=model)
    manifest = (folder / "manifest").read_text()
    data = DataConfig(manifest=(manifest,), validation_manifest=f"all={manifest}", tokenizer="bytes")
    return changed(Config(model=model, data=data), tuned.split(","))


def documents_of(config: Any, folder: Path) -> list[tuple[Any, Any]]:
    """(example, document) of every item of the manifest, without dither."""
    with closing(SpeechData(config, folder, training=False)) as data:
        return [(x, data.validation_document(x)) for x in data.validation_examples("all")]


class Jaxthd:
    """jaxthd with the settings `way` over its defaults."""

    def __init__(self, folder: Path, way: str) -> None:
        simulate_devices(1)
        keep_freed_memory()
        self.folder, self.work = folder, Path(tempfile.mkdtemp(dir=folder))
        self.config = config = prepared(with_sizes(config_of(folder, way), self.work))
        self.mesh = mesh = make_mesh(config.mesh)
        blueprint = Blueprint(config)
        self.state: Any = new_state(self.weights(), blueprint, mesh)
        self.loader = SpeechData(config, self.work).training(local_rows(mesh, config.data.rows))
        batch, self.report = next(self.loader)
        self.on_mesh = put_batch(batch, mesh)
        told: list[str] = []
        self.step = fitting_step(blueprint, mesh, self.state, self.on_mesh, told.append)
        print("\n".join(told), file=sys.stderr)
        self.recordings = Recordings.read(folder)

    def calls(self) -> Side:
        square = jax.numpy.ones((MATRIX, MATRIX))
        product = jax.jit(lambda x: x @ x)
        matrix = lambda: float(product(square)[0, 0])  # noqa: E731
        return Side(self.stretch, self.checked, matrix, lambda: 0.0, self.profile, self.answers, self.load)

    def weights(self) -> Any:
        """The SALM's weights; where there is a hybrid, its decoder's in their place."""
        folder, config = self.folder, self.config
        if (folder / "published").exists():
            return load_weights([folder / "published"], Blueprint(config), self.mesh, partly=False)
        salm = replace(config, model=model_config(folder / "salm", model=ModelConfig()))
        found = load_weights([folder / "salm"], Blueprint(salm), self.mesh, partly=False)
        if not (folder / "hybrid").exists():
            return found
        llm = replace(config, model=replace(config.model, encoder=None))
        own = load_weights([folder / "hybrid"], Blueprint(llm), self.mesh, partly=False)
        audio = [{k: v for k, v in tree.items() if k in ("encoder", "adapter")} for tree in found]
        return Weights(*(a | b for a, b in zip(audio, own, strict=True)))

    def stretch(self, number: int) -> tuple[int, float]:
        """As jaxthd train: the next batch is loaded while the step computes."""
        tokens, seconds = 0, 0.0
        with workers_run():
            while tokens < sum(self.recordings.slots) / STRETCHES:
                self.state, metrics = self.step(self.state, self.on_mesh)
                tokens, seconds = tokens + self.report.real_tokens, seconds + self.report.audio_seconds
                batch, self.report = next(self.loader)
                self.on_mesh = put_batch(batch, self.mesh)
                jax.block_until_ready(metrics)
        return tokens, seconds

    def checked(self) -> list[tuple[float, float]]:

        start, found = self.weights(), []
        documents = documents_of(self.config, self.work)
        for i in self.recordings.checked():
            batch, sizes = rows_of([[documents[i][1]]], self.config.model)
            program = jax.jit(loss_and_gradient(Blueprint(replace(self.config, data=sizes)), self.mesh))
            loss, gradients, *_ = program(start.params, start.buffers, put_batch(batch, self.mesh))
            found.append((float(loss), float(optax.tree.norm(gradients))))
        return found

    def profile(self) -> dict[str, float]:
        """By jax's profiler. Where two operations run at a time, each has half of the time."""
        program = parse(self.step.lower(self.state, self.on_mesh).compile().as_text())
        instructions = {name: x for group in program.computations.values() for name, x in group.items()}
        with tempfile.TemporaryDirectory() as traces:
            with jax.profiler.trace(traces):
                tokens, _ = self.stretch(0)
            (trace,) = Path(traces).glob("**/*.xplane.pb")
            data = jax.profiler.ProfileData.from_file(str(trace))
            spans = list(_operations(data, instructions))
        milliseconds: dict[str, float] = defaultdict(float)
        for name, spent in _shared(spans).items():
            milliseconds[part_of(list(program.frames(instructions[name])))] += spent / 1e6
        return thousand_tokens(milliseconds, tokens)

    def answers(self) -> list[list[int]]:
        if not hasattr(self, "generator"):
            weights, documents = self.weights(), documents_of(self.config, self.work)
            # ENTRIES is no token: nothing ends an answer early.
            sizes: dict[str, Any] = {"batch": AT_ONCE, "max_new_tokens": NEW_TOKENS, "stop_ids": (ENTRIES,)}
            self.generator = Generator(self.config, self.mesh, weights.params, weights.buffers, **sizes)
            examples = [documents[i][0] for i in self.recordings.answered()]
            self.asked = [replace(x, turns=x.turns[:-1]) for x in examples]
        return [list(answer.tokens) for answer in self.generator.generate(self.asked)]

    def load(self) -> int:
        config = replace(self.config, data=replace(self.config.data, workers=0))
        documents = 0
        with closing(SpeechData(config, self.work)) as data, closing(data.training([0])) as loader:
            while documents < len(self.recordings.ids):
                documents += next(loader)[1].documents
        return documents


def _operations(data: Any, instructions: Mapping[str, Any]) -> Iterator[tuple[float, float, str]]:
    """(start, end, instruction) of each operation of a trace, in ns; not those that only run others.

    A product may go on after its event, on other threads: an event "end: NAME" marks when it is done.
    """
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    ends = {dict(x.stats)["_c"]: x.start_ns for x in events if x.name.startswith("end: ")}
    for event in events:
        stats = dict(event.stats)
        name = str(stats.get("hlo_op"))
        if name in instructions and instructions[name].op not in ("while", "conditional", "call"):
            yield event.start_ns, ends.get(stats.get("_p"), event.start_ns + event.duration_ns), name


def _shared(spans: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Time of each name; operations that run at the same time share it."""
    long = [(n, a, b) for n, (a, b, _) in enumerate(spans) if a < b]
    points = sorted(point for n, a, b in long for point in ((a, True, n), (b, False, n)))
    running: set[int] = set()
    found: dict[str, float] = defaultdict(float)
    last = 0.0
    for now, begins, number in points:
        for other in running:
            found[spans[other][2]] += (now - last) / len(running)
        (running.add if begins else running.discard)(number)
        last = now
    return found


def reshaped(manifest: str, folder: Path, shape: Shape) -> str:
    """The manifest, or another one with its recordings and texts in that shape."""
    if shape == Shape():
        return manifest
    (folder / "manifest").write_text(manifest)
    examples = [x for x, d in documents_of(config_of(folder, ""), folder) if hasattr(d, "tokens")]
    clips = [load_audio(c.path, c.offset, c.duration, member=c.member) for x in examples for c in x.clips]
    groups: list[list[int]] = [[]]
    for number, samples in enumerate(clips):
        if groups[-1] and sum(len(clips[i]) for i in groups[-1]) + len(samples) > 16_000 * shape.seconds:
            groups.append([])
        groups[-1].append(number)
    path = folder / "shaped.jsonl"
    with open(path, "w") as lines:
        for number, group in enumerate(groups):
            wav, samples = folder / f"shaped{number}.wav", np.concatenate([clips[i] for i in group])
            samples = samples[: len(samples) // shape.frame * shape.frame]
            soundfile.write(wav, samples, 16_000, subtype="FLOAT")
            text = " ".join(examples[i].text for i in group for _ in range(shape.texts))
            line = {"audio_filepath": str(wav), "duration": len(samples) / 16_000, "text": text}
            print(json.dumps(line), file=lines)
    return str(path)


def write_documents(folder: Path, manifest: str) -> float:
    """Writes the documents as the peer takes them. Returns GFLOP a token (model_flops, and attention and scan
    over what they must compute), without padding and recomputation; 0 for FAMILIES."""

    (folder / "manifest").write_text(manifest)  # this one is read first, the copy below afterwards
    config = config_of(folder, "")
    items = [(x, d) for x, d in documents_of(config, folder) if hasattr(d, "tokens")]
    samples, ids, trained = [], [], []
    is_family = (folder / "published").exists()
    for example, document in items:
        clips = [load_audio(c.path, c.offset, c.duration, member=c.member) for c in example.clips]
        starts = np.flatnonzero(np.diff(document.is_audio, prepend=False) & document.is_audio)
        if len(clips) != 1 or (len(starts) != 1 and not is_family):
            sys.exit(f"{example.key}: expected one recording a line")
        keeps = ~document.is_audio | is_family
        keeps[starts] = True
        samples.append(clips[0])
        ids.append(np.where(document.is_audio, AUDIO, document.tokens)[keeps])
        trained.append(document.supervised[keeps])
    with open(folder / "manifest.jsonl", "w") as lines:
        for number, (example, x) in enumerate(zip((example for example, _ in items), samples, strict=True)):
            path = folder / f"{number}.wav"
            soundfile.write(path, x, 16_000, subtype="FLOAT")
            line = {"audio_filepath": str(path), "duration": len(x) / 16_000, "text": example.text}
            print(json.dumps(line), file=lines)
    (folder / "manifest").write_text(str(folder / "manifest.jsonl"))
    np.save(folder / "audio.npy", np.concatenate(samples))
    np.savez(
        folder / "documents.npz",
        samples=[len(x) for x in samples],
        lengths=[len(x) for x in ids],
        ids=np.concatenate(ids),
        trained=np.concatenate(trained),
        slots=[len(d) for _, d in items],
    )

    documents = [d for _, d in items]
    flops = 0.0
    if not is_family:
        flops = model_flops(config)(report_of(documents, config))
        flops += attention_and_scan_flops(config, documents)
    tokens = sum(map(len, documents))
    print(
        f"{len(items):,} documents, {sum(map(len, samples)) / 16_000:,.0f} s of audio, {tokens:,} tokens, "
        f"{sum(d.is_audio.sum() for d in documents) / tokens:.0%} of them audio"
    )
    return flops / tokens / 1e9
