"""Decays inside scan chunks, 0 across documents.

All decay is summed in float32 over terms of one sign, never as a difference of two cumulative sums, which
rounding can push above 0 before exp.

Legend: C scan chunks, Q tokens of one, G groups, h heads of a group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32


class Decays(NamedTuple):
    """Inside each scan chunk, 0 across documents: between any two tokens, from a token to the chunk's end,
    from the chunk's start to a token.
    """

    between_CGhQQ: Array
    to_end_CGhQ: Array
    from_start_CGhQ: Array


def decays_of(decay_CGhQ: Float[Array, "C G h Q"], positions_CQ: Int32[Array, "C Q"]) -> Decays:
    """decay: its logarithm, at most 0. positions: of the tokens in their documents."""
    i = jnp.arange(positions_CQ.shape[1])
    same_CQQ = (i[:, None] >= i) & (i[:, None] - i <= positions_CQ[..., None])
    return Decays(
        _decay_over((i[:, None] < i) & (i <= i[:, None, None]), decay_CGhQ, same_CQQ),
        _decay_over(i[:, None] < i, decay_CGhQ, same_CQQ[:, -1]),
        _decay_over(i <= i[:, None], decay_CGhQ, positions_CQ > i),
    )


def decays_since_start_here(
    decay_CGhQ: Float[Array, "C G h Q"], positions_CQ: Int32[Array, "C Q"]
) -> Float[Array, "C G h Q"]:
    """From before the first token of the token's document, or from the chunk's start where the document began
    before, to the token."""
    i = jnp.arange(positions_CQ.shape[1])
    counted_CQQ = (i[:, None] >= i) & (i[:, None] - i <= positions_CQ[..., None])
    return jnp.exp(exact_einsum("cghk,cqk->cghq", decay_CGhQ, counted_CQQ.astype(decay_CGhQ.dtype)))


def _decay_over(counted: Array, decay_CGhQ: Array, seen: Array) -> Array:
    """exp(sum of decay over the tokens of a scan chunk that `counted` [..., Q] names): [C, G, h, ...]. 0
    where `seen` [C, ...] is False.

    The sums are a matrix product with ones and zeros: all terms are of one sign, and cumulative sums are
    slow.
    """
    sums = exact_einsum("cghk,...k->cgh...", decay_CGhQ, counted.astype(decay_CGhQ.dtype))
    return jnp.exp(jnp.where(seen[:, None, None], sums, -jnp.inf))


exact_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
