"""Subsampling by 8: mel frames to encoder frames, by three convolutions of stride 2.

Legend: A mel frames on this rank, M mel bands, E = A / 8 encoder frames, D model dim; of a convolution N
frames in, n = N / 2 frames out, B bands in, b = B / 2 bands out, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING, FastConformer
from jaxthd.models.layers import Linear
from jaxthd.parallel.params import Init


def _as_mask(kept_n: Array, dtype: jnp.dtype) -> Array:
    """1 on the frames that are kept, else 0. (For a choice, XLA fills an array with the zeros.)"""
    return kept_n[:, None, None].astype(dtype)


def _neighbours(x_NBC: Array, start_n: Array) -> list[Array]:
    """The nine [n, b, C] inputs of a 3x3 convolution of stride 2 and padding 1, frames before bands.

    start_n: True where a clip starts. There the output reads 0 in place of the frame before its own two.
    """
    n, _, channels = x_NBC.shape
    pairs_n2BC = x_NBC.reshape(n // 2, 2, -1, channels)
    before_nBC = jnp.pad(pairs_n2BC[:-1, 1], ((1, 0), (0, 0), (0, 0)))
    before_nBC = before_nBC * _as_mask(~start_n, x_NBC.dtype)
    taps = []
    for row_nBC in (before_nBC, pairs_n2BC[:, 0], pairs_n2BC[:, 1]):
        even_nbC, odd_nbC = jnp.moveaxis(row_nBC.reshape(n // 2, -1, 2, channels), 2, 0)
        taps += [jnp.pad(odd_nbC[:, :-1], ((0, 0), (1, 0), (0, 0))), even_nbC, odd_nbC]
    return taps


class SeparableConv(nnx.Module):
    """3x3 depthwise convolution of stride 2, then a pointwise one.

    The depthwise convolution is nine multiply-adds on shifted inputs, because XLA's grouped convolution takes
    7 times as long on a CPU.
    """

    def __init__(self, channels: int, init: Init) -> None:
        self.w = init.normal((9, channels))
        self.bias = init.zeros((channels,))
        self.pointwise = Linear(channels, channels, init, bias=True)

    def __call__(self, x_NBC: Float[Array, "N B C"], start_n: Bool[Array, " n"]) -> Float[Array, "n b C"]:
        w_9C, bias_C = (w[...].astype(x_NBC.dtype) for w in (self.w, self.bias))
        y_nbC = bias_C + sum(w * tap for w, tap in zip(w_9C, _neighbours(x_NBC, start_n), strict=True))
        return self.pointwise(y_nbC.reshape(-1, y_nbC.shape[-1])).reshape(y_nbC.shape)


def piece_frames(frames: int, about: int) -> int:
    """Encoder frames of a piece, of a buffer with so many: alike, and at most an eighth more than `about`."""
    return -(-frames // max(1, -(-8 * frames // (9 * about))))


class Subsampling(nnx.Module):
    """Three 3x3 convolutions of stride 2 over (frames, bands), each with ReLU; then a linear layer: A -> E.

    A clip starts at a multiple of 8 frames. At every level, output n reads inputs 2n - 1, 2n and 2n + 1. Only
    the first of them can belong to the previous clip, and it is set to 0 where a clip starts. All frames
    after a clip's valid ones are also set to 0 at every level. So each clip sees the zero padding that it
    would have alone.

    Encoder frame e reads only mel frames 8e - 7 to 8e + 7. So the buffer is divided into pieces of about
    `piece` encoder frames, or more, each with the 8 mel frames before it. They are computed one after the
    other, and recomputed in the backward pass, so activations exist for one at a time: with 16,000 frames, 80
    mels and 64 channels on a CPU 27 MB instead of 400 MB, in two thirds of the time. With compute.remat none,
    which keeps all activations, the buffer is one piece, and nothing is copied.
    """

    def __init__(self, config: FastConformer, init: Init, piece: int, *, remat: bool = True) -> None:
        if config.num_mels % SUBSAMPLING:
            raise ValueError(
                f"encoder.num_mels is {config.num_mels}; it must be a multiple of {SUBSAMPLING}, "
                "because three convolutions halve the bands; use 80 or 128"
            )
        channels = config.subsampling_channels
        self.first = Linear(9, channels, init, bias=True, projects=False)
        self.later = nnx.List([SeparableConv(channels, init) for _ in range(2)])
        self.out = Linear(config.num_mels // SUBSAMPLING * channels, config.dim, init, bias=True)
        for linear in (self.out, *(conv.pointwise for conv in self.later)):
            linear.w.set_metadata(cast=False)  # its gradient is a sum over pieces
        self.piece, self.remat = piece, remat

    def __call__(
        self, mels_AM: Float[Array, "A M"], mask_A: Bool[Array, " A"], start_E: Bool[Array, " E"]
    ) -> Float[Array, "E D"]:
        """start_E: True on the first frame of a clip. Frames that mask_A excludes may hold any values."""
        frames = len(start_E)
        per_piece = piece_frames(frames, self.piece)
        whole: Any = jax.checkpoint(self._piece) if self.remat else self._piece
        if not self.remat or frames <= per_piece:
            y_ED: Array = whole(mels_AM, mask_A, start_E)
            return y_ED

        def pieces(x: Array, per_frame: int) -> Array:
            """[E * per_frame, ...] -> [pieces, (1 + per_piece) * per_frame, ...]; 0 beyond both ends of x."""
            x = jnp.pad(x, [(0, -frames % per_piece * per_frame)] + [(0, 0)] * (x.ndim - 1))
            x = x.reshape(-1, per_piece * per_frame, *x.shape[1:])
            halo = jnp.pad(x[:-1, -per_frame:], [(1, 0)] + [(0, 0)] * (x.ndim - 1))
            return jnp.concatenate([halo, x], axis=1)

        cut = (pieces(mels_AM, SUBSAMPLING), pieces(mask_A, SUBSAMPLING), pieces(start_E, 1))
        y_pED = jax.lax.map(lambda piece: whole(*piece)[1:], cut)
        return y_pED.reshape(-1, y_pED.shape[-1])[:frames]

    def _piece(self, mels_AM: Array, mask_A: Array, start_E: Array) -> Array:
        def starts(per_frame: int) -> Array:
            """start_E with `per_frame` entries for each encoder frame, of which the first may be True."""
            return jnp.pad(start_E[:, None], ((0, 0), (0, per_frame - 1))).reshape(-1)

        def mask(stride: int) -> Array:
            """Of the valid frames of a level."""
            return _as_mask(mask_A[::stride], mels_AM.dtype)

        x_NBC = jnp.where(mask_A[:, None], mels_AM, 0)[..., None]
        taps_nb9 = jnp.concatenate(_neighbours(x_NBC, starts(4)), axis=-1)
        y_nbC = self.first(taps_nb9.reshape(-1, 9)).reshape(*taps_nb9.shape[:2], -1)
        x_NBC = jax.nn.relu(y_nbC) * mask(2)
        for conv, stride, per_frame in zip(self.later, (4, 8), (2, 1), strict=True):
            y_nbC = conv(x_NBC, starts(per_frame))
            x_NBC = jax.nn.relu(y_nbC) * mask(stride)
        return self.out(x_NBC.reshape(len(start_E), -1))
