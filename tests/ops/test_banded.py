"""A band of large products equals attention of every clip alone, gradients included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.attention.banded import banded_attention
from jaxthd.ops.attention.dense import dense_attention

H, D, X, V = 2, 3, 4, 5
CLIPS = {
    "ragged": ([1, 20, 7, 9, 13], 3),
    "longest fills its window": ([17, 17, 17], 0),
    "one, and padding": ([5], 30),
}
"""Name -> (lengths of clips, padding)."""


def given(lengths: list[int], padding: int):
    """(arrays, lo, hi, ids)."""
    rng, ends = np.random.default_rng(0), np.cumsum(lengths)
    n = int(ends[-1]) + padding
    hi = np.pad(np.repeat(ends, lengths), (0, padding))
    lo = np.pad(np.repeat(ends - lengths, lengths), (0, padding))
    ids = np.pad(np.repeat(np.arange(1, len(lengths) + 1), lengths), (0, padding))
    shapes = (n, H, D), (n, H, D), (n, H, X), (n, X), (n, H, V)
    arrays = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
    return arrays, *(jnp.asarray(x, jnp.int32) for x in (lo, hi, ids))


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("block", [4, 16, 64])
def test_equals_dense_attention_in_float64(name: str, block: int):
    lengths, padding = CLIPS[name]
    with jax.enable_x64(True):
        arrays, lo, hi, ids = given(lengths, padding)
        real = ids[:, None, None] > 0
        waves = arrays.pop(3)

        def ours(q, k, position, v):
            band = partial(banded_attention, scale=0.7, block=block, longest=max(lengths))
            return band(q, k, position, waves, v, lo, hi)

        def dense(q, k, position, v):
            row = [x[None] for x in (q, k, position, waves, v, ids, ids)]
            return jnp.where(real, dense_attention(*row, 0.7)[0], 0)

        results = []
        for attend in (ours, dense):
            out, pull = jax.vjp(jax.jit(attend), *arrays)
            results.append(
                (out, *pull(jnp.where(real, jnp.sin(3.0 * jnp.arange(out.size)).reshape(out.shape), 0)))
            )
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_clip_that_is_too_long_is_not_silently_wrong():
    arrays, lo, hi, ids = given([3, 6, 2], 1)
    out = banded_attention(*arrays, lo, hi, 0.7, 4, 5)
    assert (np.isnan(out).all((1, 2)) == (np.asarray(ids) == 2)).all()
    assert np.isfinite(np.asarray(out)[np.asarray(ids) != 2]).all()
