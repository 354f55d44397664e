"""Trains on one recording of an hour and transcribes it, at context 4 on simulated devices, not truncated.

    python scripts/check_hour.py ../shared/speech/asterisk_en/manifest.jsonl [--hours 0.02]

The recording is those of the manifest one after the other, again and again until it is long enough; its
reference is the first text. `jaxthd train` trains a tiny model on it, and its validation transcribes two
recordings: the same one, and one whose first minute is played backwards. Their losses differ if an
answer depends on what is farthest from it. Memory of a device is what the compiler plans for a training step
(memory_analysis), at context 1 and 4. Nothing of this has run on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.files.jsonl import read_lines
from jaxthd.planning.compiled_step import measure
from jaxthd.run.startup import simulate_devices
from jaxthd.terminal.tables import Claim, conclude, show, size_text

ROOT = Path(__file__).parents[1]
RATE, SLOTS, RANKS = 16000, 256, 4
"""Samples a second; token slots besides those of the audio; context ranks."""
CHANGED = 60
"""Seconds at the beginning of the second validation recording that are played backwards."""
ENCODER = EncoderConfig(num_mels=16, layers=2, dim=32, heads=2, ffn_dim=64, subsampling_channels=8)
LLM = LLMConfig(
    pattern="M*-", dim=32, q_heads=2, kv_heads=1, head_dim=16, ffn_dim=64, mamba_heads=2, mamba_head_dim=16
)


class Trained(NamedTuple):
    """What a run wrote: lines of metrics.jsonl and of hypotheses.jsonl, and of skipped.jsonl."""

    metrics: list[dict[str, Any]]
    hypotheses: list[dict[str, Any]]
    skipped: list[dict[str, Any]]


def hour_config(folder: Path, seconds: float, context: int, steps: int = 2) -> Config:
    """A run on the recording in `folder`, with a buffer that holds all of it."""
    frames = 8 * -(-round(100 * seconds + 8 * seconds / ENCODER.chunk_seconds) // 8)
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


def write_recordings(manifest: Path, folder: Path, seconds: float) -> None:
    """whole.wav and changed.wav, each with a manifest of its own."""
    lines = read_lines(manifest)
    clips = [load_audio(manifest.parent / line["audio_filepath"]) for line in lines]
    samples = np.resize(np.concatenate(clips), round(seconds * RATE))
    start, rest = np.split(samples, [CHANGED * RATE])
    for name, found in (("whole", samples), ("changed", np.concatenate([start[::-1], rest]))):
        soundfile.write(folder / f"{name}.wav", found, RATE)
        line = {"audio_filepath": f"{name}.wav", "duration": seconds, "text": lines[0]["text"]}
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")


def train(folder: Path, seconds: float) -> Trained:
    """Runs `jaxthd train` in a process of its own."""
    file, workdir = folder / "hour.py", folder / "run"
    file.write_text(
        "from pathlib import Path\nfrom scripts.check_hour import hour_config\n\n"
        f"def config():\n    return hour_config(Path({str(folder)!r}), {seconds}, {RANKS})\n"
    )
    words = ["-m", "jaxthd.train", "--config", str(file), "--workdir", str(workdir)]
    subprocess.run(
        [sys.executable, *words], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    names = ("metrics.jsonl", "hypotheses.jsonl", "skipped.jsonl")
    return Trained(*(read_lines(workdir / name) for name in names))


def claims_of(trained: Trained, seconds: float) -> list[Claim]:
    steps = [line["audio_seconds"] for line in trained.metrics if "audio_seconds" in line]
    transcribed = [line["audio_seconds"] for line in trained.hypotheses]
    last = [line for line in trained.metrics if "validation_whole_loss" in line][-1]
    losses = last["validation_whole_loss"], last["validation_changed_loss"]
    apart = abs(losses[0] - losses[1]) / losses[0]
    return [
        Claim(
            f"all {seconds:,.0f} s are in each of {len(steps)} training steps",
            len(steps) == 2 and min(steps) >= seconds - 1,
        ),
        Claim(
            f"all {seconds:,.0f} s are before each of {len(transcribed)} transcripts",
            len(transcribed) == 2 and min(transcribed) >= seconds - 1,
        ),
        Claim(f"its first {CHANGED} s change the loss by {apart:.1e} of it, over 1e-6", apart > 1e-6),
        Claim(f"{len(trained.skipped)} documents were skipped", not trained.skipped),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path, help="recordings that the long one is made of")
    parser.add_argument("--hours", type=float, default=1.0, help="its length; memory is judged from 1 on")
    options = parser.parse_args(argv)
    seconds, start = 3600 * options.hours, time.perf_counter()
    simulate_devices(RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recordings(options.manifest, folder, seconds)
        trained = train(folder, seconds)
        one, several = (measure(hour_config(folder, seconds, ranks)).temporary for ranks in (1, RANKS))
    rows = [[ranks, size_text(found)] for ranks, found in ((1, one), (RANKS, several))]
    show("Memory of a training step besides state and batch", "context|a device", rows)
    print(f"{options.hours:g} hours of audio took {(time.perf_counter() - start) / 60:.1f} minutes")
    claims, share = claims_of(trained, seconds), several / one
    if options.hours >= 1:
        text = f"a device of {RANKS} needs {share:.0%} of the memory of one alone"
        claims.append(Claim(text, share <= 0.3))
    conclude(claims, check=True)


if __name__ == "__main__":
    main()
