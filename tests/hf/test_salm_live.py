"""Models of NeMo itself, in and out: recordings of 0.3 s to 100 s, each document alone in NeMo, here packed
on a mesh of all four axes.

    python -m pytest -m nightly tests/hf/test_salm_live.py --python-reference PYTHON

PYTHON has nemo-toolkit[asr] 3.0 and peft (tests/references/salm_live.py).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxthd.checkpoints.weights import Weights, load_model, named_weights
from jaxthd.config import AdaptConfig, Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.run_folder import read_config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.inference.generator import Generator
from jaxthd.inference.model import load
from jaxthd.models.stacks import from_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.errors import relative_errors
from tests.hf.published import COMPUTE, arranged, shapes_of, tensors
from tests.spoken_words import write_manifest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
SECONDS = ((0.3,), (0.325, 1.28), (5.7,), (0.64,), (30.0,), (30.013,), (0.4,), (12.3, 2.0), (61.7,), (100.0,))
"""Of the recordings of each document. NeMo pads those of one document together, which a Q-Former sees: before
that each document has one."""
STORED = "encoder.blocks.conv.norm.*"
"""BatchNorms normalise by stored statistics, as NeMo's do in evaluation mode. Their own gradients are
compared in test_families.py."""
MESH = MeshConfig(data=1, context=2, pipeline=2, tensor=2)
PEFT = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OWN = {"dim": 2, "alpha": 3, "target_modules": ["q_proj", "o_proj", "out_proj"]}


class Case(NamedTuple):
    """Settings of tests.references.salm_live.make."""

    llm: str
    connector: str
    encoder: dict[str, Any]
    changes: dict[str, Any]
    dtype: str = "float32"


CASES = {
    "qwen3-identity-lora": Case("qwen3", "identity", {}, {"lora": PEFT}),
    "qwen3-identity-chunks": Case("qwen3_untied", "identity", {}, {"encoder_chunk_size_seconds": 30}),
    "qwen3-layers-chunks": Case("qwen3", "layers", {"n_layers": 3}, {"encoder_chunk_size_seconds": 7.77777}),
    "qwen3-qformer": Case("qwen3", "qformer", {"n_layers": 3, "preprocessor": {"pad_to": 16}}, {}),
    "nemotron-identity-lora": Case(
        "nemotron", "identity", {"use_bias": False, "xscaling": False}, {"lora": OWN}
    ),
    "nemotron-layers": Case("nemotron", "layers", {}, {}),
    "nemotron-qformer-chunks": Case("nemotron", "qformer", {}, {"encoder_chunk_size_seconds": 12.5}),
    "nemotron_dense-identity-bfloat16": Case("nemotron_dense", "identity", {}, {}, "bfloat16"),
}
TRAINED = ("qwen3-identity-lora", "qwen3-qformer", "qwen3-layers-chunks", "nemotron-layers")
SMALL = (
    *(
        "--mesh.data",
        1,
        "--mesh.context",
        2,
        "--mesh.tensor",
        2,
        "--data.capacity",
        256,
        "--data.audio-capacity",
        2048,
    ),
    *("--data.max-documents", 8, "--data.workers", 0, "--train.steps", 6, "--train.learning-rate", 0.01),
    *("--train.warmup-steps", 1, "--train.checkpoint-every", 6),
)


class Nemo(NamedTuple):
    """NeMo in another interpreter."""

    python: str

    def __call__(self, *words: Any) -> str:
        command = [self.python, "-m", "tests.references.salm_live", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert not done.returncode, done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def nemo(request: pytest.FixtureRequest) -> Nemo:
    python = str(request.config.getoption("--python-reference"))
    found = subprocess.run(
        [python, "-c", "import nemo.collections.speechlm2"], capture_output=True, check=False
    )
    if found.returncode:
        pytest.skip("--python-reference names no interpreter with nemo-toolkit[asr]")
    return Nemo(python)


def speech(rng: np.random.Generator, seconds: float) -> np.ndarray:
    """Loud and quiet by turns; lower notes are louder; some of it is silence."""
    samples = round(16000 * seconds)
    noise = np.convolve(rng.standard_normal(samples), np.exp(-np.arange(64) / 9), "same")
    marks = np.arange(0, samples + 4000, 4000)
    loudness = np.interp(np.arange(samples), marks, rng.uniform(0, 0.1, len(marks)))
    return np.float32(noise * loudness)


def examples(rng: np.random.Generator, vocabulary: int, most: int) -> list[Example]:
    """Conversations of words, with at most so many recordings each."""

    def words(most: int) -> str:
        return " ".join(f"w{i:03}" for i in rng.integers(4, vocabulary, rng.integers(1, most)))

    return [
        Example(
            str(n),
            (
                Turn("user", (words(4), *(Samples(speech(rng, s), 16000) for s in seconds[:most]), words(4))),
                Turn("assistant", (words(16),)),
            ),
        )
        for n, seconds in enumerate(SECONDS)
    ]


def config_of(folder: Path, mesh: MeshConfig, tokenizer: Path) -> Config:
    lora, model = open_checkpoint(folder).lora or AdaptConfig(), model_config(folder)
    head = () if model.llm.tied_embedding else ("!head",)
    of_llm = ("!decoder.*", "!embedding", *head) if lora.lora_rank else ()
    adapt = replace(lora, lora_dropout=0.0, freeze=(STORED, *of_llm))
    data = DataConfig(
        tokenizer=str(tokenizer), capacity=1536, audio_capacity=12000, max_documents=16, rows=2, workers=0
    )
    train = TrainConfig(microbatches=2)
    return Config(mesh=mesh, model=model_config(folder), data=data, compute=COMPUTE, adapt=adapt, train=train)


def requests(
    documents: Sequence[Document], audios: Sequence[Sequence[np.ndarray]], tag: int
) -> dict[str, Any]:
    """The documents for NeMo: one tag for each recording."""
    asked: dict[str, Any] = {}
    for c, (document, recordings) in enumerate(zip(documents, audios, strict=True)):
        starts = [
            sum(p.tokens for p in document.pieces[:i]) for i, p in enumerate(document.pieces) if p.begins
        ]
        slots = np.flatnonzero(document.is_audio)
        kept = ~document.is_audio
        kept[slots[starts]] = True
        tokens = np.where(document.is_audio, tag, document.tokens)[kept]
        asked |= {f"tokens.{c}": tokens, f"first.{c}": int(np.flatnonzero(document.supervised[kept])[0])}
        asked |= {f"samples.{c}.{i}": x for i, x in enumerate(recordings)}
    return asked


def some_prompts(rng: np.random.Generator) -> list[Example]:
    return [
        Example(f"p{n}", (Turn("user", (Samples(speech(rng, rng.uniform(0.3, 8)), 16000), f"w{n + 5:03}")),))
        for n in range(20)
    ]


def questions(prompts: Sequence[Example], made: SpeechDocuments, tag: int) -> dict[str, Any]:
    """The prompts for NeMo."""
    asked: dict[str, Any] = {}
    for p, example in enumerate(prompts):
        prompt = made.prompt(example)
        text = prompt.tokens[~prompt.is_audio].tolist()
        at = int(np.flatnonzero(prompt.is_audio)[0])
        asked |= {f"prompt.{p}": [*text[:at], tag, *text[at:]], f"sounds.{p}.0": example.clips[0].samples}
    return asked


def equal_tokens(ours: Sequence[Sequence[int]], found: dict[str, np.ndarray]) -> int:
    """Compares greedy answers, each until the first step whose best two tokens NeMo has within 1e-4. Returns
    the number of tokens compared."""
    steps = 0
    for p, answer in enumerate(ours):
        close = np.flatnonzero(found[f"gaps.{p}"] < 1e-4)
        until = int(close[0]) if len(close) else len(found[f"gaps.{p}"])
        assert answer[:until] == found[f"answer.{p}"][:until].tolist(), p
        steps += until
    return steps


def make(nemo: Nemo, name: str, folder: Path) -> None:
    """A random model of NeMo."""
    folder.mkdir()
    settings = folder.with_suffix(".json")
    settings.write_text(json.dumps({**CASES[name]._asdict(), "seed": 5}))
    nemo("make", folder, settings)


def gradients(config: Config, folder: Path, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """The gradients of the sum of -log p of the supervised tokens, packed in two rows, by jaxthd's names."""
    sizes: dict[str, Any] = {"capacity": 2048, "audio_capacity": 16000, "max_documents": 16}
    ranks = {"context": config.mesh.context, "audio_ranks": config.mesh.audio_ranks}
    rows = [documents[::2], documents[1::2]]
    packed = [pack_row(row, **sizes, **ranks, front_end=config.model.audio_encoder) for row in rows]
    batch = concatenate_rows([row for row, _ in packed])
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    held = load_model([folder], blueprint, mesh)
    got = jax.jit(loss_and_gradient(blueprint, mesh))(*held, put_batch(batch, mesh))
    count = sum(report.supervised_tokens for _, report in packed)
    own = from_stages(jax.device_get(got.gradients), blueprint.stages)
    return {name: count * np.asarray(x) for name, x in named_weights(Weights(own, {})).items()}


def answers(config: Config, folder: Path, prompts: Sequence[Example]) -> list[list[int]]:
    """Greedy answers, with the token that ends each."""
    config = replace(config, data=replace(config.data, capacity=1024, audio_capacity=8000))
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    made = Generator(config, mesh, *load_model([folder], blueprint, mesh), batch=5, max_new_tokens=12)
    found = made.generate(prompts)
    return [[*x.tokens, *([made.stop_ids[0]] if x.end == "stop" else [])] for x in found]


@pytest.mark.parametrize("name", CASES)
def test_nemo_s_models_in_and_out(name: str, nemo: Nemo, tmp_path: Path, record_property: Any) -> None:
    folder, rng = tmp_path / "model", np.random.default_rng(len(name))
    make(nemo, name, folder)
    config = config_of(folder, MESH, folder / "llm")
    vocabulary = config.model.llm.vocab_size
    made = SpeechDocuments(config, load_tokenizer(folder / "llm"), train=False)
    spoken = examples(rng, vocabulary, 1 if CASES[name].connector == "qformer" else 2)
    documents = [made(example) for example in spoken]
    assert all(isinstance(document, Document) for document in documents), documents
    audios = [[clip.samples for clip in example.clips] for example in spoken]
    prompts = some_prompts(rng)
    asked = requests(documents, audios, vocabulary) | questions(prompts, made, vocabulary)
    np.savez(tmp_path / "asked.npz", **asked)
    nemo("run", folder, tmp_path / "asked.npz", tmp_path / "found.npz")
    found = dict(np.load(tmp_path / "found.npz"))

    scores = load(folder, config).score(documents, every_token=True, top_k=vocabulary)
    worst = 0.0
    for c, of_document in enumerate(scores):
        want = found[f"log_probs.{c}"][of_document.positions - 1]
        got = np.zeros_like(want)
        np.put_along_axis(got, of_document.top_ids, of_document.top_log_probs, axis=1)
        worst = max(worst, float(np.abs(got - want).max()))
    record_property(f"{name}: log-probabilities", f"{worst:.1e}, {len(documents)} documents")
    assert worst <= 2e-5

    shapes, checkpoint = shapes_of(config), open_checkpoint(folder)
    table = [t for t in checkpoint.tensors(config.model, shapes) if f"grad.{t.name}" in found]
    of_norms = STORED.removesuffix("*")
    table = [t for t in table if not t.slices[0].name.startswith(of_norms)]
    want = arranged(table, {t.name: found[f"grad.{t.name}"] for t in table}, shapes)
    got = gradients(config, folder, documents)
    errors = relative_errors({key: got[key] for key in want}, want)
    assert want.keys() == {key for key in got if not key.startswith("mtp.")}
    record_property(f"{name}: gradients", f"{max(errors.values()):.1e}")
    assert max(errors.values()) <= 1e-4, max(errors, key=lambda key: errors[key])

    steps = equal_tokens(answers(config, folder, prompts), found)
    record_property(f"{name}: greedy answers", f"20 of 20, {steps} tokens")

    import_weights([str(folder)], tmp_path / "imported")
    dtype = CASES[name].dtype
    export_weights(tmp_path / "imported", tmp_path / "like", form="salm", like=folder, dtype=dtype)
    ours, theirs = tensors(tmp_path / "like"), tensors(folder)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == x.tobytes() for key, x in theirs.items() if ours[key].dtype == x.dtype)
    kept = {key for key in ours if ours[key].dtype != theirs[key].dtype}
    assert all("running_" in key for key in kept)
    record_property(f"{name}: export", f"{len(theirs) - len(kept)} of {len(theirs)} tensors bit for bit")
    exported = ["like"]
    if dtype == "float32":
        export_weights(tmp_path / "imported", tmp_path / "new", form="salm")
        exported.append("new")
    for out in exported:
        few = {
            key: x
            for key, x in asked.items()
            if key.split(".")[1] in "0123" and key.startswith(("tokens", "samples", "first"))
        }
        np.savez(tmp_path / "few.npz", **few)
        nemo("run", tmp_path / out, tmp_path / "few.npz", tmp_path / f"{out}.npz")
        again = dict(np.load(tmp_path / f"{out}.npz"))
        for c in range(4):
            np.testing.assert_allclose(again[f"log_probs.{c}"], found[f"log_probs.{c}"], atol=5e-6)
        nemo("check", tmp_path / out)


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_from_the_folder_alone_goes_back_to_nemo(
    name: str, nemo: Nemo, tmp_path: Path, record_property: Any
) -> None:
    """One command trains; NeMo opens the export and answers 20 prompts as the run does."""
    folder, rng = tmp_path / "model", np.random.default_rng(len(name))
    make(nemo, name, folder)
    vocabulary = model_config(folder).llm.vocab_size
    command = ["train", folder, "--data.manifest", write_manifest(tmp_path, vocabulary)]
    command += ["--workdir", tmp_path / "run", "--data.template", "plain", *SMALL]
    command += ["--data.prompt", "w005 {audio}"]  # the tokenizer knows no other words
    done = subprocess.run(
        [sys.executable, "-m", "jaxthd", *map(str, command)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    like: dict[str, Any] = {"form": "salm", "like": folder, "dtype": "float32"}
    export_weights(tmp_path / "run", tmp_path / "trained", **like)
    old, new = tensors(folder), tensors(tmp_path / "trained")
    assert old.keys() == new.keys()
    assert any(np.abs(new[key] - x).max() > 1e-3 for key, x in old.items() if x.ndim == 2)
    nemo("check", tmp_path / "trained")

    config = read_config(tmp_path / "run")
    prompts = some_prompts(rng)
    made = SpeechDocuments(config, load_tokenizer(config.data.tokenizer), train=False)
    np.savez(tmp_path / "asked.npz", **questions(prompts, made, vocabulary))
    nemo("run", tmp_path / "trained", tmp_path / "asked.npz", tmp_path / "found.npz")
    found = dict(np.load(tmp_path / "found.npz"))
    steps = equal_tokens(answers(config, tmp_path / "run", prompts), found)
    record_property(f"{name}, trained: greedy answers", f"20 of 20, {steps} tokens")
