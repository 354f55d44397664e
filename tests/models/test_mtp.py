"""Multi-token prediction, packed, on any mesh, computes what is defined for each document alone."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import AdaptConfig, Config, MeshConfig, TrainConfig
from jaxthd.config.listing import value_at
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.alone import Parts, parts, states_of
from tests.helpers import assert_same
from tests.meshes.models import with_pattern
from tests.mtp_reference import mtp_logits
from tests.speech_model import AUDIO, CAPACITY, COMPUTE, MELS, MODEL, Spec, document
from tests.weights import random_state

LLM = with_pattern(MODEL.llm, "*", mtp_pattern="*E", mtp_depths=2, mtp_shared=False)
STORED_STATISTICS = AdaptConfig(freeze=("encoder.blocks.conv.norm.*",))
WEIGHT = 0.3


def run_config(mesh: MeshConfig | None = None, **compute: Any) -> Config:
    return Config(
        mesh=mesh or MeshConfig(),
        model=replace(MODEL, llm=LLM, encoder=replace(MODEL.encoder, layers=1)),
        compute=replace(COMPUTE, dtype="float64", **compute),
        train=TrainConfig(mtp_loss=WEIGHT),
        adapt=STORED_STATISTICS,
    )


@functools.cache
def state() -> tuple[Any, Any]:
    """(parameters, buffers)."""
    with jax.enable_x64(True):
        return random_state(Blueprint(run_config()).model)[1:]


@functools.cache
def documents() -> tuple[list[Document], ...]:
    """Some are too short for any depth, some for the second; some have audio after a text token."""
    rows = (
        [Spec(5, (40,)), Spec(1), Spec(9, (17,)), Spec(2), Spec(20), Spec(3)],
        [Spec(7, (24, 9)), Spec(1), Spec(1), Spec(12, (), 1.0), Spec(2, (13,), 1.0)],
    )
    rng = np.random.default_rng(5)
    return tuple([document(f"{r}.{d}", s, rng) for d, s in enumerate(row)] for r, row in enumerate(rows))


def pack(config: Config) -> Batch:
    mesh = config.mesh
    packed = [
        pack_row(
            row,
            capacity=CAPACITY,
            audio_capacity=2 * AUDIO,
            front_end=FastConformer(num_mels=MELS),
            max_documents=16,
            context=mesh.context,
            audio_ranks=mesh.audio_ranks,
            order_seed=None,
            depths=config.depths_trained,
        )[0]
        for row in documents()
    ]
    return concatenate_rows(packed)


@functools.cache
def evaluate(config: Config) -> Gradient:
    with jax.enable_x64(True):
        mesh = make_mesh(config.mesh)
        program = jax.jit(loss_and_gradient(Blueprint(config), mesh))
        found = program(*state(), put_batch(pack(config), mesh))
        return jax.tree.map(np.asarray, found)


def on_disk(params: Any, buffers: Any) -> dict[str, Any]:
    """The parameters of multi-token prediction by checkpoint names; every depth has "*E"."""
    found, mtp = {}, params["mtp"]
    attention, moe, depths = mtp["layers"]["attention"], mtp["layers"]["moe"], mtp["depths"]
    bias = buffers["mtp"]["layers"]["moe"]["mixer"]["correction_bias"]
    for module in range(len(bias)):
        first, second = (f"mtp.layers.{2 * module + n}" for n in range(2))
        for norm in ("enorm", "hnorm"):
            found[f"{first}.{norm}.weight"] = depths[norm]["weight"][module]
        found[f"{first}.eh_proj.weight"] = depths["eh_proj"]["w"][module].T
        found[f"{first}.norm.weight"] = attention["norm"]["weight"][module]
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
            found[f"{first}.mixer.{theirs}_proj.weight"] = attention["mixer"][ours]["w"][module].T
        mixer = moe["mixer"]
        found[f"{second}.norm.weight"] = moe["norm"]["weight"][module]
        found[f"{second}.mixer.gate.weight"] = mixer["router"]["w"][module].T
        found[f"{second}.mixer.gate.e_score_correction_bias"] = bias[module]
        for part in ("up", "down"):
            shared = mixer["shared"][part]["w"][module]
            found[f"{second}.mixer.shared_experts.{part}_proj.weight"] = shared.T
            for expert in range(value_at(LLM, "blocks.E.experts")):
                name = f"{second}.mixer.experts.{expert}.{part}_proj.weight"
                found[name] = mixer[part][module, expert].T
        found[f"{second}.final_layernorm.weight"] = depths["final_layernorm"]["weight"][module]
    return found


def losses_of(params: Any, buffers: Any, graph: Any, one: Parts) -> jax.Array:
    """Sums of -log p over a document's supervised tokens: for the next token, and for each depth."""
    x_TD, h_TD = states_of(nnx.merge(graph, params, buffers), one)
    tensors, head_VD, sums = on_disk(params, buffers), params["head"], []
    logits = [h_TD @ head_VD.T, *mtp_logits(tensors, LLM, LLM.mtp_depths, h_TD, x_TD, head_VD, jnp)]
    for distance, logits_TV in enumerate(logits, 1):
        targets_T = one.tokens[distance:]
        logp_TV = jax.nn.log_softmax(logits_TV[: len(targets_T)])
        logp_T = jnp.take_along_axis(logp_TV, targets_T[:, None], axis=1)[:, 0]
        sums.append(-jnp.where(one.supervised[distance:], logp_T, 0).sum())
    return jnp.stack(sums)


@functools.cache
def each_document_alone() -> tuple[np.ndarray, Any]:
    """(means of the next token's and the depths' losses, gradients of the objective)."""
    every = [one for row in documents() for one in row]
    counts = np.array([sum(one.supervised[d:].sum() for one in every) for d in range(1, LLM.mtp_depths + 2)])
    with jax.enable_x64(True):
        graph = Blueprint(run_config()).graph

        def objective(params: Any, buffers: Any, one: Parts) -> tuple[jax.Array, jax.Array]:
            shares = losses_of(params, buffers, graph, one) / counts
            return shares[0] + WEIGHT * shares[1:].mean(), shares

        run = jax.jit(jax.grad(objective, has_aux=True))
        found = [run(*state(), jax.tree.map(jnp.asarray, parts(one))) for one in every]
        gradients, shares = jax.tree.map(lambda *each: sum(map(np.asarray, each)), *found)
    return shares, gradients


def only_trained(gradients: Any, got: Any) -> Any:
    """The gradients without those of frozen parameters, which are None in `got`."""
    return jax.tree.map(lambda g, w: None if g is None else w, got, gradients, is_leaf=lambda x: x is None)


@pytest.mark.parametrize(
    "config",
    [
        run_config(MeshConfig(context=2), context_exchange="all_gather"),
        pytest.param(run_config(), marks=pytest.mark.exhaustive),
    ],
    ids=["two ranks", "one device"],
)
def test_packed_equals_each_document_alone(config: Config):
    """Shared weights: tests/hf/test_mtp.py compares values, test_meshes.py gradients and other meshes."""
    got = evaluate(config)
    (loss, *future), gradients = each_document_alone()
    np.testing.assert_allclose(got.loss, loss, rtol=1e-12)
    np.testing.assert_allclose(got.future.loss, future, rtol=1e-12)
    assert_same(got.gradients, only_trained(gradients, got.gradients), 1e-10)
    assert all(g.any() for g in jax.tree.leaves(got.gradients["mtp"]))
    every = [len(one) for row in documents() for one in row]
    have_token = [sum(max(n - depth - 1, 0) for n in every) for depth in range(LLM.mtp_depths)]
    np.testing.assert_array_equal(got.future.routing.tokens, have_token)
    np.testing.assert_array_equal(
        got.future.routing.load.sum(1), np.multiply(have_token, value_at(LLM, "blocks.E.experts_per_token"))
    )
