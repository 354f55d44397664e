"""The encoder's convolution equals its definition, clip by clip, and so do its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.conv import centered_conv, last_inputs
from jaxthd.packing.segments import make_segments
from tests.errors import relative_errors

IDS = np.repeat([1, 2, 3, 0], [5, 1, 9, 3]).astype(np.int32)
POSITIONS = np.concatenate([np.arange(n) for n in (5, 1, 9)] + [np.zeros(3)]).astype(np.int32)


def by_hand(x_NC: jax.Array, w_KC: jax.Array) -> jax.Array:
    """Each clip alone between zeros; 0 in padding."""
    half, found = len(w_KC) // 2, []
    for clip in np.split(np.flatnonzero(IDS), [5, 6]):
        padded = jnp.pad(x_NC[clip], ((half, half), (0, 0)))
        found += [(w_KC * padded[i : i + len(w_KC)]).sum(0) for i in range(len(clip))]
    return jnp.stack(found + [jnp.zeros_like(found[0])] * (IDS == 0).sum())


def convolved(x_NC: jax.Array, w_KC: jax.Array) -> jax.Array:
    segments = make_segments(jnp.asarray(IDS[None]), jnp.asarray(POSITIONS[None]), block=4, axis=None)
    return jnp.where(IDS[:, None] > 0, centered_conv(x_NC, w_KC, segments), 0)


@pytest.mark.parametrize("taps", [1, 5])
def test_outputs_and_gradients_in_float64(taps: int) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x_NC, dy_NC, w_KC = (jnp.asarray(rng.normal(size=(n, 4))) for n in (len(IDS), len(IDS), taps))
        got, back = jax.vjp(jax.jit(convolved), x_NC, w_KC)
        want, want_back = jax.vjp(by_hand, x_NC, w_KC)
        errors = relative_errors((got, back(dy_NC)), (want, want_back(dy_NC)))
        assert max(errors.values()) < 1e-12, errors


def test_the_backward_pass_keeps_the_inputs_alone() -> None:
    """Also where a policy of recomputation keeps all that the forward pass computes."""
    x_NC, w_KC = jnp.ones((len(IDS), 4), jnp.bfloat16), jnp.ones((5, 4), jnp.bfloat16)
    kept = jax.checkpoint(convolved, policy=jax.checkpoint_policies.everything_saveable)
    out, back = jax.vjp(kept, x_NC, w_KC)
    wide = [x for x in jax.tree.leaves(back) if x.size >= x_NC.size and x.dtype != bool]
    assert len(wide) <= 2, "the input, and the output, which takes no more memory"
    assert all(leaf.dtype == x_NC.dtype for leaf in back(out))


@pytest.mark.parametrize("taps", [1, 3])
def test_a_convolution_keeps_its_last_inputs(taps: int) -> None:
    """Of each document's end; one of a single tap keeps none."""
    x_NC = np.arange(2.0 * len(IDS)).reshape(-1, 2)
    segments = make_segments(jnp.asarray(IDS[None]), jnp.asarray(POSITIONS[None]), block=4, axis=None)
    first, last = jnp.array([[0, 5, 6, -1]], jnp.int32), jnp.array([[4, 5, 14, -1]], jnp.int32)
    kept_DkC = last_inputs(jnp.asarray(x_NC), first, last, taps, segments)
    before_KC = np.zeros((2, 2))
    ends = x_NC[3:5], np.stack([before_KC[0], x_NC[5]]), x_NC[13:15], before_KC
    np.testing.assert_array_equal(kept_DkC, np.stack(ends)[:, 3 - taps :])
