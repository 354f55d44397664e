"""The exchange of tokens for heads: all tokens of a head in document order, and back; sums are exact."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.head_exchange import own_heads, scan_segments, to_heads, to_tokens
from jaxthd.packing.segments import Segments
from tests.helpers import CASES, assert_same, on_context, row_arrays, spans

CAPACITY, ROUND_TO, HEADS = 128, 8, 8


def running_sums(x_MhP: jax.Array, segments: Segments) -> jax.Array:
    """At each token the sum over its document up to that token, which needs the tokens in order."""

    def step(sum_hP, token):
        x_hP, position = token
        sum_hP = x_hP + jnp.where(position == 0, 0, sum_hP)
        return sum_hP, sum_hP

    return jax.lax.scan(step, jnp.zeros_like(x_MhP[0]), (x_MhP, segments.positions))[1]


def weighted_sums(w_H: jax.Array, x_NHP: jax.Array, segments: Segments, dtype: type) -> jax.Array:
    weighted_MhP = own_heads(w_H, segments)[:, None] * to_heads(x_NHP, segments)
    return to_tokens(running_sums(weighted_MhP, scan_segments(segments)), segments, dtype)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_sums_over_documents_and_their_gradients_are_those_of_each_alone(context: int):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        mixer = partial(weighted_sums, dtype=np.float64)
        run = on_context(mixer, context, block=8, layout="document", round_to=ROUND_TO)
        for lengths in CASES.values():
            ids, positions = np.stack([row_arrays(lengths, CAPACITY, ROUND_TO)] * 2, axis=1)
            w, (x, dy) = rng.normal(size=HEADS), rng.normal(size=(2, 2, CAPACITY, HEADS, 3))
            dy[ids == 0] = 0
            y, dw, dx = run(w, x, ids, positions, dy)
            want_y, want_dx, want_dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
            for span in spans(lengths, ROUND_TO):
                sums = x[:, span].cumsum(1)
                want_y[:, span] = w[:, None] * sums
                want_dw += (sums * dy[:, span]).sum((0, 1, 3))
                want_dx[:, span] = w[:, None] * dy[:, span, :][:, ::-1].cumsum(1)[:, ::-1]
            assert_same((y[ids > 0], dw, dx), (want_y[ids > 0], want_dw, want_dx), 1e-12)


def test_what_comes_back_was_sent_in_the_dtype_asked_for():
    ids, positions = row_arrays([CAPACITY], CAPACITY)
    x = np.random.default_rng(0).normal(size=(CAPACITY, HEADS, 3)).astype(np.float32)
    run = on_context(
        lambda _, x, segments: to_tokens(to_heads(x, segments), segments, jnp.bfloat16),
        2,
        block=8,
        layout="document",
    )
    y, _, _ = run(None, x, ids, positions, x)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, x.astype(jnp.bfloat16).astype(np.float32))
