"""A user's objective or data source is one class and one line outside jaxthd, and a run trains with it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import jaxthd
from jaxthd.config import BlockSizes
from jaxthd.data.example import Example, Samples, utterance
from jaxthd.data.skipped import Skipped
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.front_ends import FastConformer
from jaxthd.objectives import OBJECTIVES
from jaxthd.run.metrics_file import read_metrics
from jaxthd.train import train
from tests.helpers import assert_same
from tests.weights import random_state

LLM = jaxthd.LLMConfig(
    pattern="M*-M*-",
    vocab_size=300,
    dim=16,
    blocks={
        "*": Attention(heads=2, kv_heads=1, head_dim=8),
        "-": MLP(inner=16),
        "M": Mamba2(heads=4, head_dim=8, state=8, groups=2),
    },
)
COMPUTE = jaxthd.ComputeConfig(block_sizes=BlockSizes(attention=16, loss=16, vocabulary=128, scan=8))


# --- an objective over tokens, and a source of recordings in memory, in a run ---


@dataclass(frozen=True)
class Focal(jaxthd.Objective):
    """Cross-entropy with a lower weight for a token the more confident the model is (Lin et al., 2017)."""

    gamma: float = 1.0

    def counts(self, tokens: jaxthd.Tokens) -> dict[str, Array]:
        return {"loss": tokens.weights.sum()}

    def sums(self, log_probs_RT: Array, tokens: jaxthd.Tokens) -> dict[str, Array]:
        probs_RT = jnp.exp(log_probs_RT)
        loss_RT = -((1 - probs_RT) ** self.gamma) * log_probs_RT
        return {"loss": (tokens.weights * loss_RT).sum(), "confidence": (tokens.weights * probs_RT).sum()}


class Tones(jaxthd.Source):
    """ "tones:COUNT": recordings of a tone whose text gives its pitch; every seventh has no samples."""

    @staticmethod
    def recognises(path: str) -> bool:
        return path.startswith("tones:")

    def read(self, data: jaxthd.DataConfig) -> tuple[list[Example], list[Skipped]]:
        examples, skipped = [], []
        for number in range(int(self.path)):
            key, time = f"{number}:tone", np.arange(4800 + 480 * (number % 3)) / 16000
            if number % 7 == 6:
                skipped.append(Skipped(key, "it has no samples"))
                continue
            is_high = number % 2
            wave = np.sin(2 * np.pi * (400 + 1200 * is_high) * time).astype(np.float32)
            turns = utterance(
                Samples(wave, 16000), "high" if is_high else "low", data.prompt, data.audio_placeholder
            )
            examples.append(Example(key, turns))
        return examples, skipped

    def digest(self) -> str:
        return f"tones {self.path}"


@pytest.fixture
def registered() -> Any:
    jaxthd.register_objective("focal", Focal)
    jaxthd.register_source("tones", Tones)
    yield
    del OBJECTIVES["focal"], jaxthd.SOURCES["tones"]


def test_a_toy_objective_and_a_toy_source_train(registered: None, tmp_path: Path):
    config = jaxthd.Config(
        data=jaxthd.DataConfig(
            max_skipped_share=1.0,
            manifest=("tones:40",),
            validation_manifest="",
            capacity=128,
            max_documents=16,
            audio_capacity=512,
            workers=0,
        ),
        model=jaxthd.ModelConfig(
            encoder=jaxthd.EncoderConfig(
                num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, chunk_seconds=1.0
            ),
            llm=replace(LLM, pattern="*-"),
        ),
        compute=COMPUTE,
        train=jaxthd.TrainConfig(
            steps=12,
            warmup_steps=1,
            learning_rate=2e-2,
            objective="focal",
            objective_options=("gamma=0.5",),
            trackers=(),
        ),
    )
    train(config, tmp_path)
    lines = read_metrics(tmp_path)
    assert len(lines) == 12
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["confidence"] > 2 * lines[0]["confidence"]
    assert lines[-1]["skipped_documents"] == 5
    assert "it has no samples" in (tmp_path / "skipped.jsonl").read_text()


# --- an objective over pairs of documents: the form of DPO, with sums over the context axis ---

LENGTHS = ((9, 21), (14, 3), (30, 12), (5, 16), (40, 7), (2, 2), (17, 33), (11, 8))
"""Tokens of the chosen and of the rejected document of each pair."""
ROWS = ((0, 1), (2,), (3, 4), (5, 6))
"""The pairs in each row. The last is in the fifth row, which only pads the batch to the mesh: it is
unused."""
CAPACITY = 96
BETA = 0.3


@dataclass(frozen=True)
class Pairs(jaxthd.Objective):
    """Mean over pairs of -log sigmoid(beta * (reward of the chosen - reward of the rejected))."""

    beta: float = BETA
    extras: ClassVar[tuple[str, ...]] = ("reference", "pair", "chosen")

    def _masks(self, tokens: jaxthd.Tokens) -> Array:
        """[R, D, D]: whether document i is the chosen and document j the rejected one of a pair."""
        pair_RD = tokens.document_values(tokens.extras["pair"])
        chosen_RD = tokens.document_values(tokens.extras["chosen"]) > 0
        same_RDD = (pair_RD[:, :, None] == pair_RD[:, None, :]) & (pair_RD > 0)[:, :, None]
        return same_RDD & chosen_RD[:, :, None] & ~chosen_RD[:, None, :]

    def counts(self, tokens: jaxthd.Tokens) -> dict[str, Array]:
        documents = tokens.supervised_documents().sum(dtype=tokens.weights.dtype)
        pairs = self._masks(tokens).sum(dtype=tokens.weights.dtype)
        return {"loss": tokens.share(pairs), "sequence_mean": tokens.share(documents)}

    def totals(self, tokens: jaxthd.Tokens) -> dict[str, Array]:
        return {"pairs": self.counts(tokens)["loss"], "tokens": tokens.weights.sum()}

    def extremes(self, log_probs_RT: Array, tokens: jaxthd.Tokens) -> dict[str, Array]:
        return {"largest": (-tokens.weights * log_probs_RT).max()}

    def sums(self, log_probs_RT: Array, tokens: jaxthd.Tokens) -> dict[str, Array]:
        gained_RT = tokens.weights * (log_probs_RT - tokens.extras["reference"])
        reward_RD = tokens.document_sums(gained_RT)
        margin_RDD = reward_RD[:, :, None] - reward_RD[:, None, :]
        loss_RDD = jnp.where(self._masks(tokens), -jax.nn.log_sigmoid(self.beta * margin_RDD), 0)
        lengths_RD = tokens.document_sums(tokens.weights.astype(log_probs_RT.dtype))
        means_RD = tokens.document_sums(tokens.weights * log_probs_RT) / jnp.maximum(lengths_RD, 1)
        # Divided by the pairs, as it has no count of its name.
        token_sum = (tokens.weights * log_probs_RT).sum() * tokens.totals["pairs"] / tokens.totals["tokens"]
        of_documents = {"sequence_mean": tokens.share(means_RD.sum()), "token_mean": token_sum}
        return {"loss": tokens.share(loss_RDD.sum()), **of_documents}


@functools.cache
def pair_documents() -> list[tuple[jaxthd.Document, jaxthd.Document]]:
    rng = np.random.default_rng(0)

    def document(pair: int, chosen: bool, length: int) -> jaxthd.Document:
        extras = {
            "reference": -4 * rng.random(length),
            "pair": np.full(length, pair + 1),
            "chosen": np.full(length, chosen),
        }
        return jaxthd.Document(
            key=f"{pair}{'+' if chosen else '-'}",
            tokens=rng.integers(1, 300, length, dtype=np.int32),
            is_audio=np.zeros(length, bool),
            supervised=np.arange(length) > length // 3,
            extras={name: x.astype(np.float32) for name, x in extras.items()},
        )

    return [(document(p, True, c), document(p, False, r)) for p, (c, r) in enumerate(LENGTHS)]


def pair_config(mesh: jaxthd.MeshConfig, microbatches: int) -> jaxthd.Config:
    return jaxthd.Config(
        mesh=mesh,
        data=jaxthd.DataConfig(rows=len(ROWS), capacity=CAPACITY, max_documents=6, audio_capacity=0),
        model=jaxthd.ModelConfig(encoder=None, llm=LLM),
        compute=replace(COMPUTE, dtype="float64"),
        train=jaxthd.TrainConfig(objective="pairs", microbatches=microbatches),
    )


def packed(rows: list[list[jaxthd.Document]], capacity: int, context: int) -> jaxthd.Batch:
    packer: Callable[..., Any] = functools.partial(
        jaxthd.pack_row,
        capacity=capacity,
        audio_capacity=0,
        front_end=FastConformer(num_mels=0),
        max_documents=6,
        context=context,
        extras=Pairs.extras,
    )
    return jaxthd.concatenate_rows([packer(row)[0] for row in rows])


@functools.cache
def weights() -> tuple[Any, Any]:
    with jax.enable_x64(True):
        return random_state(jaxthd.Blueprint(pair_config(jaxthd.MeshConfig(), 1)).model)[1:]


@functools.cache
def each_pair_alone() -> tuple[float, dict[str, Any], Any]:
    """(loss, metrics, gradients). Every document is in its own row, and the sums are written out."""
    pairs = [pair_documents()[p] for row in ROWS for p in row]
    documents = [document for pair in pairs for document in pair]
    batch = packed([[document] for document in documents], 48, 1)
    with jax.enable_x64(True):
        graph = jaxthd.Blueprint(pair_config(jaxthd.MeshConfig(), 1)).graph
        batch = jax.tree.map(jnp.asarray, batch)

    def loss(params: Any, buffers: Any) -> tuple[Array, dict[str, Array]]:
        logp_RT, _ = nnx.merge(graph, params, buffers).log_probs(batch, axes=(), train=False)
        rewards, means, every = [], [], []
        for logp_T, document in zip(logp_RT, documents, strict=True):
            at = np.flatnonzero(document.supervised[1:])
            rewards.append(sum(logp_T[i] - document.extras["reference"][i + 1] for i in at))
            means.append(sum(logp_T[i] for i in at) / len(at))
            every.extend(logp_T[i] for i in at)
        margins = jnp.stack(rewards[::2]) - jnp.stack(rewards[1::2])
        metrics = {"sequence_mean": jnp.mean(jnp.stack(means)), "token_mean": jnp.mean(jnp.stack(every))}
        metrics["largest"] = -jnp.min(jnp.stack(every))
        return jnp.mean(jnp.log1p(jnp.exp(-BETA * margins))), metrics

    with jax.enable_x64(True):
        (value, metrics), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(*weights())
    return float(value), jax.device_get(metrics), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        pytest.param(jaxthd.MeshConfig(), 1, marks=pytest.mark.exhaustive),
        pytest.param(jaxthd.MeshConfig(context=4), 2, marks=pytest.mark.exhaustive),
        (jaxthd.MeshConfig(context=2, pipeline=2, tensor=2), 4),
    ],
    ids=["one device", "context 4", "context 2, pipeline 2, tensor 2"],
)
def test_an_objective_of_pairs_is_exact_on_every_mesh(mesh: jaxthd.MeshConfig, microbatches: int):
    """The model is text-only. Pairs share rows with others; most are on several context ranks."""
    jaxthd.register_objective("pairs", Pairs)
    try:
        config = pair_config(mesh, microbatches)
        rows = [[document for p in row for document in pair_documents()[p]] for row in ROWS]
        with jax.enable_x64(True):
            devices = jaxthd.make_mesh(mesh)
            blueprint = jaxthd.Blueprint(config)
            gradient = jax.jit(jaxthd.loss_and_gradient(blueprint, devices))
            held = jaxthd.to_stages(weights(), blueprint.stages)
            got = gradient(*held, jaxthd.put_batch(packed(rows, CAPACITY, mesh.context), devices))
            gradients = jaxthd.from_stages(jax.device_get(got.gradients), blueprint.stages)
        loss, metrics, want = each_pair_alone()
        np.testing.assert_allclose(got.loss, loss, rtol=1e-10)
        found = jax.device_get(got.objective | got.extremes.numbers)
        assert found.keys() == metrics.keys()
        for name, x in metrics.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-10, err_msg=name)
        assert_same(gradients, want, 1e-10)
    finally:
        del OBJECTIVES["pairs"]
