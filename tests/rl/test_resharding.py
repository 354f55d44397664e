"""Weights arrive on another mesh as they are, in their shards, with little memory beside both copies."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import MLP, Attention
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.parallel.mesh import make_mesh
from jaxthd.rl.resharding import (
    PART_BYTES,
    Leaf,
    Resharding,
    empty_program,
    layer_program,
    same_devices,
)
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import state_shardings
from tests.weights import random_state

ENCODER = EncoderConfig(layers=2, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16)
MODEL = ModelConfig(
    encoder=None,
    llm=LLMConfig(
        pattern="M*--*M-",
        dim=32,
        blocks={"*": Attention(heads=4, kv_heads=2, head_dim=8), "-": MLP(inner=512)},
        vocab_size=264,
    ),
)
SMALL = 2**16
"""Bytes. The MLP's stacks have more: they go layer by layer."""


def blueprint_on(mesh: MeshConfig, encoder: EncoderConfig | None) -> Blueprint:
    config = Config(mesh=mesh, model=replace(MODEL, encoder=encoder))
    return Blueprint(replace(config, compute=replace(config.compute, dtype="bfloat16")))


def bytes_on_a_device() -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if jax.devices()[0] in x.sharding.device_set
    )


@pytest.mark.parametrize(
    ("here", "there", "part_bytes", "encoder"),
    [
        (MeshConfig(1, 2, 2, 2), MeshConfig(4, 1, 2, 1, stages_per_rank=2), SMALL, None),
        pytest.param(
            MeshConfig(2, 2, 2, 1),
            MeshConfig(8, fsdp=False),
            PART_BYTES,
            ENCODER,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(MeshConfig(8), MeshConfig(1, 2, 1, 4), SMALL, ENCODER, marks=pytest.mark.exhaustive),
        pytest.param(
            MeshConfig(2, 1, 2, 2, stages_per_rank=2),
            MeshConfig(2, 1, 4, 1),
            PART_BYTES,
            ENCODER,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_weights_arrive_in_their_shards_part_by_part(
    here: MeshConfig, there: MeshConfig, part_bytes: int, encoder: EncoderConfig | None
):
    """What a device holds meanwhile: both copies, and a part whole, which its program takes and frees."""
    one, other = blueprint_on(here, encoder), blueprint_on(there, encoder)
    mesh = make_mesh(here)
    own = same_devices(mesh, there)
    on, target = state_shardings(one, mesh), state_shardings(other, own)
    _, *drawn = random_state(blueprint_on(MeshConfig(), encoder).model)
    weights = jax.tree.map(lambda x: x.astype(np.float32), drawn)
    held = jax.device_put(to_stages(tuple(weights), one.stages), (on.params, on.buffers))
    resharding = Resharding(one, mesh, other, own, part_bytes=part_bytes)

    live: list[int] = []
    by_layer = 0

    def noted(program: Any, part: list[Leaf]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            nonlocal by_layer
            if isinstance(program, partial):  # compiled programs say what they need
                (leaf,), (x,) = part, arrays
                by_layer, size = by_layer + 1, leaf.bytes // leaf.shape[0]
                compiled = layer_program(leaf).lower(empty_program(leaf)(), x, 0, 0).compile()
            else:
                size = sum(leaf.bytes for leaf in part)
                compiled = program.lower(*arrays).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < 4 * max(size, 4096)
            found = jax.block_until_ready(program(*arrays))
            live.append(bytes_on_a_device())
            return found

        return run

    resharding.parts = [
        (numbers, noted(program, [resharding.leaves[number] for number in numbers]))
        for numbers, program in resharding.parts
    ]
    before = bytes_on_a_device()
    found = resharding(*held)
    copy = bytes_on_a_device() - before

    shared = [leaf.is_there for leaf in resharding.leaves]
    assert any(shared), "what is the same on both meshes is no copy"
    assert max(live) <= before + copy, "nothing is left of a part but its copy"
    assert by_layer == (2 if part_bytes == SMALL else 0)
    jax.tree.map(
        lambda x, on: x.sharding.is_equivalent_to(on, x.ndim) or pytest.fail(f"{x.sharding}, not {on}"),
        found,
        (target.params, target.buffers),
    )
    expected = jax.tree.map(lambda x, dtype: x.astype(dtype), weights[0], one.used_dtypes), weights[1]

    def assert_same(x: Any, y: Any) -> None:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))

    jax.tree.map(assert_same, from_stages(jax.device_get(found), other.stages), expected)
