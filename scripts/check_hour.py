"""Trains on one recording of an hour and transcribes it, at context 4 on simulated devices, not truncated.

    python scripts/check_hour.py shared/speech/asterisk_en/manifest.jsonl [--hours 1.0] [--steps 2]

The recording is those of the manifest one after the other, again and again until it is long enough; its
transcript is the first text. A tiny model is trained on it by `jaxthd train`, whose validation transcribes
it. Memory a device is what the compiler plans for a training step (memory_analysis) at context 1 and 4.
Nothing has run on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.data.audio.recordings import load_audio
from jaxthd.planning.compiled_step import measure
from jaxthd.run.startup import simulate_devices
from jaxthd.terminal.tables import Claim, conclude, show, size_text

ROOT = Path(__file__).parents[1]
RATE, SLOTS, RANKS = 16000, 256, 4
"""Samples a second; token slots beside those of the audio; context ranks."""
ENCODER = EncoderConfig(num_mels=16, layers=2, dim=32, heads=2, ffn_dim=64, subsampling_channels=8)
LLM = LLMConfig(
    pattern="M*-", dim=32, q_heads=2, kv_heads=1, head_dim=16, ffn_dim=64, mamba_heads=2, mamba_head_dim=16
)


def hour_config(folder: Path, seconds: float, steps: int, context: int) -> Config:
    """A run on the recording of `folder`, whose buffer holds it whole."""
    frames = 8 * -(-round(100 * seconds + 8 * seconds / ENCODER.chunk_seconds) // 8)
    manifest = str(folder / "hour.jsonl")
    data = DataConfig(
        manifest=(manifest,),
        validation_manifest=manifest,
        rows=1,
        capacity=8 * context * -(-(frames // 8 + SLOTS) // (8 * context)),
        max_documents=1,
        audio_capacity=frames,
        workers=0,
        prefetch=0,
    )
    train = TrainConfig(
        steps=steps, validate_every=steps, checkpoint_every=steps, validation_batches=1, max_new_tokens=8
    )
    model = ModelConfig(encoder=ENCODER, llm=LLM)
    return Config(mesh=MeshConfig(context=context), data=data, model=model, train=train)


def write_recording(manifest: Path, folder: Path, seconds: float) -> None:
    """hour.wav, and hour.jsonl, a manifest of it alone."""
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    clips = [load_audio(manifest.parent / line["audio_filepath"]) for line in lines]
    samples = np.resize(np.concatenate(clips), round(seconds * RATE))
    soundfile.write(folder / "hour.wav", samples, RATE)
    line = {"audio_filepath": "hour.wav", "duration": seconds, "text": lines[0]["text"]}
    (folder / "hour.jsonl").write_text(json.dumps(line) + "\n")


def run(folder: Path, seconds: float, steps: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Trains and validates; (metrics of the steps, keys of the skipped)."""
    file = folder / "hour.py"
    file.write_text(
        "from pathlib import Path\nfrom scripts.check_hour import hour_config\n\n"
        f"def config():\n    return hour_config(Path({str(folder)!r}), {seconds}, {steps}, {RANKS})\n"
    )
    words = ["-m", "jaxthd.train", "--config", str(file), "--workdir", str(folder / "run")]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    lines = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    skipped = folder / "run" / "skipped.jsonl"
    return lines, skipped.read_text().splitlines() if skipped.exists() else []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(argv)
    seconds = 3600 * options.hours
    simulate_devices(RANKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_recording(options.manifest, folder, seconds)
        metrics, skipped = run(folder, seconds, options.steps)
        found = [measure(hour_config(folder, seconds, options.steps, ranks)) for ranks in (1, RANKS)]
    heard = [line["audio_seconds"] for line in metrics if "audio_seconds" in line]
    rows = [[ranks, size_text(x.temporary)] for ranks, x in zip((1, RANKS), found, strict=True)]
    show("Memory of a training step besides state and batch", "context|a device", rows)
    ratio = found[0].temporary / found[1].temporary
    claims = [
        Claim(f"all {seconds:,.0f} s were trained on in each step: {heard}", min(heard) >= seconds - 1),
        Claim(f"{len(skipped)} documents were skipped", not skipped),
        Claim(f"a device of {RANKS} needs {1 / ratio:.0%} of the memory of one alone", ratio >= 3),
    ]
    conclude(claims, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
