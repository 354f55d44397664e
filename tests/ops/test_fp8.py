"""FP8 products equal those of numbers rounded to 8 bits, row by row; a model uses them where configured."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxthd.config import ComputeConfig, Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.ops.fp8 import fp8_product
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state
from jaxthd.steps.training import loss_and_gradient, make_train_step
from tests.errors import relative_errors
from tests.helpers import batch_of, filled_state

MODEL = ModelConfig(
    encoder=EncoderConfig(num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4),
    llm=LLMConfig(
        pattern="M*-",
        dim=32,
        blocks={
            "*": Attention(heads=2, kv_heads=1, head_dim=16),
            "-": MLP(inner=64),
            "M": Mamba2(heads=4, head_dim=8),
        },
    ),
)
MLPS = ("decoder.layers.mlp.*",)


def rounded(x: np.ndarray, summed: int, dtype: Any) -> np.ndarray:
    """x rounded to 8 bits, as float64; scaled along `summed` so that the largest value is dtype's."""
    largest = np.abs(x).max(axis=summed, keepdims=True)
    scale = np.where(largest > 0, largest / float(ml_dtypes.finfo(dtype).max), 1).astype(np.float32)
    return (x / scale).astype(dtype).astype(np.float64) * scale.astype(np.float64)


def test_products_are_of_rounded_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(37, 64)).astype(np.float32) * np.exp(rng.normal(size=(37, 1)))
    w, dy = rng.normal(size=(64, 48)) / 8, rng.normal(size=(37, 48)) * 1e-5
    x[3] = dy[5] = 0
    x, w, dy = (v.astype(np.float32) for v in (x, w, dy))
    y, pull = jax.vjp(jax.jit(fp8_product), jnp.asarray(x), jnp.asarray(w))
    dx, dw = pull(jnp.asarray(dy))
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    want = {
        "y": rounded(x, 1, e4m3) @ rounded(w, 0, e4m3),
        "dx": rounded(dy, 1, e5m2) @ rounded(w, 1, e4m3).T,
        "dw": rounded(x, 0, e4m3).T @ rounded(dy, 0, e5m2),
    }
    exact = {"y": x @ w, "dx": dy @ w.T, "dw": x.T @ dy}
    for name, got in {"y": y, "dx": dx, "dw": dw}.items():
        (error,) = relative_errors(got, want[name]).values()
        (rounding,) = relative_errors(got, exact[name]).values()
        assert error < 1e-5, name
        assert 0.01 < rounding < 0.08, name


@pytest.mark.parametrize("tokens", [4, 0])
def test_zeros_stay_zeros_and_the_dtype_stays(tokens: int):
    """Also with no tokens at all, as in a batch without room for audio."""
    x, w = jnp.zeros((tokens, 16), jnp.bfloat16), jnp.zeros((16, 32), jnp.bfloat16)
    y, pull = jax.vjp(jax.jit(fp8_product), x, w)
    for result, shape in zip((y, *pull(y)), ((tokens, 32), x.shape, w.shape), strict=True):
        assert result.dtype == jnp.bfloat16
        assert result.shape == shape
        assert not result.any()


def products_of(jaxpr: Any) -> Counter[str]:
    """Matrix products in a program, including loops and branches, by their operands' types."""
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found["-".join(str(v.aval.dtype) for v in equation.invars)] += 1
        for inner in jaxprs_in_params(equation.params):
            found += products_of(inner)
    return found


def of_step(config: Config) -> Counter[str]:
    mesh = make_mesh(config.mesh)
    state, batch = abstract_state(Blueprint(config)), put_batch(batch_of([5, 20, 11], 1), mesh)
    found = products_of(jax.make_jaxpr(make_train_step(Blueprint(config), mesh))(state, batch).jaxpr)
    return Counter({types: n for types, n in found.items() if "float8" in types})


def test_projections_that_match_are_computed_in_8_bits():
    def config(*patterns: str) -> Config:
        return Config(model=MODEL, compute=ComputeConfig(remat="none", fp8=patterns))

    assert not of_step(config())
    # The up and down projections: one product forward, and one for each gradient.
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    each = {f"{e4m3}-{e4m3}": 1, f"{e5m2}-{e4m3}": 1, f"{e4m3}-{e5m2}": 1}
    assert of_step(config(*MLPS)) == Counter({types: 2 * n for types, n in each.items()})
    assert of_step(config("*.mixer.q", "*.mixer.k")) == Counter({types: 2 * n for types, n in each.items()})


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [MeshConfig(context=2), MeshConfig()], ids=str)
def test_gradients_are_near_those_of_the_plain_model(sizes: MeshConfig):
    mesh = make_mesh(sizes)
    plain = Config(mesh=sizes, model=MODEL)
    state, batch = (
        filled_state(Blueprint(plain), mesh),
        put_batch(batch_of([5, 20, 11, 1, 17], sizes.context), mesh),
    )
    results = []
    for config in (plain, replace(plain, compute=ComputeConfig(fp8=MLPS))):
        results.append(
            jax.jit(loss_and_gradient(Blueprint(config), mesh))(state.params, state.buffers, batch)
        )
    (loss, gradient), (loss8, gradient8) = ((r[0], r[1]) for r in results)
    assert abs(loss8 - loss) < 0.01 * loss
    mlp, mlp8 = (g["decoder"]["layers"]["mlp"]["mixer"] for g in (gradient, gradient8))
    errors = relative_errors(mlp8, mlp)
    assert all(1e-3 < error < 0.2 for error in errors.values()), errors
