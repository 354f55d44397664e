"""Inverses of unit lower triangular matrices, by products of matrices alone.

jaxlib's triangular_solve (0.10.2) on a CPU blocks a thread of XLA's pool until other threads
of the pool have done its work. On two cores, two of them at once can wait for each other for ever.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxthd.ops.numerics import exact_product


@jax.custom_vjp
def inverse_of_unit_lower(lower: Float[Array, "*batch Q Q"]) -> Float[Array, "*batch Q Q"]:
    """The inverse of 1 + (the strictly lower triangle of `lower`), in its dtype. Differentiable.

    Blocks on the diagonal are inverted, of 1, 2, 4, ... rows: the inverse of [[A, 0], [C, B]] is
    [[a, 0], [-b C a, b]], where a, b are the inverses of A, B. So whatever occurs on the way is a part of the
    inverse itself. Powers of the matrix would not be: they are large where keys are alike.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    rows = 1
    while rows < size:
        joining = jnp.where(_below(size, rows), lower, 0)
        inverse = inverse - (
            joining if rows == 1 else exact_product(exact_product(inverse, joining), inverse)
        )
        rows *= 2
    return inverse


def _forward(lower: Array) -> tuple[Array, Array]:
    inverse = inverse_of_unit_lower(lower)
    return inverse, inverse


def _backward(inverse: Array, dinverse: Array) -> tuple[Array]:
    transposed = inverse.mT
    return (-jnp.tril(exact_product(exact_product(transposed, dinverse), transposed), -1),)


inverse_of_unit_lower.defvjp(_forward, _backward)


def _below(size: int, rows: int) -> np.ndarray:
    """True in the blocks C of pairs of neighbouring blocks of `rows` rows, [size, size]."""
    block = np.arange(size) // rows
    return (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
