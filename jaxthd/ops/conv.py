"""Depthwise convolutions over packed tokens: no tap ever reaches another document.

Legend: N tokens, K taps, C channels, R rows, S stretches of a row on a rank, L tokens of a stretch;
D places for documents of a row, after whose prompts decoding goes on.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.packing.segments import Segments


def causal_conv(
    x_NC: Float[Array, "N C"], w_KC: Float[Array, "K C"], bias_C: Float[Array, " C"], segments: Segments
) -> Float[Array, "N C"]:
    """y[i] = bias + sum_j w[K - 1 - j] x[i - j] over the taps j that stay inside the document.

    On the context axis a stretch needs the K - 1 tokens before it, its halo (ValueError when a stretch is
    shorter than that). Differentiable.
    """
    reach = len(w_KC) - 1
    x_RSLC = segments.split(x_NC)
    if x_RSLC.shape[2] < reach and segments.context > 1:
        raise ValueError(
            f"a context chunk has {x_RSLC.shape[2]} tokens but a convolution of {reach + 1} taps needs "
            f"{reach} from the chunk before; raise data.capacity or lower mesh.context"
        )
    x_RSLC = jnp.concatenate([_halo(x_RSLC, reach, segments), x_RSLC], axis=2)
    positions_N1 = segments.positions[:, None]
    y_NC = jnp.broadcast_to(bias_C, x_NC.shape)
    length = x_RSLC.shape[2] - reach
    for j in range(reach + 1):
        back_NC = x_RSLC[:, :, reach - j : reach - j + length].reshape(x_NC.shape)
        y_NC = y_NC + w_KC[reach - j] * jnp.where(positions_N1 >= j, back_NC, 0)
    return y_NC


def last_inputs(
    x_NC: Float[Array, "N C"],
    first_RD: Int32[Array, "R D"],
    last_RD: Int32[Array, "R D"],
    taps: int,
    segments: Segments,
) -> Float[Array, "places k C"]:
    """What a causal convolution needs in order to go on after token `last` of the document that starts at
    `first` (places in the row, in document order; -1 for none): its k = taps - 1 inputs up to there, newest
    last; 0 before the document, and 0 for those that another rank holds.
    """
    index_RDk = last_RD[..., None] - jnp.arange(taps - 2, -1, -1, dtype=jnp.int32)
    index_RDk = jnp.where(index_RDk >= first_RD[..., None], index_RDk, -1)
    here = segments.local_index(index_RDk.reshape(len(index_RDk), -1))
    x_DkC = jnp.where(here[:, None] >= 0, x_NC[here], 0)
    return x_DkC.reshape(-1, taps - 1, x_NC.shape[1])


def _halo(x_RSLC: Array, reach: int, segments: Segments) -> Array:
    """The `reach` tokens that precede each stretch, zeros before the row: [R, S, reach, C].

    Rank r's first chunk follows rank r-1's first; its second follows rank r+1's second, except on the last
    rank, whose second chunk follows its own first.
    """
    if segments.context == 1:
        return jnp.zeros((*x_RSLC.shape[:2], reach, x_RSLC.shape[-1]), x_RSLC.dtype)
    tail_RSkC = x_RSLC[:, :, x_RSLC.shape[2] - reach :]
    context, rank = segments.context, jax.lax.axis_index(segments.axis)
    if segments.lockstep:
        up = [(r, r + 1) for r in range(context - 1)]
        down = [(r + 1, r) for r in range(context - 1)]
        first_RkC = jax.lax.ppermute(tail_RSkC[:, 0], segments.axis, up)
        second_RkC = jax.lax.ppermute(tail_RSkC[:, 1], segments.axis, down)
    else:
        tail_cRSkC = jax.lax.all_gather(tail_RSkC, segments.axis)
        first_RkC = jnp.where(rank > 0, tail_cRSkC[rank - 1, :, 0], 0)
        second_RkC = tail_cRSkC[(rank + 1) % context, :, 1]
    is_last = rank == context - 1
    return jnp.stack([first_RkC, jnp.where(is_last, tail_RSkC[:, 0], second_RkC)], axis=1)


def centered_conv(
    x_NC: Float[Array, "N C"], w_KC: Float[Array, "K C"], segments: Segments
) -> Float[Array, "N C"]:
    """y[i] = sum_d w[d + K // 2] x[i + d], |d| <= K // 2, over the taps that stay inside the document.

    K is odd. Documents lie whole on this rank (the encoder's case).
    """
    assert segments.context == 1
    half = len(w_KC) // 2
    padded_NC = jnp.pad(x_NC, ((half, half), (0, 0)))
    y_NC = jnp.zeros_like(x_NC)
    for d in range(-half, half + 1):
        inside_N = segments.positions >= -d if d < 0 else segments.remaining >= d
        there_NC = padded_NC[half + d : half + d + len(x_NC)]
        y_NC = y_NC + w_KC[d + half] * jnp.where(inside_N[:, None], there_NC, 0)
    return y_NC
