"""A decoder block of one's own: an exponential moving average of each document, with a learnt rate.

python docs/examples/toy_block.py

It trains on 1 x 2 x 2 x 2 simulated devices (data, context, pipeline, tensor), goes on on 2 x 1 x 1 x 2, runs
describe, plan, estimate, score and generate, and compares packed documents with each alone.

Legend: N tokens, D model dim, H heads, P head dim; in decoding n documents, L tokens of each. I = H P.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxthd import Block, Init, PassedSizes, Segments, register_block
from jaxthd.__main__ import main as jaxthd
from jaxthd.config import ComputeConfig, Config, DataConfig, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.config.values import DERIVED
from jaxthd.models.blocks import MLP, Attention, Prefilled
from jaxthd.models.layers import Linear
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.ssd import ssd_and_states
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.parallel.params import over_tensor
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.startup import simulate_devices
from jaxthd.train import train


@dataclass(frozen=True, kw_only=True)
class MovingAverage(Block):
    """A moving average: h of a token is r h of the token before plus (1 - r) x. Each head learns its r."""

    title = "moving average"
    letter = "A"
    splits_documents = True
    rolls_back = True
    equal_sizes = ("heads",)
    kind: Annotated[Literal["moving_average"], DERIVED] = "moving_average"
    heads: int = 4
    """Heads, each with a rate. Tensor ranks take equal parts of them."""
    head_dim: int = 8
    """Dim of a head."""

    def build(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> "MovingAverageMixer":
        return MovingAverageMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        return float(2 * dim * self.heads * self.head_dim)

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        """A context chunk passes one state of I numbers in float32, and no halo."""
        return PassedSizes(4 * self.heads * self.head_dim // tensor, 0)


class MovingAverageMixer(nnx.Module):
    """A projection, the average, a projection. The average is a scan whose state has one number a channel."""

    def __init__(self, block: MovingAverage, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        inner, heads = block.heads * block.head_dim, over_tensor(block.heads)
        self.into = Linear(llm.dim, inner, init, sharded_out=heads)
        self.out = Linear(inner, llm.dim, init, sharded_in=heads)
        self.log_rate = init.zeros((block.heads,), (heads,))
        self.chunk = compute.blocks.scan

    def __call__(self, x_ND: Array, segments: Segments) -> Array:
        nowhere = jnp.zeros(0, jnp.int32)
        y_NHP, _ = ssd_and_states(self._scanned(x_ND), segments, nowhere, chunk=self.chunk)
        return self._finish(y_NHP, x_ND)

    def prefill(self, x_ND: Array, segments: Segments, prompts: Prompts) -> Prefilled:
        ends = segments.local_index(prompts.ends.last)
        y_NHP, state_DHP1 = ssd_and_states(self._scanned(x_ND), segments, ends, chunk=self.chunk)
        return Prefilled(self._finish(y_NHP, x_ND), [], [prompts.state(state_DHP1, segments)])

    def step(self, x_ND: Array, fixed: list, state: list, now: Now) -> tuple[Array, list[Array]]:
        inputs, state_nHP1 = self._scanned(x_ND), now.latest(state[0])
        states = []
        for x_nHP in now.by_document(inputs.x).swapaxes(0, 1):  # one token of each document, then the next
            state_nHP1 = jnp.exp(inputs.a)[:, None, None] * state_nHP1 + x_nHP[..., None]
            states.append(state_nHP1)
        after_nLHP1 = jnp.stack(states, axis=1)
        return self._finish(after_nLHP1.reshape(inputs.x.shape), x_ND), [after_nLHP1]

    def _scanned(self, x_ND: Array) -> ScanInputs:
        """What the scan is given: h = exp(a) h + (1 - exp(a)) x."""
        acc = jnp.promote_types(jnp.float32, x_ND.dtype)
        a_H = -jax.nn.softplus(self.log_rate[...].astype(acc))
        x_NHP = self.into(x_ND).reshape(len(x_ND), len(a_H), -1)
        scaled_NHP = (-jnp.expm1(a_H)[:, None] * x_NHP).astype(x_ND.dtype)
        ones_N11 = jnp.ones((len(x_ND), 1, 1), x_ND.dtype)
        return ScanInputs(scaled_NHP, jnp.ones(scaled_NHP.shape[:2], acc), a_H, ones_N11, ones_N11)

    def _finish(self, y_NHP: Array, x_ND: Array) -> Array:
        return self.out(y_NHP.reshape(len(x_ND), -1).astype(x_ND.dtype))


register_block(MovingAverage)


def config(manifest: str = "texts.jsonl") -> Config:
    """A model with two such blocks, on 8 devices."""
    blocks = {"A": MovingAverage(), "*": Attention(heads=4, kv_heads=2, head_dim=8), "-": MLP(inner=64)}
    llm = LLMConfig(pattern="A*-A*-", vocab_size=300, dim=32, blocks=blocks)
    return Config(
        data=DataConfig(manifest=(manifest,), validation_manifest="", rows=4, capacity=256, max_documents=16),
        model=ModelConfig(encoder=None, llm=llm),
        mesh=MeshConfig(data=1, context=2, pipeline=2, tensor=2),
        train=TrainConfig(steps=20, warmup_steps=2, learning_rate=1e-2, microbatches=2, trackers=()),
    )


def main(folder: Path) -> None:
    simulate_devices(8)
    manifest, run = folder / "texts.jsonl", folder / "run"
    turns = [(f"Count to {n}.", " ".join(map(str, range(1, n + 1)))) for n in range(1, 33)]
    said = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    manifest.write_text("".join(json.dumps({"messages": x}) + "\n" for x in said))
    train(config(str(manifest)), run)
    on_fewer = ["--mesh.data", "2", "--mesh.context", "1", "--mesh.pipeline", "1", "--mesh.tensor", "2"]
    jaxthd(["train", str(run), "--train.steps", "30", *on_fewer])
    first, *others = (line["loss"] for line in read_metrics(run))
    assert (len(others), others[-1] < 0.8 * first) == (29, True), others
    for command in ("describe", "plan", "estimate"):
        jaxthd([command, str(run)])
    jaxthd(["generate", str(run), "--prompt", "Count to 3.", "--max-new-tokens", "8"])
    scores = {}
    for name, most in {"packed": "16", "alone": "1"}.items():
        out = folder / f"{name}.jsonl"
        words = ["--manifest", str(manifest), "--out", str(out), "--data.max-documents", most]
        jaxthd(["score", str(run), *words])
        scores[name] = np.concatenate([json.loads(x)["log_probs"] for x in out.read_text().splitlines()])
    np.testing.assert_allclose(scores["packed"], scores["alone"], rtol=0, atol=1e-5)
    print("ok")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
