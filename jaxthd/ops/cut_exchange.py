"""The exchange for cut documents under the layout "whole": what all ranks have for their context chunks.

What is exchanged does not depend on the number of tokens.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.packing.segments import Segments


def gathered_chunks(x: Array, dim: int, segments: Segments) -> tuple[Array, tuple[Array, Array]]:
    """Gathers what all ranks have for their chunks.

    x: dim `dim` of it is that of a document's two chunks on a rank. Returns x without it, with a first dim of
    the document's 2 * ranks chunks, in their order; and which of these are this rank's two.
    """
    # An all-gather by all_to_all, at the same bytes. Simulated devices run what is in a loop or a conditional
    # beside what follows it, and take two collectives of one kind among the same ranks for one: FSDP gathers
    # and scatters weights over these ranks.
    everywhere = jax.lax.all_to_all(jnp.broadcast_to(x, (segments.context, *x.shape)), segments.axis, 0, 0)
    first, second = (jnp.take(everywhere, half, axis=1 + dim) for half in (0, 1))
    rank = jax.lax.axis_index(segments.axis)
    return jnp.concatenate([first, second[::-1]]), segments.swap.chunks(rank)
