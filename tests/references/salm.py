"""Writes tests/references/salm*.npz: tiny random speech LLMs of NeMo itself, as nemo_models.py says.

    python -m tests.references.salm [--checkpoints FOLDER]
    python -m tests.references.salm --read-back EXPORTED REFERENCE.npz

Needs nemo-toolkit[asr] 3.0 and peft; about a minute. Float32, evaluation mode, one document at a time: a
prompt, a recording, a text. Keys (c is a document's number):
    config, llm         config.json, and that of the LLM
    weight.NAME         every tensor on disk
    samples.c           int16 [samples], the recording times 2^15
    tokens.c            int64 [tokens], with one audio tag
    logits.c            [positions, vocabulary], with a position for each embedding of the recording
    loss                sum of -log p(token | those before) over the tokens of the texts
    grad.NAME           gradient of loss, by tensor on disk
    margin              as in text_models.py
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from tests.references.common import Arrays, arguments, write
from tests.references.nemo_models import VOCABULARY, Peer, settings

DOCUMENTS = ((3, 4800, 5), (1, 13707, 9), (2, 10241, 4))
"""(prompt tokens, samples, text tokens) of each document: 30, 85 and 64 mel frames."""


class Case(NamedTuple):
    """llm, connector, encoder, changes: as `settings` takes them."""

    llm: str
    connector: str
    encoder: dict[str, Any]
    changes: dict[str, Any]


PEFT = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5, "lora_dropout": 0.01}
CASES = {
    "salm": Case("qwen3", "identity", {}, {"lora": {**PEFT, "target_modules": ["q_proj", "v_proj"]}}),
    "salm_layers": Case(
        "qwen3_untied",
        "layers",
        {"n_layers": 3, "modality_adapter": {"target_layer_ids": [1, -3], "include_final_output": False}},
        {"encoder_chunk_size_seconds": 0.3013},
    ),
    "salm_qformer": Case(
        "nemotron",
        "qformer",
        {"d_model": 6, "conv_kernel_size": 3, "preprocessor": {"pad_to": 16}},
        {"encoder_chunk_size_seconds": 0.6},
    ),
    "salm_automodel": Case(
        "nemotron_dense",
        "identity",
        {"n_layers": 1, "use_bias": False, "xscaling": False},
        {"lora": {"dim": 2, "alpha": 3, "target_modules": ["q_proj", "out_proj"]}},
    ),
}


def waveform(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Speech is loud and quiet by turns, and lower notes are louder."""
    noise = np.cumsum(rng.standard_normal(samples)) * 0.02 + rng.standard_normal(samples) * 0.1
    loudness = 0.3 + 0.2 * np.sin(np.arange(samples) / 900)
    return np.float32(np.round(np.clip(noise * loudness, -0.99, 0.99) * 2**11) / 2**11)


def reference(case: Case, seed: int, folder: Path) -> Arrays:
    """All arrays of an archive. folder: where the checkpoint is saved."""
    nemo, llm = settings(case.llm, case.connector, encoder=case.encoder, **case.changes)
    peer = Peer.make(folder, nemo, llm, seed)
    peer.save(folder)
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {
        "config": np.asarray((folder / "config.json").read_text()),
        "llm": np.asarray((folder / "llm" / "config.json").read_text()),
    }
    out |= {f"weight.{k}": x.numpy() for k, x in load_file(folder / "model.safetensors").items()}
    loss = torch.zeros(())
    for c, (prompt, samples, text) in enumerate(DOCUMENTS):
        words = rng.integers(4, VOCABULARY, prompt + text).tolist()
        tokens, recording = [*words[:prompt], peer.tag, *words[prompt:]], waveform(rng, samples)
        logits = peer.logits(tokens, [recording])
        log_probs = logits[-text - 1 : -1].log_softmax(-1)
        loss = loss - log_probs.gather(1, torch.tensor(words[prompt:])[:, None]).sum()
        out |= {f"tokens.{c}": np.asarray(tokens), f"samples.{c}": np.int16(recording * 2**15)}
        out[f"logits.{c}"] = logits.detach().numpy()
    loss.backward()
    out |= {f"grad.{k}": x for k, x in peer.gradients().items()}
    return out | {"loss": loss.detach().numpy(), "margin": np.asarray(min(peer.margins, default=np.inf))}


def read_back(folder: Path, npz: Path) -> None:
    """Prints JSON: the largest relative error of a document's logits by an export."""
    arrays, peer, worst = np.load(npz), Peer.open(folder), 0.0
    with torch.no_grad():
        for c in range(len(DOCUMENTS)):
            want = arrays[f"logits.{c}"]
            recording = np.float32(arrays[f"samples.{c}"] / 2**15)
            found = peer.logits(arrays[f"tokens.{c}"].tolist(), [recording]).numpy()
            worst = max(worst, float(np.linalg.norm(found - want) / np.linalg.norm(want)))
    print(json.dumps({"error": worst}))


def main() -> None:
    if "--read-back" in sys.argv:
        return read_back(*map(Path, sys.argv[2:]))
    options = arguments(__doc__)
    for name, case in CASES.items():
        write(name, options, lambda seed, folder, case=case: reference(case, seed, folder))  # type: ignore[misc]


if __name__ == "__main__":
    main()
