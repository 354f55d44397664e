"""Names what a recomputed block may keep besides the results of matrix products (compute.remat)."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"


def kept(x: Array) -> Array:
    """x, for a kernel's results that its backward pass takes. Where nothing is recomputed it does nothing."""
    named: Array = checkpoint_name(x, KEPT)
    return named
