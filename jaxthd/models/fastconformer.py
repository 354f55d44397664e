"""FastConformer over packed log-mel frames: no clip's frames reach another clip, no compute on padded rows.

Architecture: Rekesh et al., Fast Conformer (2023), after Gulati et al., Conformer (2020), in the form of the
transformers library's ParakeetEncoder, which it equals in eval mode.

Legend: A mel frames on this rank, M mel bands, E = A / 8 encoder frames, D model dim, H heads, d head dim,
F = D / 2 frequencies of the position encoding; in the subsampling N frames in, n = N / 2 frames out, B bands
in, b = B / 2 bands out, C channels.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.config import EncoderConfig
from jaxthd.models.layers import Linear
from jaxthd.ops.attention import interval_attention
from jaxthd.ops.conv import centered_conv
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Buffer, Init, scan_stack, stack

_EPS = 1e-5
_MOMENTUM = 0.1


def _accumulator(x: Array) -> Any:
    return jnp.promote_types(jnp.float32, x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias over the last dim; statistics in promote(float32, x)."""

    def __init__(self, dim: int, init: Init) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "E D"]:
        wide = x_ED.astype(_accumulator(x_ED))
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPS)
        return (wide * self.weight[...] + self.bias[...]).astype(x_ED.dtype)


class BatchNorm(nnx.Module):
    """Normalises each channel over the valid frames of all ranks (Ioffe and Szegedy, 2015).

    Training takes the batch's mean, then its centred variance, in two sums over ranks and in
    promote(float32, x); the running statistics move a tenth of the way to the batch's mean and unbiased
    variance. Without any valid frame they stay. Otherwise the running statistics normalise.
    """

    def __init__(self, dim: int, init: Init) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))
        self.mean, self.variance = init.buffer(jnp.zeros(dim)), init.buffer(jnp.ones(dim))

    def __call__(
        self,
        x_ED: Float[Array, "E D"],
        valid_E: Bool[Array, " E"],
        count: Float[Array, ""],
        *,
        train: bool,
        axes: tuple[str, ...],
    ) -> Float[Array, "E D"]:
        """count: valid frames of all ranks. In training the running statistics are replaced in place."""
        wide, valid_E1 = x_ED.astype(_accumulator(x_ED)), valid_E[:, None]
        mean_D, variance_D = self.mean[...], self.variance[...]
        if train:
            frames = jnp.maximum(count, 1)
            mean_D = jax.lax.psum(jnp.where(valid_E1, wide, 0).sum(0), axes) / frames
            squares_ED = jnp.where(valid_E1, jnp.square(wide - mean_D), 0)
            variance_D = jax.lax.psum(squares_ED.sum(0), axes) / frames
            unbiased_D = variance_D * (frames / jnp.maximum(count - 1, 1))
            for running, batch_D in ((self.mean, mean_D), (self.variance, unbiased_D)):
                moved_D = (1 - _MOMENTUM) * running[...] + _MOMENTUM * jax.lax.stop_gradient(batch_D)
                running[...] = jnp.where(count > 0, moved_D, running[...]).astype(running.dtype)
        scale_D = self.weight[...] * jax.lax.rsqrt(variance_D + _EPS)
        return ((wide - mean_D) * scale_D + self.bias[...]).astype(x_ED.dtype)


class Subsampling(nnx.Module):
    """Three 3x3 convolutions of stride 2 over (frames, bands), each with ReLU, then a linear layer: A -> A / 8.

    The later two are depthwise, followed by a pointwise one. A clip starts at a multiple of 8 frames, so at
    every level output n reads inputs 2n - 1, 2n and 2n + 1, and only the first of them can belong to the clip
    before: it is 0 where a clip starts, and everything beyond a clip's valid frames is 0 at every level. That
    is the zero padding each clip would have alone.
    """

    def __init__(self, config: EncoderConfig, init: Init) -> None:
        if config.num_mels % SUBSAMPLING:
            raise ValueError(
                f"encoder.num_mels is {config.num_mels}; it must be a multiple of {SUBSAMPLING}, because three "
                "convolutions halve the bands; use 80 or 128"
            )
        channels = config.subsampling_channels
        self.first = init.normal((9, channels))
        self.first_bias = init.zeros((channels,))
        self.depthwise = [init.normal((9, channels)) for _ in range(2)]
        self.depthwise_bias = [init.zeros((channels,)) for _ in range(2)]
        self.pointwise = nnx.List([Linear(channels, channels, init, bias=True) for _ in range(2)])
        self.out = Linear(channels * config.num_mels // SUBSAMPLING, config.dim, init, bias=True)
