"""The training state on the mesh: each rank holds its shard; a saved state is the same for every mesh."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxthd.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import (
    TrainState,
    abstract_state,
    canonical_shardings,
    checkpoint_layout,
    device_layout,
    init_state,
    state_shardings,
)
from jaxthd.steps.training import make_train_step
from tests.helpers import filled_state
from tests.meshes.batches import CAPACITY, batch_for, documents
from tests.meshes.runs import variants

MESH = MeshConfig(2, 1, 2, 2)


def config(mesh: MeshConfig, **train: float) -> Config:
    """The config of the second variant of tests/meshes/runs.py: uneven or interleaved stages."""
    chosen = variants(mesh)[-1]
    return replace(chosen, train=TrainConfig(**(vars(chosen.train) | {"warmup_steps": 0} | train)))


@functools.cache
def new_state(config: Config) -> TrainState:
    return init_state(Blueprint(config), make_mesh(config.mesh))


def with_mtp(config: Config) -> Config:
    """Adds two depths of multi-token prediction, with their own weights."""
    llm = replace(config.model.llm, mtp_pattern="E", mtp_depths=2, mtp_shared=False)
    return replace(config, model=replace(config.model, llm=llm))


def bytes_on_a_device(state: TrainState, name: str) -> int:
    leaves = jax.tree.leaves(getattr(state, name))
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def test_a_device_holds_its_part_of_parameters_and_moments():
    """Each of 8 devices holds nearly an eighth. It is twice that where each of a rank's two stages has half
    of the layer kinds: the stages are padded."""
    alone = config(MeshConfig())
    whole = new_state(alone)
    wide = config(MeshConfig(8))
    divided = filled_state(Blueprint(wide), make_mesh(wide.mesh))
    for mesh, state, most in ((wide.mesh, divided, 0.16), (MESH, new_state(config(MESH)), 0.26)):
        for name in ("params", "opt_state"):
            part = bytes_on_a_device(state, name) / bytes_on_a_device(whole, name)
            assert 0.124 < part < most, (mesh, name, part)


def test_a_new_run_has_the_same_parameters_on_every_mesh():
    alone, piped = (config(mesh) for mesh in (MeshConfig(), MESH))
    got = checkpoint_layout(new_state(piped), Blueprint(piped), make_mesh(MESH))
    jax.tree.map(np.testing.assert_array_equal, got, new_state(alone))


@pytest.mark.parametrize(
    "mesh_config", [MESH, pytest.param(MeshConfig(1, 2, 4, 1), marks=pytest.mark.exhaustive)]
)
def test_the_saved_form_goes_there_and_back_and_takes_no_more_room(mesh_config: MeshConfig):
    chosen, mesh = with_mtp(config(mesh_config)), make_mesh(mesh_config)
    state = filled_state(Blueprint(chosen), mesh)
    saved = checkpoint_layout(state, Blueprint(chosen), mesh)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), saved) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_state(Blueprint(chosen))
    )
    assert jax.tree.map(lambda x: x.sharding, saved) == canonical_shardings(Blueprint(chosen), mesh)
    assert bytes_on_a_device(saved, "params") <= 1.1 * bytes_on_a_device(state, "params")
    again = device_layout(saved, Blueprint(chosen), mesh)
    assert jax.tree.map(lambda x: x.sharding, again) == state_shardings(Blueprint(chosen), mesh)
    jax.tree.map(np.testing.assert_array_equal, again, state)


def batch(chosen: Config) -> Batch:
    return put_batch(batch_for(chosen), make_mesh(chosen.mesh))


@pytest.mark.exhaustive
def test_steps_on_a_pipeline_are_those_of_one_device():
    """Three steps with clipping, AdamW, the router's biases and every auxiliary loss; one compilation."""
    settings = {"learning_rate": 1e-2, "router_bias_rate": 1e-2, "ctc_loss": 0.3, "ctc_max_labels": 5}
    results = []
    for mesh_config in (MeshConfig(), MESH):
        chosen = with_mtp(config(mesh_config, **settings))
        mesh = make_mesh(mesh_config)
        step = make_train_step(Blueprint(chosen), mesh)
        state, metrics = filled_state(Blueprint(chosen), mesh), []
        for _ in range(3):
            state, measured = step(state, batch(chosen))
            metrics.append(jax.tree.map(float, measured))
        assert step._cache_size() == 1
        results.append(
            (metrics, jax.tree.map(np.asarray, checkpoint_layout(state, Blueprint(chosen), mesh).buffers))
        )
    (alone, buffers), (piped, piped_buffers) = results
    for a, b in zip(alone, piped, strict=True):
        np.testing.assert_allclose(*(jax.tree.leaves(metrics) for metrics in (b, a)), rtol=2e-4)
    assert alone[2].loss < alone[0].loss
    assert alone[2].mtp_loss < alone[0].mtp_loss
    assert alone[2].ctc_loss < alone[0].ctc_loss
    assert alone[0].ctc_uncovered == pytest.approx(21 / 37)
    for module in ("decoder", "mtp"):
        biases, piped_biases = (
            b[module]["layers"]["moe"]["mixer"]["correction_bias"] for b in (buffers, piped_buffers)
        )
        np.testing.assert_allclose(piped_biases, biases, atol=1e-6)
        # Each bias moved by a hundredth a step, up or down, and not all in the same direction.
        assert biases.max() > 0 > biases.min()
        assert np.abs(biases).max() <= 0.03 + 1e-6


def experts_alone(**train: float) -> tuple[Config, Batch]:
    """(a text-only model of one Mamba2 and one MoE layer, the documents without audio)."""
    chosen = config(MeshConfig(), **train)
    llm = replace(chosen.model.llm, pattern="ME")
    chosen = replace(chosen, model=ModelConfig(encoder=None, llm=llm))
    sizes: dict[str, int] = {"capacity": CAPACITY, "audio_capacity": 0, "max_documents": 16}
    rows = [[one for one in row if not one.pieces] for row in documents()]
    return chosen, concatenate_rows([pack_row(row, **sizes)[0] for row in rows])


@pytest.mark.exhaustive
def test_the_biases_even_out_the_experts_load():
    """Nothing else is trained: the fullest expert's load falls towards the mean."""
    rates = {"learning_rate": 0.0, "min_learning_rate": 0.0, "router_bias_rate": 2e-3}
    chosen, host = experts_alone(**rates, aux_loss=0.0)
    mesh = make_mesh(chosen.mesh)
    step, state = make_train_step(Blueprint(chosen), mesh), filled_state(Blueprint(chosen), mesh)
    sound, loads = put_batch(host, mesh), []
    for _ in range(40):
        state, measured = step(state, sound)
        loads.append(float(measured.max_expert_load))
    assert np.mean(loads[-5:]) < 1 + 0.7 * (loads[0] - 1), loads


@pytest.mark.exhaustive
def test_the_auxiliary_loss_evens_out_the_experts_load():
    """Its gradient reaches the router: with it the load's loss falls, without it it need not."""
    found = {}
    for weight in (0.0, 1.0):
        chosen, host = experts_alone(learning_rate=3e-3, router_bias_rate=0.0, aux_loss=weight)
        mesh = make_mesh(chosen.mesh)
        step, state = make_train_step(Blueprint(chosen), mesh), filled_state(Blueprint(chosen), mesh)
        sound = put_batch(host, mesh)
        for _ in range(10):
            state, measured = step(state, sound)
        found[weight] = float(measured.aux_loss)
    assert 1.0 <= found[1.0] < found[0.0]
