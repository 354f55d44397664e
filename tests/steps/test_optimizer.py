"""Every optimizer updates each matrix as optax updates that matrix alone, whatever the mesh, in float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxthd.config import Config, MeshConfig, TrainConfig
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer import clipped, learning_rate_schedule, make_optimizer
from jaxthd.steps.optimizer_kinds import AdamW, Trained
from jaxthd.steps.state import abstract_state, state_shardings
from tests.meshes.runs import variants
from tests.weights import random_state

MESH = MeshConfig(2, 1, 2, 2)
OTHER_MESHES = [MeshConfig(1, 2, 1, 4), MeshConfig(8), MeshConfig(2, 2, 2, 1, fsdp=False)]
OPTIONS = {"adafactor": ("min_dim_size_to_factor=8",), "lion": (), "muon": ()}
# A schedule with a slope is computed in float32, whose rounding depends on the program.
TRAIN = TrainConfig(warmup_steps=0, schedule="constant", learning_rate=1e-2, weight_decay=0.1)
UPDATES = 3
STACKS = {"layers", "blocks", "depths"}
"""Modules whose arrays have a leading dim of layers, blocks or depths."""
BIASES = {"content_bias", "position_bias"}
NO_MATRIX = {"embedding", "head", "conv_x", "conv_b", "conv_c", "depthwise", *BIASES}


def run_config(mesh: MeshConfig, optimizer: str) -> Config:
    """Interleaved or uneven stages, two depths of multi-token prediction with weights of their own."""
    chosen = variants(mesh)[-1]
    llm = replace(chosen.model.llm, mtp_pattern="E", mtp_depths=2, mtp_shared=False)
    return replace(
        chosen,
        model=replace(chosen.model, llm=llm),
        compute=replace(chosen.compute, dtype="float64"),
        train=replace(TRAIN, optimizer=optimizer, optimizer_options=OPTIONS[optimizer]),
    )


def named(tree: Any) -> dict[tuple[str, ...], np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {tuple(key.key for key in path): np.asarray(x) for path, x in leaves}


@cache
def weights_and_gradients() -> tuple[Any, list[Any]]:
    """In the checkpoint layout; the gradients of a few updates."""
    model = Blueprint(run_config(MeshConfig(), "muon")).canonical_model
    drawn = [random_state(model, seed)[1] for seed in range(UPDATES + 1)]
    return drawn[0], drawn[1:]


def singles(name: tuple[str, ...], x: np.ndarray) -> Iterator[np.ndarray]:
    """The parameters that an array stacks, each by itself."""
    stacked = any(part in STACKS for part in name[:-1])
    dims = stacked + (name[-1] in ("up", "down"))  # of experts
    yield from x.reshape(-1, *x.shape[dims:]) if dims else [x]


def is_matrix(name: tuple[str, ...], x: np.ndarray) -> bool:
    is_conv = "subsampling" in name and name[-1] == "w" and name[-2] not in ("pointwise", "out")
    return x.ndim == 2 and name[-1] not in NO_MATRIX and not is_conv


def by_optax(optimizer: str, name: tuple[str, ...], x: np.ndarray) -> optax.GradientTransformation:
    rates = learning_rate_schedule(Config(train=TRAIN))
    decay = TRAIN.weight_decay * (x.ndim == 2 and is_decayed(name))
    if optimizer == "lion":
        return optax.lion(rates, weight_decay=decay)
    if optimizer == "adafactor":
        alone = optax.adafactor(rates, min_dim_size_to_factor=8)
        decayed = optax.chain(optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rates))
        return added(alone, decayed)
    if is_matrix(name, x):
        return optax.contrib.muon(rates, weight_decay=decay, consistent_rms=0.2)
    return optax.adamw(rates, b1=0.9, b2=0.95, weight_decay=decay)


def updated(optimizer: optax.GradientTransformation, gradient: Any, state: Any, params: Any) -> Any:
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def is_decayed(name: tuple[str, ...]) -> bool:
    return name[-1] not in BIASES


def added(one: optax.GradientTransformation, other: optax.GradientTransformation) -> Any:
    """The sum of an optimizer's updates, and those that another makes of gradients that are 0."""

    def init(params: Any) -> Any:
        return one.init(params), other.init(params)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        first, one_state = one.update(gradients, state[0], params)
        second, other_state = other.update(gradients * 0, state[1], params)
        return first + second, (one_state, other_state)

    return optax.GradientTransformation(init, update)


@cache
def alone(optimizer: str) -> dict[tuple[str, ...], np.ndarray]:
    """The parameters after the updates, each matrix updated by itself, by optax."""
    compiled: dict[Any, Any] = {}
    params, gradients = weights_and_gradients()
    found = {}
    of_updates = [named(tree) for tree in gradients]
    for name, x in named(params).items():
        results = []
        for number, one in enumerate(singles(name, x)):
            mine = by_optax(optimizer, name, one)
            key = one.shape, is_matrix(name, one), is_decayed(name)
            update = compiled.setdefault(key, jax.jit(partial(updated, mine)))
            value, state = one, mine.init(one)
            for tree in of_updates:
                value, state = update(list(singles(name, tree[name]))[number], state, value)
            results.append(value)
        found[name] = np.stack(results).reshape(x.shape)
    return found


@pytest.mark.parametrize(
    ("optimizer", "mesh_config"),
    [
        *((optimizer, MESH) for optimizer in OPTIONS if optimizer != "adafactor"),
        pytest.param("adafactor", MESH, marks=pytest.mark.exhaustive),
        *(
            pytest.param(optimizer, mesh, marks=pytest.mark.exhaustive)
            # Lion's update of a number depends on no other number.
            for optimizer, mesh in product(("adafactor", "muon"), OTHER_MESHES)
        ),
    ],
)
def test_each_matrix_is_updated_as_if_it_were_alone_on_one_device(optimizer: str, mesh_config: MeshConfig):
    config = run_config(mesh_config, optimizer)
    mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
    with jax.enable_x64(True):
        on = state_shardings(blueprint, mesh)
        update = jax.jit(
            partial(updated, make_optimizer(blueprint, mesh)), out_shardings=(on.params, on.opt_state)
        )
        params, gradients = weights_and_gradients()
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_state(blueprint).opt_state)
        got, state = (
            jax.device_put(to_stages(tree, blueprint.stages), where)
            for tree, where in ((params, on.params), (zeros, on.opt_state))
        )
        for tree in gradients:
            got, state = update(jax.device_put(to_stages(tree, blueprint.stages), on.params), state, got)
        canonical = from_stages(jax.device_get(got), blueprint.stages)
        padded = to_stages(canonical, blueprint.stages)
        jax.tree.map(np.testing.assert_array_equal, got, padded)  # padding stays 0
        want = alone(optimizer)
        for name, x in named(canonical).items():
            np.testing.assert_allclose(x, want[name], rtol=1e-10, atol=1e-10, err_msg=str(name))


def test_adamw_rounds_its_first_moment_after_the_update():
    """By hand in float64; the second moment is not rounded."""
    b1, b2, rate, rng = 0.8, 0.97, 1e-2, np.random.default_rng(0)
    trained = Trained(TRAIN, lambda _: rate, True, True, 0, None, None)
    adamw = AdamW(b1, b2, first_moment="bfloat16").transformation(trained)
    weight, *gradients = rng.normal(size=(1 + UPDATES, 5, 4))
    wanted, m, v = weight, np.zeros_like(weight), np.zeros_like(weight)
    with jax.enable_x64(True):
        value, state = jnp.asarray(weight), adamw.init(jnp.asarray(weight))
        for t, g in enumerate(gradients, 1):
            value, state = updated(adamw, jnp.asarray(g), state, value)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            ahead = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
            wanted = wanted - rate * (ahead + TRAIN.weight_decay * wanted)
            m = m.astype(jnp.bfloat16).astype(np.float64)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        dtypes = {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
        assert dtypes == {"bfloat16", "float64"}


@pytest.mark.parametrize("most", [0.5, 100.0])
def test_clipping_by_a_known_norm_is_optax_s(most: float):
    rng = np.random.default_rng(0)
    gradients = {
        "a": rng.normal(size=(3, 4)).astype(np.float32),
        "b": [rng.normal(size=5).astype(np.float32)],
    }
    found = clipped(gradients, most, optax.tree.norm(gradients))
    jax.tree.map(np.testing.assert_array_equal, found, clipped(gradients, most))
