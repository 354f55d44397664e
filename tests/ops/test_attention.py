"""Attention over intervals of keys, with query blocks of another size than key blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.attention.blockwise import attention_forward
from jaxthd.packing.intervals import key_intervals

BLOCK = 8
INTERVALS = [(0, 5), (5, 6), (6, 30), (0, 0), (30, 41), (41, 50), (40, 50), (3, 3), (7, 9), (49, 50), (0, 50)]
"""The interval of 50 keys that each of 11 queries sees."""


@pytest.mark.parametrize("query_block", [None, 1, 3, 11, 16])
def test_queries_in_blocks_of_any_size_see_their_intervals(query_block: int | None):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, heads, 4)).astype(np.float32) for n, heads in ((11, 4), (50, 2), (50, 2)))
    lo, hi = jnp.asarray(INTERVALS, jnp.int32).T
    intervals = key_intervals(lo, hi, BLOCK, query_block)
    forward = jax.jit(attention_forward, static_argnums=(4, 5, 6))
    out, lse = map(np.asarray, forward(q, k, v, intervals, 0.5, BLOCK, query_block))
    for i, (first, end) in enumerate(INTERVALS):
        for head in range(4):
            scores = 0.5 * k[first:end, head // 2].astype(float) @ q[i, head]
            weights = np.exp(scores)
            total = weights.sum()
            want = weights @ v[first:end, head // 2] / max(total, 1e-300)
            np.testing.assert_allclose(out[i, head], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                lse[i, head], np.log(total) if total else -np.inf, rtol=1e-5, atol=1e-6
            )
    touched = int((intervals.blocks[:, 1] - intervals.blocks[:, 0]).sum())
    least = sum(-(-end // BLOCK) - first // BLOCK for first, end in INTERVALS if end > first)
    assert touched == least if query_block == 1 else touched < least
