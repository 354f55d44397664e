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
    everywhere = jax.lax.all_gather(x, segments.axis)
    first, second = (jnp.take(everywhere, half, axis=1 + dim) for half in (0, 1))
    rank = jax.lax.axis_index(segments.axis)
    return jnp.concatenate([first, second[::-1]]), segments.swap.chunks(rank)
