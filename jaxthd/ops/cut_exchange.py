"""The exchange for cut documents under the layout "whole": what all ranks have for their context chunks.

Legend: E context chunks of cut documents on this rank (packing/cuts.py), R rows, K most cut documents of one.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxthd.packing.segments import Segments


def gathered_chunks(of_chunk_E: Array, segments: Segments) -> tuple[Array, tuple[Array, Array]]:
    """Gathers what all ranks have for their chunks.

    of_chunk: [E, ...]. Returns it for the chunks in their order, [2 * ranks, R, K, ...], and the numbers of
    this rank's two chunks among them.
    """
    assert segments.cut is not None
    x_RK2 = of_chunk_E.reshape(*segments.cut.slots.chunk.shape, 2, *of_chunk_E.shape[1:])
    x = jax.lax.all_gather(x_RK2, segments.axis)
    in_order = jnp.concatenate([x[:, :, :, 0], x[::-1, :, :, 1]])
    return in_order, segments.swap.chunks(jax.lax.axis_index(segments.axis))
