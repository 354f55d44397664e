"""An all-to-all of heads for tokens over the context axis, for a scan that takes tokens one after the other.

Under the per-document layout a rank holds two chunks of every document, too many to pass states between. So
Mamba2's inputs travel: an all-to-all gives every rank all tokens of its rows, in document order, for its
share of the heads. Outputs travel back. Under the whole-buffer layout, and on one rank, nothing moves.

Legend: N tokens of this rank, R rows, S tokens of a row on all ranks, M = R * S, H heads, h = H / context.
"""

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Shaped

from jaxthd.packing.segments import Segments, gather_in_rows


def head_ranks(segments: Segments) -> int:
    """How many ranks share the heads: all of the context axis, or 1."""
    return 1 if segments.in_order is None else segments.context


def scan_segments(segments: Segments) -> Segments:
    """The Segments of the tokens that to_heads returns."""
    return segments if segments.in_order is None else segments.in_order.segments


def to_heads(x_NH: Shaped[Array, "N H *rest"], segments: Segments) -> Shaped[Array, "M h *rest"]:
    """All tokens of this rank's rows, in document order, for its heads; 0 in padding. Differentiable.

    The number of heads is a multiple of head_ranks.
    """
    if segments.in_order is None:
        return x_NH
    x_RTH = x_NH.reshape(segments.rows, -1, *x_NH.shape[1:])
    x_RSh = jax.lax.all_to_all(x_RTH, segments.axis, split_axis=2, concat_axis=1, tiled=True)
    return jax.lax.collapse(gather_in_rows(x_RSh, segments.in_order.slots), 0, 2)


def to_tokens(
    x_Mh: Shaped[Array, "M h *rest"], segments: Segments, dtype: DTypeLike
) -> Shaped[Array, "N H *rest"]:
    """The inverse of to_heads, sent in `dtype`: this rank's tokens, for all heads; 0 in padding.
    Differentiable."""
    if segments.in_order is None:
        return x_Mh
    x_RSh = x_Mh.astype(dtype).reshape(segments.rows, -1, *x_Mh.shape[1:])
    x_RSh = gather_in_rows(x_RSh, segments.in_order.indices)
    x_RTH = jax.lax.all_to_all(x_RSh, segments.axis, split_axis=1, concat_axis=2, tiled=True)
    return jax.lax.collapse(x_RTH, 0, 2).astype(x_Mh.dtype)


def own_heads(x_H: Shaped[Array, "..."], segments: Segments, axis: int = 0) -> Shaped[Array, "..."]:
    """This rank's heads, along dim `axis`, of a parameter that all context ranks hold whole."""
    if segments.in_order is None:
        return x_H
    share = x_H.shape[axis] // segments.context
    return jax.lax.dynamic_slice_in_dim(x_H, jax.lax.axis_index(segments.axis) * share, share, axis)
