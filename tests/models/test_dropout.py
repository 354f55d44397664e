"""LoRA's dropout: the draws depend on seed, step, document, position, layer and projection alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxthd.config import (
    AdaptConfig,
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
)
from jaxthd.models.blocks import MLP, Attention
from jaxthd.models.lora_tokens import Draws, drawing, dropped, of_layer
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient, with_draws
from tests.helpers import assert_same
from tests.weights import random_state

LLM = LLMConfig(
    pattern="*-*-",
    vocab_size=64,
    dim=16,
    blocks={"*": Attention(heads=4, kv_heads=1, head_dim=8), "-": MLP(inner=32)},
    mtp_pattern="-",
)
CONFIG = Config(
    model=ModelConfig(encoder=None, llm=LLM),
    compute=ComputeConfig(dtype="float64", block_sizes=BlockSizes(attention=8)),
    adapt=AdaptConfig(lora_rank=3, lora_targets=("decoder.*", "mtp.*"), lora_dropout=0.3),
    data=DataConfig(rows=4, capacity=32, max_documents=4),
)
LENGTHS = [[9, 14], [30], [5, 6, 7], [21]]


def rows(context: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> Batch:
    rng = np.random.default_rng(0)
    documents = [
        [
            Document.splice(f"{row}.{i}", rng.integers(1, 60, n).tolist(), [True] * n, [], 0)
            for i, n in enumerate(lengths)
        ]
        for row, lengths in enumerate(LENGTHS)
    ]
    sizes: dict[str, Any] = {
        "capacity": 32,
        "audio_capacity": 0,
        "max_documents": 4,
        "depths": 1,
    }
    packed = [
        pack_row(documents[row][::-1] if row != order[row] else documents[row], **sizes, context=context)[0]
        for row in order
    ]
    return concatenate_rows(packed)


@cache
def program(config: Config) -> tuple[Blueprint, Mesh, Any]:
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)

    def run(params: Any, buffers: Any, batch: Batch, step: Any) -> Any:
        return loss_and_gradient(blueprint, mesh)(params, buffers, with_draws(batch, config, step))

    return blueprint, mesh, jax.jit(run)


def gradient(
    sizes: MeshConfig, order: tuple[int, ...] = (0, 1, 2, 3), step: int = 5, microbatches: int = 1
) -> Any:
    """(loss, gradients in the checkpoint layout) of a step with dropout, in float64."""
    config = replace(CONFIG, mesh=sizes, train=replace(CONFIG.train, microbatches=microbatches))
    blueprint, mesh, run = program(config)
    _, params, buffers = random_state(Blueprint(replace(config, mesh=MeshConfig())).canonical_model)
    params, buffers = to_stages((params, buffers), blueprint.stages)

    found = run(params, buffers, put_batch(rows(sizes.context, order), mesh), jnp.int32(step))
    return np.asarray(found.loss), from_stages(jax.device_get(found.gradients), blueprint.stages)


@pytest.mark.exhaustive
def test_every_mesh_and_every_packing_draws_the_same():
    """A pipeline whose ranks hold two stages each and share a key and value head; documents elsewhere. Then
    another step.
    """
    with jax.enable_x64(True):
        alone = gradient(MeshConfig())
        on_mesh = gradient(MeshConfig(1, 1, 2, 2, stages_per_rank=2), microbatches=4)
        moved = gradient(MeshConfig(), order=(2, 0, 3, 1))
        later = gradient(MeshConfig(), step=6)
    assert_same(on_mesh, alone, 1e-10)
    assert_same(moved, alone, 1e-10)
    assert abs(later[0] - alone[0]) > 1e-6


@pytest.mark.exhaustive
def test_context_ranks_draw_the_same():
    with jax.enable_x64(True):
        on_mesh = gradient(MeshConfig(2, 2, 1, 2))
        assert_same(on_mesh, gradient(MeshConfig()), 1e-10)


def test_the_share_that_is_dropped_and_what_the_draws_depend_on():
    keys, ones = jnp.arange(4000, dtype=jnp.uint32), jnp.ones((4000, 64))

    def draw(rate: float = 0.25, layer: int = 0, projection: int = 3) -> np.ndarray:
        with drawing(Draws(keys)), of_layer(jnp.int32(layer)):
            return np.asarray(dropped(ones, rate, projection, sharded=False))

    np.testing.assert_array_equal(dropped(ones, 0.25, 3, sharded=False), ones)  # outside a training step
    first = draw()
    assert set(np.unique(first)) == {np.float32(0), np.float32(1 / 0.75)}
    for axis in (0, 1):  # no feature and no token that is dropped more than others
        size = first.shape[axis]
        spread = ((first == 0).mean(axis) - 0.25) / np.sqrt(0.25 * 0.75 / size)
        assert abs(spread).max() < 5
        assert 0.9 < spread.std() < 1.1 or axis == 0
    others = [draw(layer=1), draw(projection=4)]
    for other in others:  # two draws agree as often as independent ones
        np.testing.assert_allclose(((first == 0) == (other == 0)).mean(), 0.25**2 + 0.75**2, atol=0.005)
