"""The rotary position embedding (Su et al., RoFormer, 2021), with the scalings of published models.

Legend: N tokens, H heads, d head dim, r rotated features of a head, f = r / 2 frequencies.
"""

import math
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float64, Int32

from jaxthd.config.rope import RopeConfig
from jaxthd.ops.numerics import accumulation_dtype


def rotated(
    x_NHd: Float[Array, "N H d"], positions_N: Int32[Array, " N"], rope: RopeConfig
) -> Float[Array, "N H d"]:
    """Rotates features i and r / 2 + i of each head by position * frequency i; features from r on stay.

    r = d * rope.fraction, and one more where that is odd. The halves are paired, as in most published
    checkpoints; the paper pairs neighbours. Frequencies are computed in float64, angles in
    promote(float32, x); returned in x's dtype.
    """
    acc = accumulation_dtype(x_NHd)
    frequency_f = jnp.asarray(frequencies(rope, rope.rotated(x_NHd.shape[-1])), acc)
    cos_Nf, sin_Nf = waves(positions_N.astype(acc)[:, None] * frequency_f, rope.rotation_factor)
    r = 2 * len(frequency_f)
    halves_NH2f = x_NHd[..., :r].astype(acc).reshape(*x_NHd.shape[:-1], 2, -1)
    # A concatenation of the two halves, and its gradient's, would be a pass over memory of its own.
    turned_NH2f = turned(halves_NH2f, cos_Nf[:, None], sin_Nf[:, None])
    turned_NHr = turned_NH2f.reshape(*x_NHd.shape[:-1], r).astype(x_NHd.dtype)
    return turned_NHr if r == x_NHd.shape[-1] else jnp.concatenate([turned_NHr, x_NHd[..., r:]], -1)


def waves(angle: Float[Array, "..."], factor: float = 1.0) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Cosine and sine of angles in radians, times the factor, in the shape and dtype of the angles.

    They are divided by the sum of their squares, which is 1. XLA on CPUs computes a cosine again in each loop
    that reads it, and for every head that it is broadcast to; a division it writes to memory.
    """
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    one = cos * cos + sin * sin
    return factor * cos / one, factor * sin / one


def turned(
    halves: Float[Array, "*N 2 f"], cos: Float[Array, "*#N f"], sin: Float[Array, "*#N f"]
) -> Float[Array, "*N 2 f"]:
    """The pairs (halves[..., 0, i], halves[..., 1, i]), each turned by the
    angle whose cosine and sine are given, which broadcast over N."""
    sign_21 = jnp.asarray([[-1], [1]], halves.dtype)
    return halves * cos[..., None, :] + halves[..., ::-1, :] * (sin[..., None, :] * sign_21)


@lru_cache
def frequencies(rope: RopeConfig, features: int) -> Float64[np.ndarray, " f"]:
    """The angle that each pair of the rotated features turns by from one position to the next."""
    plain_f = rope.theta ** (-np.arange(0, features, 2, dtype=np.float64) / features)
    match rope.scaling:
        case "none":
            return plain_f
        case "linear":
            return plain_f / rope.factor
        case "yarn":
            kept_f = _kept_by_yarn(rope, features)
        case "llama3":
            turns_f = rope.original_positions * plain_f / (2 * math.pi)
            span = rope.high_freq_factor - rope.low_freq_factor
            kept_f = np.clip((turns_f - rope.low_freq_factor) / span, 0, 1)
    return plain_f * (kept_f + (1 - kept_f) / rope.factor)


def _kept_by_yarn(rope: RopeConfig, features: int) -> Float64[np.ndarray, " f"]:
    """Share of each frequency that is kept: 1 up to the first end of a ramp over the pairs, 0 from its second
    end on.
    """

    def pair(turns: float) -> float:
        """The number of the pair, not whole, that turns so often in the original positions."""
        return (
            features * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    ramp_f = (np.arange(features // 2, dtype=np.float64) - low) / (high - low or 0.001)
    return 1 - np.clip(ramp_f, 0, 1)
