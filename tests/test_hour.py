"""An hour of audio in one document: trained on and transcribed at context 4, not truncated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.files.jsonl import read_lines
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.planning.compiled_step import measure

ROOT = Path(__file__).parents[1]
SECONDS = 3600
RATE, SLOTS, RANKS = 16000, 256, 4
"""Samples a second; token slots besides those of the audio; context ranks."""
CHANGED = 60
"""Seconds at the beginning of the second validation recording that are played backwards."""
ENCODER = EncoderConfig(num_mels=16, layers=2, dim=32, heads=2, ffn_dim=64, subsampling_channels=8)
LLM = LLMConfig(
    pattern="M*-",
    dim=32,
    blocks={
        "*": Attention(heads=2, kv_heads=1, head_dim=16),
        "-": MLP(inner=64),
        "M": Mamba2(heads=2, head_dim=16),
    },
)


def hour_config(folder: Path, context: int, steps: int = 2) -> Config:
    """A run on the recording in `folder`, with a buffer that holds all of it."""
    frames = 8 * -(-round(100 * SECONDS + 8 * SECONDS / ENCODER.chunk_seconds) // 8)
    data = DataConfig(
        manifest=(str(folder / "whole.jsonl"),),
        validation_manifest=(str(folder / "whole.jsonl"), str(folder / "changed.jsonl")),
        rows=1,
        capacity=8 * context * -(-(frames // 8 + SLOTS) // (8 * context)),
        max_documents=1,
        audio_capacity=frames,
        packing_bins=1,
        workers=0,
    )
    train = TrainConfig(
        steps=steps,
        warmup_steps=0,
        validate_every=steps,
        checkpoint_every=steps,
        validation_batches=1,
        max_new_tokens=8,
    )
    return Config(
        mesh=MeshConfig(context=context), data=data, model=ModelConfig(encoder=ENCODER, llm=LLM), train=train
    )


def write_recordings(folder: Path) -> None:
    """whole.wav and changed.wav, each with a manifest of its own."""
    rng = np.random.default_rng(0)
    loudness = np.repeat(rng.uniform(0.01, 0.2, 10 * SECONDS), RATE // 10)
    samples = (rng.standard_normal(SECONDS * RATE, np.float32) * loudness).astype(np.float32)
    start, rest = np.split(samples, [CHANGED * RATE])
    for name, sound in (("whole", samples), ("changed", np.concatenate([start[::-1], rest]))):
        soundfile.write(folder / f"{name}.wav", sound, RATE)
        line = {"audio_filepath": f"{name}.wav", "duration": SECONDS, "text": "one two three"}
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")


def lines(folder: Path, name: str, field: str) -> list[Any]:
    """The field's values in a file of the run."""
    return [line[field] for line in read_lines(folder / "run" / f"{name}.jsonl") if field in line]


@pytest.mark.nightly
def test_a_recording_of_an_hour_is_trained_on_and_transcribed_as_a_whole(tmp_path: Path, record_property):
    """Two recordings are transcribed: the one trained on, and one whose first minute is played backwards.
    Their losses differ only if an answer depends on what is farthest from it. Memory is what the compiler
    plans.
    """
    write_recordings(tmp_path)
    file = tmp_path / "hour.py"
    file.write_text(
        "from pathlib import Path\nfrom tests.test_hour import hour_config\n\n"
        f"def config():\n    return hour_config(Path({str(tmp_path)!r}), {RANKS})\n"
    )
    words = ["-m", "jaxthd.train", "--config", str(file), "--workdir", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, *words], check=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    for name, steps in (("metrics", 2), ("hypotheses", 2)):
        heard = lines(tmp_path, name, "audio_seconds")
        assert len(heard) == steps
        assert min(heard) >= SECONDS - 1
    assert not read_lines(tmp_path / "run" / "skipped.jsonl")
    losses = [lines(tmp_path, "metrics", f"validation_{name}_loss")[-1] for name in ("whole", "changed")]
    apart = abs(losses[0] - losses[1]) / losses[0]
    one, several = (measure(hour_config(tmp_path, ranks)).temporary for ranks in (1, RANKS))
    record_property("apart", f"{apart:.1e}")
    record_property("share", f"{100 * several / one:.0f}%")
    assert apart > 1e-6
    assert several <= 0.3 * one
