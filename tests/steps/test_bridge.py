"""Batches of other toolkits train as the same documents through our own packer: loss and gradients."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.bridge import to_batch
from jaxthd.packing.from_padded import packed_from_padded
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import adopt_mesh, make_mesh, put_batch, with_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.helpers import assert_same
from tests.packing.test_bridge import documents, padded
from tests.weights import random_state

LLM = LLMConfig(
    pattern="M*-",
    vocab_size=50,
    dim=16,
    blocks={
        "*": Attention(heads=2, kv_heads=2, head_dim=8),
        "-": MLP(inner=16),
        "M": Mamba2(heads=2, head_dim=8, state=8),
    },
)
OTHER_AXES = {"replica": 2, "sequence": 2}
"""A mesh as somebody else makes one: fewer axes, other names."""


def settings(mesh: MeshConfig) -> Config:
    sizes = DataConfig(rows=4, capacity=32, max_documents=8)
    compute = ComputeConfig(dtype="float64", block_sizes=BlockSizes(attention=8, loss=16, scan=8))
    return Config(mesh=mesh, data=sizes, model=ModelConfig(encoder=None, llm=LLM), compute=compute)


@functools.cache
def weights() -> tuple[Any, Any]:
    filled = random_state(Blueprint(settings(MeshConfig())).model)[1:]
    return jax.tree.map(lambda x: x.astype(np.float64), filled)


@functools.cache
def program(config: Config, mesh: jax.sharding.Mesh) -> Any:
    return jax.jit(loss_and_gradient(Blueprint(config), mesh))


def evaluate(batch: Any, config: Config, mesh: jax.sharding.Mesh) -> Gradient:
    with jax.enable_x64(True):
        found = program(config, mesh)(*weights(), put_batch(batch, mesh))
        return jax.tree.map(np.asarray, found)


@functools.cache
def ours() -> Gradient:
    """Our packer's rows of the same documents, on one device."""
    config = settings(MeshConfig())
    sizes = {"capacity": 32, "audio_capacity": 0, "max_documents": 8}
    batch = concatenate_rows([pack_row(row, **sizes)[0] for row in documents()])
    mesh = jax.make_mesh((1,), ("device",), devices=jax.devices()[:1])
    return evaluate(batch, config, adopt_mesh(mesh))


def test_loss_and_gradients_are_those_of_our_packer() -> None:
    """Split over context ranks, on a mesh made by somebody else; embeddings in place of ids."""
    theirs = jax.make_mesh(tuple(OTHER_AXES.values()), tuple(OTHER_AXES), devices=jax.devices()[:4])
    mesh = adopt_mesh(theirs, data="replica", context="sequence")
    config = with_mesh(settings(MeshConfig()), mesh)
    assert config.mesh.sizes == (2, 2, 1, 1)
    given, want = padded(shifted=True), ours()
    plain = {name: given[name] for name in ("input_ids", "attention_mask")}
    plain["labels"], plain["loss_mask"] = given["unmasked"], given["loss_mask"]
    for form in (packed_from_padded(given, num_chunks=2), plain):
        got = evaluate(to_batch(form, config, shifted=True), config, mesh)
        assert_same(got.loss, want.loss, 1e-10)
        assert_same(got.gradients, want.gradients, 1e-10)
    table = weights()[0]["embedding"]
    embedded = given | {"input_ids": table[given["input_ids"]]}
    got = evaluate(to_batch(embedded, config, shifted=True), config, mesh)
    assert_same(got.loss, want.loss, 1e-10)
    assert not got.gradients["embedding"].any()
    assert want.gradients["embedding"].any()
    others = {name: x for name, x in want.gradients.items() if name != "embedding"}
    assert_same({name: got.gradients[name] for name in others}, others, 1e-10)


@pytest.mark.exhaustive
def test_embeddings_train_over_all_axes_of_a_mesh() -> None:
    """Pipeline and tensor ranks included, in microbatches; the gradients as one device has them for ids."""
    llm, given = replace(LLM, pattern="M*|M*", vocab_size=52), padded(shifted=True)

    def gradients(mesh: MeshConfig, microbatches: int, inputs: str) -> tuple[float, Any]:
        config = settings(mesh)
        train = TrainConfig(microbatches=microbatches)
        config = replace(config, model=replace(config.model, llm=llm), train=train)
        blueprint, on = Blueprint(config), make_mesh(mesh)
        with jax.enable_x64(True):
            canonical = random_state(blueprint.canonical_model)[1:]
            canonical = jax.tree.map(lambda x: x.astype(np.float64), canonical)
            table = canonical[0]["embedding"]
            form = given if inputs == "ids" else given | {"input_ids": table[given["input_ids"]]}
            batch = put_batch(to_batch(form, config, shifted=True), on)
            run = jax.jit(loss_and_gradient(blueprint, on))
            found = run(*to_stages(canonical, blueprint.stages), batch)
            return float(found.loss), from_stages(jax.device_get(found.gradients), blueprint.stages)

    want_loss, want = gradients(MeshConfig(), 1, "ids")
    loss, got = gradients(MeshConfig(context=2, pipeline=2, tensor=2), 2, "embeddings")
    assert loss == pytest.approx(want_loss, rel=1e-10)
    assert not got.pop("embedding").any()
    assert want.pop("embedding").any()
    assert_same(got, want, 1e-10)
