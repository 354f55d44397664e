"""The rotary position embedding (Su et al., RoFormer, 2021).

Legend: N tokens, H heads, d head dim.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype


def rotated(
    x_NHd: Float[Array, "N H d"], positions_N: Int32[Array, " N"], theta: float
) -> Float[Array, "N H d"]:
    """Rotates features i and d / 2 + i of each head by position * theta^(-2 i / d).

    The halves are paired, as in published checkpoints; the paper pairs neighbours. d is even. Computed in
    promote(float32, x), returned in x's dtype.
    """
    half, acc = x_NHd.shape[-1] // 2, accumulation_dtype(x_NHd)
    frequency = theta ** (-jnp.arange(half, dtype=acc) / half)
    angle_N1f = (positions_N.astype(acc)[:, None] * frequency)[:, None]
    cos, sin = jnp.cos(angle_N1f), jnp.sin(angle_N1f)
    first, second = jnp.split(x_NHd.astype(acc), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_NHd.dtype)
