"""An audio front end of one's own: raw samples, of which 5 frames of 64 samples become 2 audio tokens.

python docs/examples/toy_front_end.py

It trains on 1 x 2 x 2 x 2 simulated devices (data, context, pipeline, tensor), goes on on 2 x 1 x 1 x 2, runs
describe, plan, estimate, score and generate, and compares packed documents with each alone.

Legend: S samples, F frames of a recording; A frames and E outputs on a device; W samples of a frame, D dim.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import soundfile
from flax import nnx
from jax import Array

from jaxthd import FrontEnd, Init, Piece, Segments, register_front_end
from jaxthd.__main__ import main as jaxthd
from jaxthd.config import ComputeConfig, Config, DataConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.config.values import DERIVED
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.layers import Linear
from jaxthd.parallel.params import applied
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.startup import simulate_devices
from jaxthd.train import train


@dataclass(frozen=True, kw_only=True)
class Waves(FrontEnd):
    """Frames of 64 samples in pieces of 70; a linear layer over each 5 frames gives 2 tokens."""

    title = "waves"
    frame_samples: ClassVar[int] = 64
    feature_settings = ("piece_frames",)
    kind: Annotated[Literal["waves"], DERIVED] = "waves"
    dim: int = 32
    """Dim of an output."""
    piece_frames: int = 70
    """Frames of a piece."""

    @property
    def width(self) -> int:
        return self.frame_samples

    @property
    def unit(self) -> tuple[int, int]:
        return 5, 2

    @property
    def longest(self) -> int:
        return self.piece_frames

    def pieces(self, samples: int) -> list[Piece]:
        frames = samples // self.frame_samples
        starts = range(0, frames, self.piece_frames)
        lengths = [min(self.piece_frames, frames - start) for start in starts]
        return [Piece(0, start, n, 0, -(-2 * n // 5)) for start, n in zip(starts, lengths, strict=True)]

    def features(self, samples: np.ndarray, dither: np.random.Generator | None) -> list[np.ndarray]:
        whole = samples[: len(samples) // self.width * self.width]
        return [whole.reshape(-1, self.width).astype(np.float32)]

    def build(self, init: Init, compute: ComputeConfig) -> "WavesEncoder":
        return WavesEncoder(self, init)


class WavesEncoder(nnx.Module):
    """A linear layer over 5 frames, GELU, and a linear layer of each output."""

    def __init__(self, front_end: Waves, init: Init) -> None:
        frames, outputs = front_end.unit
        self.frames = Linear(frames * front_end.width, outputs * front_end.dim, init, bias=True)
        self.outputs = Linear(front_end.dim, front_end.dim, init)
        self.keeps_gathered = True

    def __call__(
        self, features_AW: Array, mask_A: Array, pieces: Segments, **where: Any
    ) -> tuple[Array, dict[str, Any]]:
        x_EF = jnp.where(mask_A[:, None], features_AW, 0).reshape(len(pieces.ids) // 2, -1)
        x_ED = applied(self.frames, x_EF, keeps_gathered=True).reshape(len(pieces.ids), -1)
        y_ED = applied(self.outputs, jax.nn.gelu(x_ED), keeps_gathered=True)
        return jnp.where(pieces.valid[:, None], y_ED, 0), {}


register_front_end(Waves)


def write_recordings(folder: Path) -> Path:
    """Tones of 0.2 to 0.8 s, and a manifest of them with their names."""
    lines = []
    for n in range(32):
        time = np.arange(3200 + 331 * n) / 16000
        wave = 0.5 * np.sin(2 * np.pi * (400 if n % 2 else 1600) * time)
        soundfile.write(folder / f"{n}.wav", wave, 16000)
        text = f"a {'low' if n % 2 else 'high'} tone"
        lines.append({"audio_filepath": f"{n}.wav", "text": text, "duration": len(wave) / 16000})
    manifest = folder / "tones.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


def config(manifest: str = "tones.jsonl") -> Config:
    """A small hybrid with this front end, on 8 devices."""
    blocks = {"M": Mamba2(heads=4, head_dim=8, state=8), "*": Attention(heads=4, kv_heads=2, head_dim=8)}
    llm = LLMConfig(pattern="M*-M*-", vocab_size=300, dim=32, blocks={**blocks, "-": MLP(inner=64)})
    return Config(
        data=DataConfig(manifest=(manifest,), validation_manifest="", rows=4, max_documents=16, workers=2),
        model=ModelConfig(encoder=Waves(), llm=llm),
        mesh=MeshConfig(data=1, context=2, pipeline=2, tensor=2),
        train=TrainConfig(steps=20, warmup_steps=2, learning_rate=1e-2, microbatches=2, trackers=()),
    )


def log_probs(run: Path, manifest: Path, *settings: str) -> list[float]:
    """What `jaxthd score` gives each token of each document."""
    out = manifest.with_name(f"scores{len(settings)}.jsonl")
    jaxthd(["score", str(run), "--manifest", str(manifest), "--out", str(out), *settings])
    return [x for line in out.read_text().splitlines() for x in json.loads(line)["log_probs"]]


def main(folder: Path) -> None:
    simulate_devices(8)
    manifest, run = write_recordings(folder), folder / "run"
    train(config(str(manifest)), run)
    mesh = {"data": 2, "context": 1, "pipeline": 1, "tensor": 2}
    sizes = [word for axis, size in mesh.items() for word in (f"--mesh.{axis}", f"{size}")]
    jaxthd(["train", str(run), "--train.steps", "30", *sizes])
    losses = [line["loss"] for line in read_metrics(run)]
    assert len(losses) == 30, losses
    assert losses[-1] < 0.5 * losses[0], losses
    for command in ("describe", "plan", "estimate"):
        jaxthd([command, str(run)])
    jaxthd(["generate", str(run), "--audio", str(folder / "3.wav"), "--max-new-tokens", "8"])
    packed, alone = log_probs(run, manifest), log_probs(run, manifest, "--data.max-documents", "1")
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-5)
    print("ok")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
