"""BatchNorm over the valid frames of all ranks.

Legend: E frames on this rank, D channels.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.ops.norms import scaled_deviations, squared_deviations
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.parallel.params import Init

_EPS = 1e-5
_MOMENTUM = 0.1


class BatchNorm(nnx.Module):
    """Normalises each channel over the valid frames of all ranks (Ioffe and Szegedy, 2015).

    In training, it computes the batch's mean and then its centred variance, in promote(float32, x), with one
    sum over ranks for each. The running statistics move a tenth of the way to the batch's mean and unbiased
    variance; they stay unchanged if no rank has a valid frame. Outside training, it normalises with the
    running statistics.
    """

    def __init__(self, dim: int, init: Init) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))
        self.mean, self.variance = init.buffer(jnp.zeros(dim)), init.buffer(jnp.ones(dim))

    def __call__(
        self,
        x_ED: Float[Array, "E D"],
        valid_E: Bool[Array, " E"],
        frames: Float[Array, ""],
        *,
        train: bool,
        axes: tuple[str, ...],
    ) -> Float[Array, "E D"]:
        """frames: valid frames of all ranks, a count. Training updates the running statistics in place."""
        mean_D, variance_D = self.mean[...], self.variance[...]
        if train:
            some, valid_E1 = jnp.maximum(frames, 1), valid_E[:, None]
            wide_ED = x_ED.astype(accumulation_dtype(x_ED))
            mean_D = jax.lax.psum(jnp.where(valid_E1, wide_ED, 0).sum(0), axes) / some
            variance_D = jax.lax.psum(squared_deviations(x_ED, valid_E1, mean_D), axes) / some
            unbiased_D = variance_D * (frames / jnp.maximum(frames - 1, 1))
            for running, batch_D in ((self.mean, mean_D), (self.variance, unbiased_D)):
                moved_D = (1 - _MOMENTUM) * running[...] + _MOMENTUM * jax.lax.stop_gradient(batch_D)
                running[...] = jnp.where(frames > 0, moved_D, running[...]).astype(running.dtype)
        scale_D = self.weight[...] * jax.lax.rsqrt(variance_D + _EPS)
        return scaled_deviations(x_ED, mean_D, scale_D, self.bias[...])
