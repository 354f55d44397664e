"""Adapts a published checkpoint and exports it: every command a user would run, one after the other.

    python scripts/check_adapting.py --manifest recordings/manifest.jsonl [--python-reference PYTHON]

1. A published checkpoint is made: a tiny random Nemotron-Omni folder, with a tokenizer made from the
   manifest's texts and a chat template.
2. jaxthd.train adapts it: the encoder is frozen, the LLM's attention and Mamba2 projections have LoRA, the
   adapter is trained; on --data x --tensor simulated devices.
3. jaxthd.evaluate runs, and jaxthd.generate for one recording.
4. jaxthd.convert exports; the export, read again, gives the same logits of a recording with its text. Where
   --python-reference names an interpreter with torch and transformers, the library must agree too.

Exits 1 unless the loss falls, frozen parameters stay bit-identical, evaluation and generation write the
expected output, and the comparisons hold (1e-4 of the logits' norm). Takes about three minutes.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from flax import nnx

from jaxthd.checkpoints.weights import Weights, load_weights, named_weights
from jaxthd.config import Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.data.sources.manifest import read_manifest
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.files.config_file import load_config
from jaxthd.files.jsonl import write_lines
from jaxthd.hf import nemotron_omni
from jaxthd.hf.export import export
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.blueprint import Blueprint
from jaxthd.terminal.tables import Claim, conclude

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<so_embedding>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = '''"""Adapting the published checkpoint beside this file."""

from pathlib import Path

from jaxthd.config import (
    BlockSizes,
    AdaptConfig, ComputeConfig, Config, DataConfig, EncoderConfig, MeshConfig, ModelConfig, TrainConfig
)
from jaxthd.hf.checkpoint import model_config

PUBLISHED = Path(__file__).with_name("published")


def config() -> Config:
    return Config(
        mesh=MeshConfig(data={data}, tensor={tensor}),
        data=DataConfig(
            manifest=({training!r},),
            validation_manifest={validation!r},
            tokenizer=str(PUBLISHED),
            template="chat_template",
            rows={data},
            capacity=512,
            audio_capacity=3200,
            max_documents=32,
            workers=0,
        ),
        model=model_config(PUBLISHED, model=ModelConfig(encoder=EncoderConfig(chunk_seconds=8.0))),
        compute=ComputeConfig(block_sizes=BlockSizes(attention=64)),
        adapt=AdaptConfig(
            freeze=("encoder.*",),
            lora_rank=8,
            lora_targets=("decoder.layers.attention.*", "decoder.layers.mamba.*"),
            lr_factors=("adapter=2.0",),
        ),
        train=TrainConfig(
            init_from=(str(PUBLISHED),),
            steps={steps},
            learning_rate=5e-3,
            warmup_steps=5,
            validate_every={steps},
            validation_batches=2,
            max_new_tokens=24,
            checkpoint_every={steps},
            trackers=(),
        ),
    )
'''


def write_published(folder: Path, texts: Sequence[str]) -> None:
    """Writes a tiny random checkpoint with its own tokenizer."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    llm = LLMConfig(
        pattern="ME*-M*",
        vocab_size=8 * math.ceil(tokenizer.get_vocab_size() / 8),
        dim=64,
        head_dim=16,
        ffn_dim=96,
        mamba_head_dim=16,
        mamba_state=16,
        mamba_dt_limit=(1e-30, math.inf),
        experts=4,
        expert_dim=32,
        shared_expert_dim=48,
    )
    encoder = EncoderConfig(layers=2, dim=48, ffn_dim=64, subsampling_channels=8)
    model = ModelConfig(encoder=encoder, llm=llm, adapter_dim=64)
    weights = named_weights(Weights(*jax.jit(lambda: Blueprint(Config(model=model)).initial_weights())()))
    arrays = {name: np.asarray(x) for name, x in weights.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    settings = {"audio_token_id": tokenizer.token_to_id(SPECIAL[-1])}
    take = lambda part: arrays[part.name][part.at]  # noqa: E731
    export(model, shapes, take, nemotron_omni.FAMILY, folder, settings=settings)
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "audio_token": SPECIAL[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | {"chat_template": TEMPLATE}))


def run(module: str, *options: Any) -> str:
    """Runs a command as a user does; returns its standard output."""
    command = [sys.executable, "-m", f"jaxthd.{module}", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def logits(config: Config, weights: Weights, document: Document) -> np.ndarray:
    """Logits [tokens, vocabulary] of one document alone, on one device."""
    batch, _ = pack_row(
        [document],
        capacity=-(-len(document) // 8) * 8,
        audio_capacity=document.mel_frames,
        num_mels=config.model.audio_encoder.num_mels,
        max_documents=1,
    )
    graph = Blueprint(config).graph

    @jax.jit
    def compute(weights: Weights, batch: Any) -> jax.Array:
        model = nnx.merge(graph, *weights)
        x_ND, _ = model.enter(batch, axes=(), train=False)
        x_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
        return model.hidden(x_ND) @ model.head[...].T

    return np.asarray(compute(weights, batch))[: len(document)]


def first_document(config: Config) -> Document:
    """A training document for whose clips the library inserts as many embeddings as jaxthd: no chunk is a
    multiple of 8 mel frames long.
    """
    examples, _ = read_manifest(config.data.manifest[0], "data.manifest", prompt=config.data.prompt)
    make = SpeechDocuments(config, load_tokenizer(config.data.tokenizer), train=False)
    for example in examples:
        document = make(example, 0)
        if isinstance(document, Document) and all(len(chunk) % 8 for chunk in document.chunks):
            return document
    raise AssertionError("every clip is a multiple of 80 ms long")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", type=Path, required=True, help="short recordings with texts")
    parser.add_argument("--python-reference", help="has torch and transformers")
    parser.add_argument("--folder", type=Path, help="where all is left; by default nothing is")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        claims = adapt(options, options.folder or Path(scratch))
    conclude(claims, check=True)


def adapt(options: argparse.Namespace, work: Path) -> list[Claim]:
    # --- the published checkpoint, and the data ---
    work.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in options.manifest.read_text().splitlines()]
    for line in lines:
        line["audio_filepath"] = str((options.manifest.parent / line["audio_filepath"]).resolve())
    lines = sorted((line for line in lines if line["duration"] < 6), key=lambda line: line["duration"])[:120]
    write_lines(work / "training.jsonl", lines[8:])
    write_lines(work / "validation.jsonl", lines[:8])
    write_published(work / "published", [line["text"] for line in lines])
    names = {name: str(work / f"{name}.jsonl") for name in ("training", "validation")}
    settings = {"data": options.data, "tensor": options.tensor, "steps": options.steps, **names}
    file, workdir = work / "adapt.py", work / "run"
    file.write_text(CONFIG.format(**settings))

    # --- train, evaluate, generate, export ---
    claims = []
    run("train", "--config", file, "--workdir", workdir)
    losses = [line["loss"] for line in read_metrics(workdir) if "loss" in line]
    claims.append(Claim(f"training loss {losses[0]:.2f} -> {losses[-1]:.2f}", losses[-1] < 0.9 * losses[0]))

    print(run("evaluate", "--config", file, "--weights", workdir, "--out", work / "evaluated"))
    hypotheses = (work / "evaluated" / "validation.jsonl").read_text().splitlines()
    claims.append(Claim(f"{len(hypotheses)} of 8 hypotheses written", len(hypotheses) == 8))

    audio = lines[0]["audio_filepath"]
    answered = work / "answers.jsonl"
    sampled = ("--max-new-tokens", 12, "--out", answered)
    said = run("generate", "--config", file, "--weights", workdir, "--audio", audio, *sampled)
    answer = json.loads(answered.read_text())
    claims.append(Claim(f"an answer of {len(answer['tokens'])} tokens: {said.strip()[:60]!r}", bool(said)))

    exported = work / "exported"
    print(run("convert", "export", workdir, "--out", exported, "--like", work / "published"))

    # --- compare the results ---
    config = replace(load_config(file), mesh=MeshConfig())
    plain = replace(config, adapt=type(config.adapt)())
    mesh = make_mesh(config.mesh)
    adapted = load_weights([workdir], Blueprint(config), mesh, partly=False)
    merged, original = (
        load_weights([work / folder], Blueprint(plain), mesh, partly=False)
        for folder in ("exported", "published")
    )
    before, after = (named_weights(w) for w in (original, adapted))
    frozen = [n for n in before if n.startswith(("encoder.", "decoder.", "embedding", "head"))]
    same = all(np.array_equal(before[n], after[n]) for n in frozen if "correction_bias" not in n)
    claims.append(Claim(f"{len(frozen)} frozen arrays are bit-identical", same))
    document = first_document(config)
    ours, theirs, old = (
        logits(c, w, document) for c, w in ((config, adapted), (plain, merged), (plain, original))
    )
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
    moved = float(np.linalg.norm(ours - old) / np.linalg.norm(ours))
    claims.append(Claim(f"logits of the export, read again: {error:.1e} (1e-4)", error <= 1e-4))
    claims.append(Claim(f"training moved them by {moved:.2f}", moved > 0.01))
    if options.python_reference:
        npz = work / "document.npz"
        (mels,) = document.chunks
        arrays = {"tokens.0": document.tokens.astype(np.int64), "mels.0": mels, "logits.0": ours}
        np.savez(npz, **arrays)  # type: ignore[arg-type]
        script = Path(__file__).parent / "references" / "read_back.py"
        command = [options.python_reference, str(script), str(exported), str(npz)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        told = json.loads(done.stdout)
        text = f"transformers' logits of the export: {told['error']:.1e} (1e-4)"
        claims.append(Claim(text, told["error"] <= 1e-4))
        lost = told["missing_keys"] + told["unexpected_keys"]
        claims.append(Claim(f"tensors it missed or did not know: {lost or 'none'}", not lost))
    return claims


if __name__ == "__main__":
    main()
