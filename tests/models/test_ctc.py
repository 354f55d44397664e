"""The CTC loss, packed, on any mesh, computes what is defined for each document alone."""

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxthd.config import AdaptConfig, Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.models.ctc import Transcripts, transcripts
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.alone import Parts, parts, states_of
from tests.clips import clip_of
from tests.helpers import assert_same, context_mesh
from tests.speech_model import AUDIO, CAPACITY, CHUNK, COMPUTE, MELS, MODEL, PLACEHOLDER
from tests.weights import random_state

WEIGHT, LABELS, MOST, VOCAB = 0.7, 6, 16, 52
"""The loss's weight, its most labels, the most documents of a row, the entries of the vocabulary."""
ROWS: list[list[tuple[tuple[int, ...], str]]] = [
    # Clips in mel frames, and the document: "." stands for the next clip, capitals are supervised.
    [((40,), "ab.cABC"), ((8,), ".A"), ((60, 17), ".ab.ABBA"), ((), "abAB"), ((64,), "AB.CD")],
    [((16,), ".ABC"), ((16,), ".AA"), ((24,), ".AA"), ((30,), ".abc"), ((1,), ".Z")],
    [((64,), ".ABCDEFG"), ((64,), ".ABCDEF"), ((64, 8), ".ABA.BAA")],
    [((5,), ".a")],
]
UNCOVERED = 5
"""Documents with audio and no labels, more than LABELS, or more than their frames can be aligned with."""


def run_config(mesh: MeshConfig | None = None, microbatches: int = 1, **compute: Any) -> Config:
    llm, encoder = replace(MODEL.llm, pattern="-*", vocab_size=VOCAB), replace(MODEL.encoder, layers=1)
    return Config(
        mesh=mesh or MeshConfig(),
        model=replace(MODEL, llm=llm, encoder=encoder),
        data=DataConfig(max_documents=MOST),
        compute=replace(COMPUTE, dtype="float64", **compute),
        train=TrainConfig(ctc_loss=WEIGHT, ctc_max_labels=LABELS, microbatches=microbatches),
        adapt=AdaptConfig(freeze=("encoder.blocks.conv.norm.*",)),
    )


@functools.cache
def state() -> tuple[Any, Any]:
    """(parameters, buffers)."""
    with jax.enable_x64(True):
        return random_state(Blueprint(run_config()).model)[1:]


@functools.cache
def documents() -> list[list[Document]]:
    rng = np.random.default_rng(7)

    def document(key: str, frames: tuple[int, ...], text: str) -> Document:
        mels = [rng.normal(size=(n, MELS)).astype(np.float32) for n in frames]
        clips = [np.split(clip, range(CHUNK, len(clip), CHUNK)) for clip in mels]
        tokens = [PLACEHOLDER if c == "." else ord(c.lower()) - ord("a") + 1 for c in text]
        return Document.splice(
            key, tokens, [c.isupper() for c in text], [clip_of(clip) for clip in clips], PLACEHOLDER
        )

    return [[document(f"{r}.{d}", *one) for d, one in enumerate(row)] for r, row in enumerate(ROWS)]


def pack(config: Config) -> Batch:
    mesh = config.mesh
    rows = [
        pack_row(
            row,
            capacity=CAPACITY,
            audio_capacity=2 * AUDIO,
            front_end=FastConformer(num_mels=MELS),
            max_documents=MOST,
            context=mesh.context,
            audio_ranks=mesh.audio_ranks,
            order_seed=None,
        )[0]
        for row in documents()
    ]
    return concatenate_rows(rows)


@functools.cache
def evaluate(config: Config) -> Gradient:
    with jax.enable_x64(True):
        mesh, stages = make_mesh(config.mesh), Blueprint(config).stages
        program = jax.jit(loss_and_gradient(Blueprint(config), mesh))
        found = jax.device_get(program(*to_stages(state(), stages), put_batch(pack(config), mesh)))
        return found._replace(gradients=from_stages(found.gradients, stages))


def labels_of(one: Document) -> list[int]:
    return one.tokens[1:][one.supervised[1:]].tolist()


def is_covered(one: Document) -> bool:
    labels = labels_of(one)
    needed = len(labels) + sum(a == b for a, b in pairwise(labels))
    return 0 < len(labels) <= LABELS and needed <= one.is_audio.sum()


def losses_of(params: Any, buffers: Any, graph: Any, one: Parts, labels_L: jax.Array) -> jax.Array:
    """A document's sums of -log p, of its next tokens and of CTC. labels: -1 behind the last."""
    model = nnx.merge(graph, params, buffers)
    x_TD, h_TD = states_of(model, one)
    logp_TV = jax.nn.log_softmax(h_TD[:-1] @ params["head"].T)
    logp_T = jnp.take_along_axis(logp_TV, one.tokens[1:, None], axis=1)[:, 0]
    is_frame_T = one.slot >= 0
    frames_T = jnp.argsort(~is_frame_T, stable=True)
    logits_TV = (model.decoder.norm(x_TD) @ params["head"].T)[frames_T]
    ctc = optax.ctc_loss(
        logits_TV[None],
        1.0 - is_frame_T[frames_T][None],
        jnp.maximum(labels_L, 0)[None],
        1.0 * (labels_L < 0)[None],
        blank_id=PLACEHOLDER,
        log_epsilon=-1e30,
    )[0]
    return jnp.stack([-jnp.where(one.supervised[1:], logp_T, 0).sum(), ctc])


@functools.cache
def each_document_alone() -> tuple[np.ndarray, Any]:
    """(means of the losses, gradients of the objective)."""
    every = [one for row in documents() for one in row]
    covered = np.array([is_covered(one) for one in every])
    labels = [(labels_of(one) if is_covered(one) else [])[:LABELS] for one in every]
    counts = np.array([sum(one.supervised[1:].sum() for one in every), sum(map(len, labels))])
    with jax.enable_x64(True):
        graph = Blueprint(run_config()).graph

        def objective(params: Any, buffers: Any, one: Parts, labels_L: Any, has_ctc: Any) -> Any:
            sums = losses_of(params, buffers, graph, one, labels_L)
            shares = jnp.where(jnp.stack([True, has_ctc]), sums, 0) / counts
            return shares[0] + WEIGHT * shares[1], shares

        run = jax.jit(jax.grad(objective, has_aux=True))
        found = [
            run(
                *state(), jax.tree.map(jnp.asarray, parts(one)), np.array((own + [-1] * LABELS)[:LABELS]), ctc
            )
            for one, own, ctc in zip(every, labels, covered, strict=True)
        ]
        gradients, shares = jax.tree.map(lambda *each: sum(map(np.asarray, each)), *found)
    return shares, gradients


def only_trained(gradients: Any, got: Any) -> Any:
    """The gradients without those of frozen parameters, which are None in `got`."""
    return jax.tree.map(lambda g, w: None if g is None else w, got, gradients, is_leaf=lambda x: x is None)


def test_packed_equals_each_document_alone():
    got, ((loss, ctc), gradients) = evaluate(run_config()), each_document_alone()
    np.testing.assert_allclose(got.loss, loss, rtol=1e-12)
    np.testing.assert_allclose(got.ctc.loss, ctc, rtol=1e-12)
    with_audio = [one for row in documents() for one in row if one.is_audio.any()]
    assert sum(not is_covered(one) for one in with_audio) == UNCOVERED
    np.testing.assert_allclose(got.ctc.uncovered, UNCOVERED / len(with_audio), rtol=1e-12)
    assert_same(got.gradients, only_trained(gradients, got.gradients), 1e-10)


def test_without_it_nothing_of_it_is_computed():
    """The gradient's program is then the same whatever the other setting, and has none of its sorts."""

    def traced(**train: Any) -> str:
        config = replace(run_config(), train=TrainConfig(**train))
        with jax.enable_x64(True):
            program = loss_and_gradient(Blueprint(config), make_mesh(config.mesh))
            return str(jax.make_jaxpr(program)(*state(), pack(config)))

    without = traced()
    assert traced(ctc_max_labels=LABELS) == without
    assert " sort[" not in without
    assert " sort[" in traced(ctc_loss=WEIGHT, ctc_max_labels=LABELS)


GATHERING = {"context_exchange": "all_gather"}


def transcripts_on(context: int) -> tuple[Transcripts, list[np.ndarray]]:
    """Of all rows; and segment ids and positions of the slots with frames, in their order."""
    config = run_config(MeshConfig(context=context))
    mesh, batch = context_mesh(context), pack(config)
    # Audio does not matter here.
    batch = batch._replace(
        features=batch.tokens, frame_mask=batch.tokens, piece_ids=None, piece_positions=None
    )
    of_tokens, spec = jax.tree.map(jnp.asarray, batch), PartitionSpec(None, "context")

    def rank(batch: Batch) -> Transcripts:
        return transcripts(batch, MOST, LABELS, "context")

    mapped = jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    found = jax.tree.map(np.asarray, jax.jit(mapped)(of_tokens))
    frames = found.documents.slots[: batch.is_audio.sum()]
    return found, [x.reshape(-1)[frames] for x in (batch.segment_ids, batch.positions)]


@pytest.mark.parametrize("context", [2, 4])
def test_context_ranks_find_frames_and_labels_in_the_order_of_documents(context: int):
    (got, frames), (want, alone) = transcripts_on(context), transcripts_on(1)
    for name in ("label_ids", "blank", "has_audio", "is_covered"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name in ("first", "frames", "labels", "repeats"):
        np.testing.assert_array_equal(getattr(got.documents, name), getattr(want.documents, name))
    np.testing.assert_array_equal(frames, alone)
    assert got.blank == PLACEHOLDER


MESHES = [
    (MeshConfig(data=2), {}),
    (MeshConfig(context=4), GATHERING),
    (MeshConfig(tensor=2), {"sequence_sharded": True}),
    (
        MeshConfig(context=2, pipeline=2, tensor=2),
        {"microbatches": 2, "sequence_sharded": True, **GATHERING},
    ),
]
"""(mesh, settings of run_config)."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "settings"), MESHES, ids=str)
def test_the_mesh_changes_neither_loss_nor_gradients(mesh: MeshConfig, settings: dict[str, Any]):
    """tests/test_meshes.py has two combined meshes, one in the layout by buffers, with multi-token prediction
    beside the CTC loss."""
    got, want = evaluate(run_config(mesh, **settings)), evaluate(run_config())
    for part in ("loss", "ctc", "gradients"):
        assert_same(getattr(got, part), getattr(want, part), 1e-10)
