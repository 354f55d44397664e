"""Attention of all blocks at once equals attention of every query alone, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.attention import batched
from jaxthd.ops.attention.batched import BACKEND
from jaxthd.ops.attention.blockwise import BACKEND as BLOCKWISE
from jaxthd.ops.attention.contract import Call
from jaxthd.packing.intervals import key_intervals

BLOCK = 8
CAUSAL = [(0, i + 1) for i in range(3)] + [(3, i + 1) for i in range(3, 30)] + [(0, 0)] * 2
"""Documents of 3 and 27 tokens, then padding."""
WHOLE = [(0, 11)] * 11 + [(11, 12)] + [(12, 40)] * 28 + [(0, 0)] * 4
REMOTE = [(0, 0)] * 5 + [(20, 37)] * 9 + [(1, 2)] * 3
SEEN = {
    "causal": (CAUSAL, len(CAUSAL)),
    "whole": (WHOLE, len(WHOLE)),
    "remote": (REMOTE, 41),
    "none": ([(0, 0)] * 10, 9),
}
"""Name -> (the interval that each query sees, the number of keys)."""


def dense(q, k, v, lo, hi, scale: float):
    """Every query with every key, in one softmax."""
    keys = jnp.arange(len(k))
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])
    kv = [jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v)]
    scores = jnp.where(seen[:, None], scale * jnp.einsum("nhd,shd->nhs", q, kv[0]), -1e30)
    weights = jnp.where(seen.any(1)[:, None, None], jax.nn.softmax(scores), 0)
    return jnp.einsum("nhs,shv->nhv", weights, kv[1])


@pytest.fixture(params=[batched.PAIRS, 8], ids=["one group", "groups of two"], autouse=True)
def _groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "PAIRS", request.param)


@pytest.mark.parametrize("name", SEEN)
def test_equals_every_query_alone_in_float64(name: str):
    (seen, keys), rng = SEEN[name], np.random.default_rng(0)
    with jax.enable_x64(True):
        lo, hi = jnp.asarray(seen, jnp.int32).T
        shapes = (len(seen), 4, 6), (keys, 2, 6), (keys, 2, 5), (len(seen), 4, 5)
        q, k, v, dout = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
        intervals = key_intervals(lo, hi, BLOCK)
        call = Call(intervals, False, BLOCK, None)
        out, lse = jax.jit(lambda q, k, v: BACKEND.forward(q, k, v, call, 0.4))(q, k, v)
        gradients = jax.jit(lambda *x: BACKEND.backward(*x, call, 0.4))(q, k, v, out, lse, dout)
        want, want_pull = jax.vjp(lambda q, k, v: dense(q, k, v, lo, hi, 0.4), q, k, v)
        for a, b in zip((out, *gradients), (want, *want_pull(dout)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SEEN)
def test_a_call_equals_the_blockwise_one(name: str):
    """With the output and the log-sum-exp over more keys than the call's, as in a ring."""
    (seen, keys), rng = SEEN[name], np.random.default_rng(1)
    with jax.enable_x64(True):
        lo, hi = jnp.asarray(seen, jnp.int32).T
        shapes = (len(seen), 4, 6), (keys, 2, 6), (keys, 2, 6), *[(len(seen), 4, 6)] * 2
        q, k, v, out, dout = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
        call = Call(key_intervals(lo, hi, BLOCK), False, BLOCK, None)
        results = []
        for backend in (BACKEND, BLOCKWISE):
            part, lse = jax.jit(lambda q, k, v, b=backend: b.forward(q, k, v, call, 0.3))(q, k, v)
            total = jnp.logaddexp(lse, 0.5)
            gradients = jax.jit(lambda *x, b=backend: b.backward(*x, call, 0.3))(q, k, v, out, total, dout)
            results.append((part, jnp.exp(lse), *gradients))
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_groups_take_every_pair_once():
    """Ranges of 3, 0, 1 and 2 blocks in groups of two: 3 + 2 + 1 pairs, in 2 + 1 + 1 groups."""
    ranges = jnp.asarray([(0, 3), (0, 0), (2, 3), (1, 3)], jnp.int32)
    groups = batched._Groups.of(ranges, 3, 2)
    found = [np.stack(groups.pairs(jnp.int32(i), 2), 1) for i in range(int(groups.turns))]
    assert len(found) == 2 + 1 + 1
    pairs = [tuple(pair) for group in found for pair in group if pair[0] < len(ranges)]
    assert sorted(pairs) == [(0, 0), (0, 1), (0, 2), (2, 2), (3, 1), (3, 2)]
    assert all(len({own for own, _ in group}) == 2 for group in found)
