"""Adapting a published checkpoint with its tokenizer and template: every command that a user would run."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile
from flax import nnx

from jaxthd.checkpoints.weights import Weights, load_weights, named_weights
from jaxthd.config import AdaptConfig, Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.config_file import load_config
from jaxthd.files.jsonl import read_lines, write_lines
from jaxthd.hf import nemotron_omni
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.blueprint import Blueprint
from tests.data.sets import read_manifest
from tests.hf.folders import SPECIAL, train_tokenizer, vocabulary_of, write_tokenizer, write_weights

CONFIG = '''"""Adapting the published checkpoint beside this file."""

from pathlib import Path

from jaxthd.config import (
    AdaptConfig, Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig, TrainConfig
)
from jaxthd.hf.checkpoint import model_config

PUBLISHED = Path(__file__).with_name("published")


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=1, tensor=2),
        data=DataConfig(
            manifest=("{training}",),
            validation_manifest="{validation}",
            tokenizer=str(PUBLISHED),
            template="chat_template",
            rows=1,
            capacity=512,
            audio_capacity=3200,
            max_documents=32,
            workers=0,
        ),
        model=model_config(PUBLISHED, model=ModelConfig(encoder=EncoderConfig(chunk_seconds=8.0))),
        adapt=AdaptConfig(
            freeze=("encoder.*",),
            lora_rank=8,
            lora_targets=("decoder.layers.attention.*", "decoder.layers.mamba.*"),
            lr_factors=("adapter=2.0",),
        ),
        train=TrainConfig(
            init_from=(str(PUBLISHED),),
            steps=8,
            learning_rate=5e-3,
            warmup_steps=5,
            validate_every=8,
            validation_batches=2,
            max_new_tokens=24,
            checkpoint_every=8,
            trackers=(),
        ),
    )
'''


def write_published(folder: Path, texts: Sequence[str]) -> None:
    """Writes a tiny random checkpoint with its own tokenizer."""
    tokenizer = train_tokenizer(texts)
    llm = LLMConfig(
        pattern="ME*-M*",
        vocab_size=vocabulary_of(tokenizer),
        dim=64,
        blocks={
            "*": Attention(head_dim=16),
            "-": MLP(inner=96),
            "M": Mamba2(head_dim=16, state=16, dt_limit=(1e-30, math.inf)),
            "E": MoE(experts=4, inner=32, shared_inner=48),
        },
    )
    encoder = EncoderConfig(layers=2, dim=48, ffn_dim=64, subsampling_channels=8)
    model = ModelConfig(encoder=encoder, llm=llm, adapter_dim=64)
    settings = {"audio_token_id": tokenizer.token_to_id(SPECIAL[-1])}
    write_weights(model, nemotron_omni.FAMILY, folder, settings)
    write_tokenizer(tokenizer, folder, audio_token=SPECIAL[-1])


def run(module: str, *options: Any) -> str:
    """Runs a command as a user does; returns its standard output."""
    command = [sys.executable, "-m", f"jaxthd.{module}", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


def logits(config: Config, weights: Weights, document: Document) -> np.ndarray:
    """Logits [tokens, vocabulary] of one document alone, on one device."""
    batch, _ = pack_row(
        [document],
        capacity=-(-len(document) // 8) * 8,
        audio_capacity=config.model.audio_encoder.taken(document.pieces),
        front_end=config.model.audio_encoder,
        max_documents=1,
    )
    graph = Blueprint(config).graph

    @jax.jit
    def compute(weights: Weights, batch: Any) -> jax.Array:
        model = nnx.merge(graph, *weights)
        x_ND, _ = model.embed(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        return model.hidden(x_ND) @ model.head[...].T

    return np.asarray(compute(weights, batch))[: len(document)]


def write_recordings(folder: Path) -> list[dict[str, Any]]:
    """The lines of 24 recordings of noise, whose lengths are no multiples of 80 ms."""
    rng, lines = np.random.default_rng(0), []
    for number in range(24):
        seconds, path = 0.31 + 0.05 * number, folder / f"{number}.wav"
        soundfile.write(path, rng.normal(0, 0.1, round(16000 * seconds)), 16000)
        text = " ".join(rng.choice(("zero", "one", "two", "three", "four", "five"), size=1 + number % 4))
        lines.append({"audio_filepath": str(path), "duration": round(seconds, 3), "text": text})
    return lines


@pytest.mark.exhaustive
def test_a_published_checkpoint_is_adapted_and_handed_on(tmp_path: Path):
    """The encoder frozen, LoRA on the decoder, tensor parallel. The loss falls, frozen parameters stay as
    they are, and the export, read again, gives the same logits.
    """
    lines, file, workdir = write_recordings(tmp_path), tmp_path / "adapt.py", tmp_path / "run"
    sets = {"training": tmp_path / "training.jsonl", "validation": tmp_path / "validation.jsonl"}
    write_lines(sets["training"], lines[8:])
    write_lines(sets["validation"], lines[:8])
    write_published(tmp_path / "published", [line["text"] for line in lines])
    file.write_text(CONFIG.format(**sets))
    given = ("--config", file, "--weights", workdir)
    run("train", "--config", file, "--workdir", workdir)
    run("evaluate", *given, "--out", tmp_path / "evaluated")
    sampled = ("--max-new-tokens", 12, "--out", tmp_path / "answers.jsonl")
    assert run("generate", *given, "--audio", lines[0]["audio_filepath"], *sampled)
    run("convert", "export", workdir, "--out", tmp_path / "exported", "--like", tmp_path / "published")

    losses = [line["loss"] for line in read_metrics(workdir) if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert len(read_lines(tmp_path / "evaluated" / "validation.jsonl")) == 8
    assert read_lines(tmp_path / "answers.jsonl")[0]["tokens"]
    config = replace(load_config(file), mesh=MeshConfig())
    plain, mesh = replace(config, adapt=AdaptConfig()), make_mesh(config.mesh)
    adapted, merged, original = (
        load_weights([tmp_path / folder], Blueprint(each), mesh, partly=False)
        for folder, each in (("run", config), ("exported", plain), ("published", plain))
    )
    before, after = named_weights(original), named_weights(adapted)
    frozen = [n for n in before if n.startswith(("encoder.", "decoder.", "embedding", "head"))]
    assert all(np.array_equal(before[n], after[n]) for n in frozen if "correction_bias" not in n)
    examples, _ = read_manifest(config.data.manifest[0], prompt=config.data.prompt)
    make = SpeechDocuments(config, load_tokenizer(config.data.tokenizer), train=False)
    document = make(next(iter(examples)), 0)
    assert isinstance(document, Document)
    ours, theirs, old = (
        logits(c, w, document) for c, w in ((config, adapted), (plain, merged), (plain, original))
    )
    assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(ours)
    assert np.linalg.norm(ours - old) > 0.01 * np.linalg.norm(ours)
