"""Nemotron 3.5 Transcribe in and out: recordings of 0.3 s to 100 s, each document alone in transformers, here
packed on a mesh of all four axes.

    python -m pytest -m nightly tests/hf/test_transcribe_live.py --python-reference PYTHON

PYTHON has torch and transformers 5.24 (tests/references/transcribe_live.py). What is given are sound files, a
manifest and the folder, as a user has them.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.checkpoints.weights import Weights, load_model, named_weights
from jaxthd.config import Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.data.example import Clip, Example, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
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
from jaxthd.train import train
from tests.errors import relative_errors
from tests.hf.published import COMPUTE, arranged, shapes_of, tensors
from tests.waves import talk

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
SECONDS = (0.3, 40.0, 0.325, 61.7, 5.12, 40.005, 100.0, 12.3, 80.08)
MESH = MeshConfig(data=1, context=2, pipeline=2, tensor=2)
WORDS = {"hidden_size": 42, "num_attention_heads": 7, "vocab_size": 257, "blank_token_id": 256}
PUBLISHED: dict[str, Any] = {
    "audio_config": {
        "asr_config": {"num_mel_bins": 128, "hidden_size": 42, "num_attention_heads": 3},
        "diarization_config": {
            "audio_config": {"num_mel_bins": 128},
            "head_config": {"num_speakers": 8},
            "streaming_config": {
                "speaker_cache_length": 188,
                "num_speakers": 8,
                "prediction_score_threshold": 0.25,
                "latest_frames_score_boost": 0.05,
                "strong_boost_rate": 0.75,
                "weak_boost_rate": 1.5,
                "min_positive_scores_rate": 0.5,
            },
            "chunk_length": 500,
            "chunk_left_context": 50,
            "chunk_right_context": 50,
            "fifo_length": 40,
            "speaker_cache_update_period": 300,
        },
    },
    "word_timestamp_config": WORDS,
}
"""Chunks, cache and bands as published; dims are tiny."""
SHORT: dict[str, Any] = {
    "audio_config": {
        "diarization_config": {
            "chunk_length": 61,
            "chunk_left_context": 0,
            "chunk_right_context": 13,
            "fifo_length": 70,
            "speaker_cache_update_period": 17,
            "streaming_config": {"speaker_cache_length": 95, "speaker_cache_silence_frames_per_speaker": 0},
        },
        "speaker_activity_threshold": 0.4,
    },
    "word_timestamp_config": {"vocab_size": 257, "blank_token_id": 0},
}
"""The queue holds more than a chunk, and the cache fills over several."""
CASES: dict[str, dict[str, Any]] = {
    "as published": {"filters": "bfloat16", "form": "published", "dtype": "float32", "changes": PUBLISHED},
    "short chunks": {"filters": "float32", "form": "saved", "dtype": "float32", "changes": SHORT},
    "bfloat16": {"filters": "bfloat16", "form": "published", "dtype": "bfloat16", "changes": PUBLISHED},
}


class Library(NamedTuple):
    """transformers in another interpreter."""

    python: str

    def __call__(self, *words: Any) -> None:
        command = [self.python, "-m", "tests.references.transcribe_live", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert not done.returncode, done.stderr[-3000:]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Library:
    python = str(request.config.getoption("--python-reference"))
    needed = "from transformers import Nemotron3_5TranscribeConfig"
    if subprocess.run([python, "-c", needed], capture_output=True, check=False).returncode:
        pytest.skip("--python-reference names no interpreter with transformers 5.24")
    return Library(python)


def examples(folder: Path, rng: np.random.Generator, lengths: Sequence[float] = SECONDS) -> list[Example]:
    """A recording of each length with a transcript of two speakers."""
    found = []
    for n, seconds in enumerate(lengths):
        path = folder / f"{n}.wav"
        soundfile.write(path, talk(n, round(16000 * seconds), 5), 16000, subtype="PCM_16")
        words = "".join(map(chr, rng.integers(97, 123, rng.integers(1, 30))))
        answer = f"<spk:0>{words[::2]} <spk:{n % 8}>{words}"
        found.append(Example(f"{n}", (Turn("user", ("Say: ", Clip(path))), Turn("assistant", (answer,)))))
    return found


def config_of(folder: Path) -> Config:
    data = DataConfig(
        tokenizer=str(folder),
        template="chat_template",
        capacity=2048,
        audio_capacity=28_000,
        max_documents=16,
        rows=2,
        workers=0,
        validation_manifest="",
    )
    return Config(
        mesh=MESH, model=model_config(folder), data=data, compute=COMPUTE, train=TrainConfig(microbatches=2)
    )


def with_one_placeholder(document: Document) -> np.ndarray:
    first = np.flatnonzero(document.is_audio)[0]
    return document.tokens[~document.is_audio | (np.arange(len(document)) == first)]


def asked_of(
    documents: Sequence[Document], prompts: Sequence[Document], clips: Sequence[Clip]
) -> dict[str, Any]:
    """What the library is asked: documents, then prompts, with their recordings."""
    asked: dict[str, Any] = {}
    for c, document in enumerate(documents):
        tokens = with_one_placeholder(document)
        supervised = int(document.supervised.sum())
        assert document.supervised[-supervised - 1 : -1].all(), "a line break follows"
        asked |= {f"tokens.{c}": tokens[:-1], f"first.{c}": len(tokens) - 1 - supervised}
    for p, document in enumerate(prompts):
        asked[f"prompt.{p}"] = with_one_placeholder(document)
    names = [f"samples.{c}" for c in range(len(documents))] + [f"sound.{p}" for p in range(len(prompts))]
    return asked | {n: soundfile.read(x.path, dtype="float32")[0] for n, x in zip(names, clips, strict=True)}


def gradients(config: Config, folder: Path, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """The gradients of the sum of -log p of the supervised tokens, packed in two rows, by jaxthd's names."""
    sizes: dict[str, Any] = {"capacity": 4096, "audio_capacity": 28_000, "max_documents": 16}
    ranks = {"context": config.mesh.context, "audio_ranks": config.mesh.audio_ranks}
    rows = [documents[::2], documents[1::2]]
    packed = [pack_row(row, **sizes, **ranks, front_end=config.model.audio_encoder) for row in rows]
    batch = concatenate_rows([row for row, _ in packed])
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    held = load_model([folder], blueprint, mesh)
    got = jax.jit(loss_and_gradient(blueprint, mesh))(*held, put_batch(batch, mesh))
    count = sum(report.supervised_tokens for _, report in packed)
    own = from_stages(jax.device_get(got.gradients), blueprint.stages)
    named = named_weights(Weights(own, {})).items()
    return {name: count * np.asarray(x) for name, x in named if x is not None}


def answers(config: Config, weights: Path, prompts: Sequence[Example]) -> list[list[int]]:
    """Greedy answers, with the token that ends each."""
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    held = load_model([weights], blueprint, mesh)
    made = Generator(config, mesh, *held, batch=5, max_new_tokens=12)
    found = made.generate(prompts)
    return [[*x.tokens, *([made.stop_ids[0]] if x.end == "stop" else [])] for x in found]


def equal_steps(found: dict[str, np.ndarray], ours: Sequence[Sequence[int]]) -> int:
    """Steps that agree, each answer until the first whose two best are within 1e-4. Asserts that they do."""
    steps = 0
    for p, answer in enumerate(ours):
        close = np.flatnonzero(found[f"gaps.{p}"] < 1e-4)
        until = int(close[0]) if len(close) else len(found[f"gaps.{p}"])
        assert list(answer[:until]) == found[f"answer.{p}"][:until].tolist(), p
        steps += until
    return steps


def compare_scores(
    config: Config, folder: Path, documents: Sequence[Document], found: dict[str, np.ndarray]
) -> float:
    """The largest difference of a log-probability, of all tokens at every scored position."""
    vocabulary, worst = config.model.llm.vocab_size, 0.0
    for c, of_document in enumerate(
        load(folder, config).score(documents, every_token=True, top_k=vocabulary)
    ):
        want = found[f"log_probs.{c}"]
        inside = of_document.positions <= len(want)
        got = np.zeros((len(of_document.positions), vocabulary), np.float32)
        np.put_along_axis(got, of_document.top_ids, of_document.top_log_probs, axis=1)
        difference = np.abs(got[inside] - want[of_document.positions[inside] - 1])
        worst = max(worst, float(difference.max()))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_transcribe_in_and_out(name: str, library: Library, tmp_path: Path, record_property: Any) -> None:
    case, folder, rng = CASES[name], tmp_path / "model", np.random.default_rng(len(name))
    (tmp_path / "settings.json").write_text(json.dumps({**case, "seed": 3}))
    library("make", folder, tmp_path / "settings.json")
    config = config_of(folder)
    spoken = examples(tmp_path, rng)
    made = SpeechDocuments(config, load_tokenizer(folder), train=False)
    documents = [made(example) for example in spoken]
    assert all(isinstance(document, Document) for document in documents), documents
    asking = [Example(f"p{n}", (Turn("user", (f"{n}: ", spoken[n % 5].clips[0])),)) for n in range(20)]
    clips = [clip for example in (*spoken, *asking) for clip in example.clips]
    asked = asked_of(documents, [made.prompt(example) for example in asking], clips)
    np.savez(tmp_path / "asked.npz", **asked)
    library("run", folder, tmp_path / "asked.npz", tmp_path / "found.npz")
    found = dict(np.load(tmp_path / "found.npz"))
    record_property(f"{name}: least distance of a choice", f"{float(found['margin']):.1e}")

    worst = compare_scores(config, folder, documents, found)
    record_property(f"{name}: log-probabilities", f"{worst:.1e}, {len(documents)} documents")
    assert worst <= 2e-5

    shapes, checkpoint = shapes_of(config), open_checkpoint(folder)
    table = [t for t in checkpoint.tensors(config.model, shapes) if f"grad.{t.name}" in found]
    want = arranged(table, {t.name: found[f"grad.{t.name}"] for t in table}, shapes)
    got = gradients(config, folder, documents)
    errors = relative_errors(got, {key: want[key] for key in got})
    record_property(f"{name}: gradients", f"{max(errors.values()):.1e}")
    assert max(errors.values()) <= 1e-4, max(errors, key=lambda key: errors[key])
    assert all(not want[key].any() for key in want.keys() - got.keys()), "the diarizer and the head have none"

    steps = equal_steps(found, answers(config, folder, asking))
    record_property(f"{name}: greedy answers", f"20, {steps} tokens")

    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "like", like=folder, dtype=case["dtype"])
    ours, theirs = tensors(tmp_path / "like"), tensors(folder)
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == x.tobytes() for key, x in theirs.items())
    unread = sum("mtp" in key or "_extra_state" in key for key in theirs)
    record_property(f"{name}: export", f"{len(theirs)} tensors bit for bit, {unread} of them not read")
    if case["dtype"] == "float32":
        check_trained(config, folder, spoken, asking, asked, tmp_path, library, record_property)


LONG = (100.0, 85.3, 143.7, 0.3, 121.0, 41.2)
"""Seconds. Most of them fill a cache more than once, after which some outputs are in it for several speakers:
their scores are equal."""


@pytest.mark.parametrize("seed", range(4))
def test_full_caches_of_other_models(
    seed: int, library: Library, tmp_path: Path, record_property: Any
) -> None:
    """Sizes of the diarizer and its cache are drawn, for every other seed as published."""
    folder, rng = tmp_path / "model", np.random.default_rng(seed)
    changes = PUBLISHED if seed % 2 == 0 else drawn(rng)
    case = {"filters": "bfloat16", "form": "published", "dtype": "float32", "changes": changes}
    (tmp_path / "settings.json").write_text(json.dumps({**case, "seed": seed}))
    library("make", folder, tmp_path / "settings.json")
    config = config_of(folder)
    made = SpeechDocuments(config, load_tokenizer(folder), train=False)
    spoken = examples(tmp_path, rng, LONG)
    documents = [made(example) for example in spoken]
    assert all(isinstance(document, Document) for document in documents), documents
    asked = asked_of(documents, [], [clip for example in spoken for clip in example.clips])
    np.savez(tmp_path / "asked.npz", **{k: x for k, x in asked.items() if not k.startswith("first")})
    library("run", folder, tmp_path / "asked.npz", tmp_path / "found.npz")
    found = dict(np.load(tmp_path / "found.npz"))
    worst = compare_scores(config, folder, documents, found)
    record_property(f"{seed}: log-probabilities", f"{worst:.1e}, margin {float(found['margin']):.1e}")
    assert worst <= 2e-5


def drawn(rng: np.random.Generator) -> dict[str, Any]:
    """Sizes of a diarizer whose cache is full after some seconds."""
    speakers, chunk = int(rng.integers(2, 6)), int(rng.integers(40, 200))
    streaming = {
        "num_speakers": speakers,
        "speaker_cache_length": speakers * int(rng.integers(4, 24)) + int(rng.integers(speakers)),
        "speaker_cache_silence_frames_per_speaker": int(rng.integers(2)),
    }
    sizes = {
        "streaming_config": streaming,
        "head_config": {"num_speakers": speakers},
        "chunk_length": chunk,
        "chunk_left_context": int(rng.integers(30)),
        "chunk_right_context": int(rng.integers(30)),
        "fifo_length": int(rng.integers(1, 60)),
        "speaker_cache_update_period": int(rng.integers(1, chunk)),
    }
    return {"audio_config": {"diarization_config": sizes}}


def check_trained(
    config: Config,
    folder: Path,
    spoken: Sequence[Example],
    asking: Sequence[Example],
    asked: dict[str, Any],
    scratch: Path,
    library: Library,
    record_property: Any,
) -> None:
    """Trains a few steps, exports; the library opens the export and answers what jaxthd answers."""
    lines = [
        {"audio_filepath": str(x.clips[0].path), "text": x.text, "duration": seconds}
        for x, seconds in zip(spoken, SECONDS, strict=True)
    ]
    (scratch / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = replace(config.data, manifest=(str(scratch / "train.jsonl"),), prompt="Say: {audio}")
    steps = TrainConfig(steps=6, warmup_steps=1, learning_rate=1e-2, init_from=(str(folder),), trackers=())
    run = scratch / "run"
    train(replace(config, data=data, train=replace(steps, microbatches=2)), run)
    for like in (folder, None):
        out = scratch / f"trained-{like is not None}"
        export_weights(run, out, like=like)
        np.savez(scratch / "few.npz", **{k: x for k, x in asked.items() if k.startswith(("prompt", "sound"))})
        if like is None:  # the processor's files go along with an original alone
            for file in ("processor_config.json",):
                (out / file).write_text((folder / file).read_text())
        library("run", out, scratch / "few.npz", scratch / "few-found.npz")
        steps_equal = equal_steps(dict(np.load(scratch / "few-found.npz")), answers(config, run, asking))
        record_property(f"trained, exported {'like' if like else 'new'}", f"20 answers, {steps_equal} tokens")
