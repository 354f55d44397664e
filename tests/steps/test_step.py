"""The step's settings mean what jaxthd/config says, in every compute dtype."""

import functools
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxthd.config import (
    AdaptConfig,
    ComputeConfig,
    Config,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.parallel.params import Buffer, metadata
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer import learning_rate_schedule
from jaxthd.steps.training import loss_and_gradient, make_train_step
from tests.helpers import batch_of, filled_state
from tests.weights import random_state

MODEL = ModelConfig(
    encoder=EncoderConfig(num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4),
    llm=LLMConfig(
        pattern="ME*-",
        dim=16,
        blocks={"*": Attention(heads=2, kv_heads=1, head_dim=8), "M": Mamba2(heads=4, head_dim=8)},
    ),
    adapter_dim=8,
)


def test_weight_decay_is_on_weight_matrices_only():
    mask = metadata(nnx.state(Blueprint(Config(model=MODEL)).model, nnx.Param), "decayed")
    flat = {jax.tree_util.keystr(p): m for p, m in jax.tree_util.tree_leaves_with_path(mask)}
    names = {True: set(), False: set()}
    for path, decayed in flat.items():
        names[decayed].add(path.rsplit("['", 1)[1].removesuffix("']"))
    assert {"w", "up", "down", "embedding", "head", "conv_x", "depthwise", "position"} <= names[True]
    assert {"bias", "weight", "a_log", "d", "dt_bias", "conv_bias_x", "content_bias"} <= names[False]
    assert not names[True] & names[False]


def test_learning_rate_warms_up_peaks_and_ends_at_the_minimum():
    train = TrainConfig(steps=100, warmup_steps=10, learning_rate=1e-3, min_learning_rate=1e-5)
    config = Config(train=train)
    rates = np.array([learning_rate_schedule(config)(i) for i in range(100)])
    np.testing.assert_allclose(rates[[0, 4, 9, 99]], [1e-4, 5e-4, 1e-3, 1e-5], rtol=1e-5)
    assert (np.diff(rates[9:]) < 0).all()


@pytest.mark.parametrize(
    ("schedule", "at_60", "at_90"),
    [
        ("linear", 1e-3 * 40 / 90 + 1e-5 * 50 / 90, 1e-3 * 10 / 90 + 1e-5 * 80 / 90),
        ("constant", 1e-3, 1e-3),
        ("warmup_stable_decay", 1e-3, 1e-3 / 2 + 1e-5 / 2),
    ],
)
def test_the_other_schedules_are_lines(schedule: Any, at_60: float, at_90: float):
    """Rates of the steps 1, 10 (the end of the warm-up), 60, 90, 100 and, since a run may go on, 101."""
    train = TrainConfig(steps=100, warmup_steps=10, decay_steps=20, schedule=schedule)
    rates = [float(learning_rate_schedule(Config(train=train))(i)) for i in (0, 9, 59, 89, 99, 100)]
    end = 1e-3 if schedule == "constant" else 1e-5
    np.testing.assert_allclose(rates, [1e-4, 1e-3, at_60, at_90, end, end], rtol=1e-5)


def test_the_updates_of_a_step_have_one_learning_rate():
    train = TrainConfig(steps=20, warmup_steps=5)
    once, thrice = (Config(train=train, rollout=RolloutConfig(updates=n)) for n in (1, 3))
    rates = [
        [float(learning_rate_schedule(config)(i)) for i in range(20 * n)]
        for config, n in ((once, 1), (thrice, 3))
    ]
    assert rates[1] == np.repeat(rates[0], 3).tolist()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "warmup_stable_decay"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (10, 10)])
def test_short_runs_have_a_learning_rate(steps: int, warmup: int, schedule: Any):
    rates = [
        learning_rate_schedule(
            Config(train=TrainConfig(steps=steps, warmup_steps=warmup, schedule=schedule))
        )(i)
        for i in range(steps)
    ]
    assert min(rates) > 0


def test_bfloat16_is_near_float32_and_everything_is_finite():
    """Without experts, whose choice rounding can flip. Gradients are compared in the decoder only: those of
    the tiny random encoder change by 170% when only weights and features are rounded to bfloat16.
    """
    sizes = MeshConfig(context=2)
    mesh = make_mesh(sizes)
    batch = put_batch(batch_of([5, 20, 11, 1, 17], 2), mesh)
    model = replace(MODEL, llm=replace(MODEL.llm, pattern="M*-"))
    state = filled_state(Blueprint(Config(mesh=sizes, model=model)), mesh)
    results = []
    for dtype in ("float32", "bfloat16"):
        config = Config(mesh=sizes, model=model, compute=ComputeConfig(dtype=dtype))
        results.append(
            jax.jit(loss_and_gradient(Blueprint(config), mesh))(state.params, state.buffers, batch)
        )
    (loss, gradients, *_), (low_loss, low_gradients, low_buffers, *_) = jax.device_get(results)
    np.testing.assert_allclose(low_loss, loss, rtol=1e-2)
    assert {x.dtype for x in jax.tree.leaves((low_gradients, low_buffers))} == {np.dtype(np.float32)}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((low_gradients, low_buffers)))
    for part in ("decoder", "embedding", "head"):
        low, full = (_flat(found[part]) for found in (low_gradients, gradients))
        assert np.linalg.norm(low - full) < 0.05 * np.linalg.norm(full)


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_gradients_in_the_compute_dtype_are_those_in_float32_but_for_rounding():
    """Of the matrices that are cast; all others are the same to the bit. The router, gates and LoRA's
    matrices are used in float32."""
    llm = MODEL.llm.with_settings("*", heads=2, gate=True).with_settings("E", shared_inner=16)
    config = Config(
        model=ModelConfig(encoder=None, llm=llm),
        compute=ComputeConfig(dtype="bfloat16"),
        adapt=AdaptConfig(lora_rank=2, lora_targets=("*.q", "*.up"), freeze=("!*",)),
    )
    blueprint, mesh = Blueprint(config), make_mesh(MeshConfig())
    state = filled_state(blueprint, mesh)
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"audio_capacity": 0, "front_end": FastConformer(num_mels=16), "max_documents": 8}
    documents = [
        Document.splice(str(n), rng.integers(4, 260, n).tolist(), [True] * n, [], 3) for n in (5, 20, 11, 1)
    ]
    batch = put_batch(pack_row(documents, capacity=64, **sizes)[0], mesh)
    own, wide = (
        jax.device_get(
            jax.jit(loss_and_gradient(blueprint, mesh, in_compute_dtype=cast))(
                state.params, state.buffers, batch
            ).gradients
        )
        for cast in (True, False)
    )
    assert {x.dtype.name for x in jax.tree.leaves(own)} == {"bfloat16", "float32"}
    assert {x.dtype.name for x in jax.tree.leaves(wide)} == {"float32"}
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(wide), strict=True):
        # What a product in float32 reads is not always rounded to bfloat16 before, as XLA is free to choose.
        allowed = 2**-7 * np.linalg.norm(b) if a.dtype == "bfloat16" else 0
        assert np.linalg.norm(a.astype(np.float32) - b) <= allowed


def test_gradients_of_a_frequent_token_are_summed_in_float32():
    """A bfloat16 sum would stop growing at 256 times its terms."""
    config = Config(model=MODEL, compute=ComputeConfig(dtype="bfloat16"))
    graph, params, buffers = random_state(Blueprint(config).model)
    params = jax.tree.map(np.float32, params)

    def summed(params: Any) -> Any:
        x_ND = nnx.merge(graph, params, buffers).embed_tokens(jnp.zeros(2000, jnp.int32))
        assert x_ND.dtype == np.dtype("bfloat16")
        return x_ND.sum(dtype=np.float32)

    found = jax.grad(summed)(params)["embedding"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], 2000, rtol=1e-6)


@functools.cache
def on_two_ranks() -> tuple[Config, Mesh, Any]:
    """(config, mesh, train step) for the tests below."""
    config = Config(mesh=MeshConfig(context=2), model=MODEL)
    mesh = make_mesh(config.mesh)
    return config, mesh, make_train_step(Blueprint(config), mesh)


def test_an_update_that_is_not_finite_is_skipped_and_counted():
    """A batch with a NaN, then one with an infinity, come between sound ones; they change nothing."""
    config, mesh, step = on_two_ranks()
    sound = batch_of([5, 20, 11, 1, 17], 2)

    def run(batches: list[Batch]) -> tuple[Any, list[Any]]:
        state, metrics = filled_state(Blueprint(config), mesh), []
        for batch in batches:
            state, measured = step(state, put_batch(batch, mesh))
            metrics.append(jax.tree.map(float, measured))
        return jax.tree.map(np.asarray, state), metrics

    def spoilt(value: float) -> Batch:
        mels = sound.features.copy()
        mels[0, np.flatnonzero(sound.frame_mask[0])[3], 5] = value
        return sound._replace(features=mels)

    with_bad, metrics = run([sound, spoilt(np.nan), spoilt(np.inf), sound])
    without, wanted = run([sound, sound])
    assert [m.skipped for m in metrics] == [0, 1, 2, 2]
    assert [m.skipped_in_a_row for m in metrics] == [0, 1, 2, 0]
    assert [m.learning_rate for m in metrics[1:]] == [wanted[1].learning_rate] * 3
    assert not np.isfinite(metrics[1].loss)
    assert metrics[3][:2] == wanted[1][:2]
    assert (with_bad.step, without.step) == (4, 2)
    for part in ("params", "buffers", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(with_bad, part), getattr(without, part))
    assert step._cache_size() == 1


def test_boundaries_are_derived_once_a_step_and_never_in_a_layer(monkeypatch: pytest.MonkeyPatch):
    """Once for the tokens and once for the clips, however many layers there are."""
    calls = []

    def counted(*given: Any, **options: Any) -> Segments:
        calls.append(options)
        return make_segments(*given, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("jaxthd.") and getattr(module, "make_segments", None) is make_segments:
            monkeypatch.setattr(module, "make_segments", counted)
    sizes = MeshConfig(context=2)
    mesh = make_mesh(sizes)
    for pattern in ("ME*-", "ME*-M*-E"):
        blueprint = Blueprint(
            Config(mesh=sizes, model=replace(MODEL, llm=replace(MODEL.llm, pattern=pattern)))
        )
        batch = put_batch(batch_of([5, 20, 11, 1, 17], 2), mesh)
        state = (nnx.to_pure_dict(nnx.state(blueprint.model, kind)) for kind in (nnx.Param, Buffer))
        calls.clear()
        jax.make_jaxpr(loss_and_gradient(blueprint, mesh))(*state, batch)
        assert len(calls) == 2


def test_a_step_reads_nothing_from_the_host_and_writes_nothing_to_it():
    config, mesh, step = on_two_ranks()
    state = filled_state(Blueprint(config), mesh)
    batch = put_batch(batch_of([5, 20, 11, 1, 17], 2), mesh)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, _ = step(state, batch)
    text = step.lower(state, batch).as_text()
    assert not [name for name in ("callback", "infeed", "outfeed") if name in text]
    assert int(state.step) == 2
    assert step._cache_size() == 1
