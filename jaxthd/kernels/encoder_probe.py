"""The problem that the encoder's attention kernels must solve before they are used (kernels/admission.py):
outputs and all gradients of ragged clips, the longest among them, compared with every pair of frames in
float32.

Legend: N frames, H heads, d head dim, W distances.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import Kernel, as_in_a_step, error, error_bound
from jaxthd.ops.attention.pallas import VERIFIED
from jaxthd.ops.attention.relative import RelativeShape, distances, relative_attention, unfit

QUANTITIES = ("output", "dq", "dk", "dposition", "dfar", "dv")
CLIPS = (1, 150, 64, 97)
"""Lengths of the probe's clips, besides one of the longest; those that are longer are left out."""
LEAST = 256
"""Frames of all clips, which are repeated where they have fewer: several tiles of any kernel."""
PADDING = 150
"""Queries before and after the clips that see nothing, as beside a window: more than any tile has."""


def encoder_kernels(shape: RelativeShape) -> list[Kernel]:
    """The one back-end that needs admission, with its probe for this shape."""
    how = partial(unfit, shape), partial(probe_errors, shape), QUANTITIES, error_bound(shape.dtype)
    return [Kernel("encoder attention", "pallas", shape, *how, VERIFIED)]


def probe_errors(shape: RelativeShape) -> dict[str, float]:
    """The error of each of QUANTITIES."""
    once = np.array([*(n for n in CLIPS if n < shape.longest), shape.longest])
    lengths = np.tile(once, -(-LEAST // once.sum()))
    ends = np.cumsum(lengths)
    lo_N, hi_N = (np.pad(PADDING + np.repeat(x, lengths), PADDING) for x in (ends - lengths, ends))
    frames, rng = len(lo_N), np.random.default_rng(0)
    of_frames = frames, shape.heads, shape.head_dim
    of_distances = len(distances(shape.longest)), shape.heads, shape.head_dim
    # Queries of twice the usual size: then scores differ enough that the softmax is far from a mean.
    sizes = (2, of_frames), (1, of_frames), (2, of_frames), (1, of_distances), *[(1, of_frames)] * 2
    given = [jnp.asarray(scale * rng.normal(size=size), shape.dtype) for scale, size in sizes]
    exact = [x.astype(jnp.float32) for x in given]
    lo, hi = (jnp.asarray(x, jnp.int32) for x in (lo_N, hi_N))
    # The bias's products are XLA's: in float32 a GPU would round them to TF32, whichever kernel uses them.
    with jax.default_matmul_precision("highest"):
        want = as_in_a_step(partial(_results, partial(_all_pairs, shape)))(lo, hi, *exact)
        found = as_in_a_step(partial(_results, partial(_by_kernels, shape)))(lo, hi, *given)
    pairs = zip(QUANTITIES, *map(jax.device_get, (found, want)), strict=True)
    return {name: error(np.asarray(a, np.float32), b) for name, a, b in pairs}


def _results(attend: Callable[..., Array], lo: Array, hi: Array, *given: Array) -> tuple[Array, ...]:
    *arrays, dout = given
    out, pull = jax.vjp(partial(attend, lo, hi), *arrays)
    return out, *pull(dout)


def _by_kernels(shape: RelativeShape, lo: Array, hi: Array, *given: Array) -> Array:
    out: Array = relative_attention(*given, lo, hi, shape.head_dim**-0.5, shape.longest)
    return out


def _all_pairs(
    shape: RelativeShape, lo: Array, hi: Array, q: Array, k: Array, position: Array, far: Array, v: Array
) -> Array:
    """Every query with every key, in one softmax."""
    frame = jnp.arange(len(q), dtype=jnp.int32)
    seen = (frame >= lo[:, None]) & (frame < hi[:, None])
    by_distance = jnp.einsum("nhd,whd->nhw", position, far)
    at = jnp.where(seen, frame - frame[:, None] + far.shape[0] // 2, 0)
    bias = jnp.take_along_axis(by_distance, at[:, None], axis=2)
    scores = shape.head_dim**-0.5 * (jnp.einsum("nhd,shd->nhs", q, k) + bias)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    return jnp.einsum("nhs,shv->nhv", jnp.where(seen[:, None], weights, 0), v)
