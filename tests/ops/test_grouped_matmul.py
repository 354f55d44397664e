"""Grouped matrix products equal every token times its experts, at the cost of the blocks in use."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxthd.ops.grouped_matmul import IN_ROUNDS, combine, dispatch, expert_layout, grouped_matmul
from tests.helpers import assert_same
from tests.ops.test_fp8 import rounded

N, D, F, E = 23, 5, 3, 6
SHAPES = [(1, 4), (2, 8), (3, 5)]
"""(experts a token, rows of a block)."""


def cases(k: int):
    """Name -> (experts of every token, which tokens are routed)."""
    rng = np.random.default_rng(k)
    everyone = np.ones(N, bool)
    spread = np.array([rng.permutation(E)[:k] for _ in range(N)], np.int32)
    among_few = np.array([rng.permutation(k + 1)[:k] for _ in range(N)], np.int32)
    only_one = np.arange(N) == 17
    return {
        "spread over all experts": (spread, everyone),
        "some not routed": (spread, rng.random(N) < 0.6),
        "most experts have no token": (among_few, rng.random(N) < 0.8),
        "all on the same experts": (np.tile(np.arange(E - k, E, dtype=np.int32), (N, 1)), everyone),
        "one token": (spread, only_one),
        "none routed": (spread, ~everyone),
    }


layout_of = jax.jit(expert_layout, static_argnums=(2, 3))


@partial(jax.jit, static_argnums=5)
def through_experts(x_ND, w_EDF, weights_Nk, chosen_Nk, routed_N, block):
    layout = expert_layout(chosen_Nk, routed_N, E, block)
    y_MF = grouped_matmul(dispatch(x_ND, layout), w_EDF, layout.expert, layout.used, layout.ranges)
    return combine(y_MF, weights_Nk, layout)


@jax.jit
def dense(x_ND, w_EDF, weights_Nk, chosen_Nk, routed_N):
    """Token by token: the sum over its experts of weight times x times the expert's matrix."""
    y_NkF = jnp.einsum("nd,nkdf->nkf", x_ND, w_EDF[chosen_Nk])
    return jnp.where(routed_N[:, None], jnp.einsum("nk,nkf->nf", weights_Nk, y_NkF), 0)


@pytest.mark.parametrize(("k", "block"), [*SHAPES, (2, IN_ROUNDS)])
def test_equals_every_token_times_its_experts(k, block):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for chosen, routed in cases(k).values():
            args = [jnp.asarray(rng.normal(size=s)) for s in ((N, D), (E, D, F), (N, k))]
            dy = jnp.asarray(rng.normal(size=(N, F)))
            y, pull = jax.vjp(lambda *args: through_experts(*args, chosen, routed, block), *args)  # noqa: B023
            want, want_pull = jax.vjp(lambda *args: dense(*args, chosen, routed), *args)  # noqa: B023
            dx, _, dweights = gradients = pull(dy)
            assert_same(y, want, 1e-10)
            for got, reference in zip(gradients, want_pull(dy), strict=True):
                assert_same(got, reference, 1e-10)
            assert not np.asarray(y)[~routed].any()
            assert not np.asarray(dx)[~routed].any()
            assert not np.asarray(dweights)[~routed].any()


def test_rounds_go_on_until_the_most_loaded_expert_is_done():
    """200 tokens of two experts, with blocks of 128 rows: two rounds, and none of the others has a block."""
    rng, n = np.random.default_rng(3), 200
    chosen, routed = np.tile(np.array([[1, 4]], np.int32), (n, 1)), np.ones(n, bool)
    with jax.enable_x64(True):
        layout = layout_of(chosen, routed, E, IN_ROUNDS)
        assert layout.ranges is not None
        assert (np.diff(layout.ranges)[:, 0] == [0, 2, 0, 0, 2, 0]).all()
        args = [jnp.asarray(rng.normal(size=s)) for s in ((n, D), (E, D, F), (n, 2))]
        dy = jnp.asarray(rng.normal(size=(n, F)))
        y, pull = jax.vjp(lambda *args: through_experts(*args, chosen, routed, IN_ROUNDS), *args)
        want, want_pull = jax.vjp(lambda *args: dense(*args, chosen, routed), *args)
        for got, reference in zip((y, *pull(dy)), (want, *want_pull(dy)), strict=True):
            assert_same(got, reference, 1e-10)


@pytest.mark.parametrize(("k", "block"), SHAPES)
def test_layout_takes_as_few_blocks_as_the_tokens_of_each_expert_need(k, block):
    """Every assignment also has its own row, in a block of its expert."""
    for chosen, routed in cases(k).values():
        layout = jax.tree.map(np.asarray, layout_of(chosen, routed, E, block))
        load = np.bincount(chosen[routed].ravel(), minlength=E)
        np.testing.assert_array_equal(layout.load, load)
        assert layout.used == np.ceil(load / block).sum()
        size = len(layout.expert) * block
        rows = layout.rows[routed].ravel()
        assert len(set(rows)) == len(rows)
        assert (rows < layout.used * block).all()
        np.testing.assert_array_equal(layout.expert[rows // block], chosen[routed].ravel())
        np.testing.assert_array_equal(layout.tokens[rows], np.repeat(np.flatnonzero(routed), k))
        assert (layout.rows[~routed] == size).all()
        assert (np.delete(layout.tokens, rows) == N).all()


def test_the_largest_number_of_blocks_fits():
    """Each load is one more than whole blocks: no other load with as many assignments takes more blocks."""
    chosen = np.repeat(np.arange(3, dtype=np.int32), [5, 1, 9])[:, None]
    layout = layout_of(chosen, np.ones(15, bool), 3, 4)
    assert layout.used == 2 + 1 + 3 <= len(layout.expert)


@pytest.mark.parametrize(("k", "block"), SHAPES)
def test_blocks_not_in_use_are_not_executed(k, block):
    """NaN in their rows, and in the matrices of experts without tokens, changes no result."""
    chosen, routed = cases(k)["most experts have no token"]
    layout = layout_of(chosen, routed, E, block)
    used = int(layout.used) * block
    rng = np.random.default_rng(0)
    size = len(layout.expert) * block
    x, dy, w = (rng.normal(size=s).astype(np.float32) for s in ((size, D), (size, F), (E, D, F)))
    idle = np.asarray(layout.load) == 0
    assert idle.sum() == E - k - 1
    x[used:], dy[used:], w[idle] = np.nan, np.nan, np.nan
    x, dy, w = map(jnp.asarray, (x, dy, w))
    y, pull = jax.vjp(lambda x, w: jax.jit(grouped_matmul)(x, w, layout.expert, layout.used), x, w)
    dx, dw = pull(dy)
    for z in (y, dx, dw):
        assert np.isfinite(z).all()
    assert not np.asarray(y)[used:].any()
    assert not np.asarray(dx)[used:].any()
    assert not np.asarray(dw)[idle].any()


@pytest.mark.parametrize("block", [4, IN_ROUNDS])
def test_products_in_8_bits_are_of_rounded_numbers(block: int):
    """Each product equals that of operands which are rounded row by row of every block."""
    rng, e4m3, e5m2 = np.random.default_rng(5), ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    chosen, routed = cases(2)["some not routed"]
    layout = layout_of(chosen, routed, E, block)
    x_ND, w_EDF = (rng.normal(size=s).astype(np.float32) for s in ((N, D), (E, D, F)))
    x_MD = np.asarray(dispatch(jnp.asarray(x_ND), layout))
    dy_MF = rng.normal(size=(len(x_MD), F)).astype(np.float32)
    where = layout.expert, layout.used, layout.ranges
    y_MF, pull = jax.vjp(
        lambda x, w: grouped_matmul(x, w, *where, True), jnp.asarray(x_MD), jnp.asarray(w_EDF)
    )
    dx_MD, dw_EDF = pull(jnp.asarray(dy_MF))
    blocks = len(layout.expert)
    x_bBD, dy_bBF = (x.reshape(blocks, -1, x.shape[-1]) for x in (x_MD, dy_MF))
    want_y, want_dx, want_dw = (np.zeros(x.shape) for x in (dy_bBF, x_bBD, w_EDF))
    for b, expert in enumerate(np.asarray(layout.expert)[: int(layout.used)]):
        w, x, dy = w_EDF[expert], x_bBD[b], dy_bBF[b]
        want_y[b] = rounded(x, 1, e4m3) @ rounded(w, 0, e4m3)
        want_dx[b] = rounded(dy, 1, e5m2) @ rounded(w, 1, e4m3).T
        want_dw[expert] += rounded(x, 0, e4m3).T @ rounded(dy, 0, e5m2)
    assert_same(y_MF.reshape(want_y.shape), want_y, 1e-5)
    assert_same(dx_MD.reshape(want_dx.shape), want_dx, 1e-5)
    assert_same(dw_EDF, want_dw, 1e-5)
    exact = np.einsum("bid,bdf->bif", x_bBD, w_EDF[np.asarray(layout.expert)])[: int(layout.used)]
    found = np.asarray(y_MF).reshape(want_y.shape)[: int(layout.used)]
    assert 0.005 < np.abs(found - exact).max() / np.abs(exact).max() < 0.1
