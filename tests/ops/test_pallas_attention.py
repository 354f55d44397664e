"""Attention by Pallas kernels, interpreted, equals attention of every query alone, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.attention import pallas
from jaxthd.ops.attention.blockwise import BACKEND as BLOCKWISE
from jaxthd.ops.attention.contract import Call
from jaxthd.ops.attention.pallas import BACKEND, Tiles
from jaxthd.ops.attention.relative import distances, relative_attention
from jaxthd.packing.intervals import key_intervals

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


WINDOW = [(max(0, i - 4), i + 1) for i in range(20)] + [(max(20, i - 4), i + 1) for i in range(20, 45)]
SHARED = [(0, 9)] * 7 + [(0, 9)] * 3 + [(11, 30)] * 20
"""Two runs of queries that see the same keys, as in a prefix call."""
ANY = SEEN | {"window": (WINDOW, 45), "shared": (SHARED, 31)}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas, "FORWARD", Tiles(16, 8, 4))
    monkeypatch.setattr(pallas, "BACKWARD", Tiles(8, 16, 4))


OTHERS = [
    pytest.param(name, marks=pytest.mark.exhaustive) for name in ANY if name not in ("causal", "shared")
]


@pytest.mark.parametrize("name", ["causal", "shared", *OTHERS])
def test_equals_every_query_alone_in_float64(name: str):
    """With the output and the log-sum-exp over more keys than the call's, as in a ring, it equals the
    blockwise call."""
    (seen, keys), rng = ANY[name], np.random.default_rng(0)
    with jax.enable_x64(True):
        lo, hi = jnp.asarray(seen, jnp.int32).T
        shapes = (len(seen), 4, 6), (keys, 2, 6), (keys, 2, 5), (len(seen), 4, 5)
        q, k, v, dout = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
        call = Call(key_intervals(lo, hi, 8), False, 8, None)

        @jax.jit
        def both(*given):
            out, lse = BACKEND.forward(*given, call, 0.4)
            return out, lse, BACKEND.backward(*given, out, lse, dout, call, 0.4)

        out, lse, gradients = both(q, k, v)
        want, want_pull = jax.vjp(lambda q, k, v: dense(q, k, v, lo, hi, 0.4), q, k, v)
        for a, b in zip((out, *gradients), (want, *want_pull(dout)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        given = q, k, v, out + 1, jnp.logaddexp(lse, 0.5), dout, call, 0.4
        for a, b in zip(BACKEND.backward(*given), BLOCKWISE.backward(*given), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


CLIPS = {"ragged": ([1, 20, 7, 9, 13], 3), "longest": ([17, 17, 17], 0)}


@pytest.mark.parametrize("name", CLIPS)
def test_relative_positions_equal_every_clip_alone_in_float64(name: str):
    (lengths, padding), rng, heads, dim = CLIPS[name], np.random.default_rng(0), 2, 4
    ends, longest = np.cumsum(lengths), max(lengths)
    hi, lo = (np.pad(np.repeat(x, lengths), (0, padding)) for x in (ends, ends - lengths))
    n = len(hi)
    with jax.enable_x64(True):
        lo, hi = (jnp.asarray(x, jnp.int32) for x in (lo, hi))
        far_by = distances(longest)
        shapes = *[(n, heads, dim)] * 3, (len(far_by), heads, dim), (n, heads, 5)
        arrays = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
        place = {int(by): w for w, by in enumerate(far_by)}

        def alone(q, k, position, far, v):
            outs = []
            for end, length in zip(ends, lengths, strict=True):
                own = slice(end - length, end)
                at = jnp.asarray([[place[i - j] for j in range(length)] for i in range(length)])
                scores = jnp.einsum("nhd,shd->nhs", q[own], k[own])
                scores += jnp.einsum("nhd,nshd->nhs", position[own], far[at])
                outs.append(jnp.einsum("nhs,shv->nhv", jax.nn.softmax(0.7 * scores), v[own]))
            return jnp.concatenate([*outs, jnp.zeros((padding, heads, 5))])

        def ours(*given):
            return relative_attention(*given, lo, hi, 0.7, longest)

        assert not ours(*arrays)[n - padding :].any()
        results = []
        for attend in (ours, alone):
            out, pull = jax.vjp(jax.jit(attend), *arrays)
            results.append((out, *pull(jnp.sin(3.0 * jnp.arange(out.size)).reshape(out.shape))))
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_clip_that_is_too_long_is_not_silently_wrong():
    lo, hi = jnp.asarray([[0, 3]] * 3 + [[3, 9]] * 6, jnp.int32).T
    x = jnp.ones((9, 1, 4))
    out = relative_attention(x, x, x, jnp.ones((64, 1, 4)), x, lo, hi, 0.7, 5)
    assert np.isnan(out[3:]).all()
    assert np.isfinite(out[:3]).all()
