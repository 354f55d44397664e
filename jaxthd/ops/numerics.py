"""What ops and models share: the rule about precision, and the name of what may be kept."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"
"""Name of what a recomputed block may keep besides the results of matrix products (compute.remat)."""


exact_product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
"""Matrix products that are not rounded to fewer bits than their operands have."""


def accumulation_dtype(x: Array) -> jnp.dtype:
    """Dtype of sums over values of x: promote(float32, x's dtype)."""
    return jnp.promote_types(jnp.float32, x.dtype)


def kept(x: Array) -> Array:
    """x, for a kernel's results that its backward pass takes. Where nothing is recomputed it does nothing."""
    named: Array = checkpoint_name(x, KEPT)
    return named
