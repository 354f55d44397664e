"""Tensor parallelism: a layer's width is sharded over ranks.

Each rank computes with its own heads, columns or experts' columns and gets a partial sum. The residual stream
is replicated on every rank, or sharded: then a rank holds 1/tensor of its tokens.

Cotangents follow one convention everywhere: the cotangents of a replicated value are partial sums, and adding
them over the ranks gives the gradient. Then psum transposes to psum and all_gather to psum_scatter. Gradients
of parameters that several ranks hold are summed once, at the end (steps/training.py).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import TENSOR, ranks_of


class Residual(NamedTuple):
    """The layout of the residual stream over the tensor ranks. N tokens, n of them on this rank."""

    ranks: int
    sharded: bool

    @classmethod
    def of(cls, mesh: MeshConfig, sharded: bool) -> "Residual":
        """The layout on this mesh; never sharded on one tensor rank."""
        return cls(mesh.tensor, sharded and mesh.tensor > 1)

    def whole(self, x_nD: Float[Array, "n D"]) -> Float[Array, "N D"]:
        """All N tokens, which is what a mixer takes."""
        return jax.lax.all_gather(x_nD, TENSOR, axis=0, tiled=True) if self.sharded else x_nD

    def total(self, part_ND: Float[Array, "N D"]) -> Float[Array, "n D"]:
        """The sum of the ranks' mixer outputs, for this rank's tokens."""
        if self.sharded:
            return jax.lax.psum_scatter(part_ND, TENSOR, scatter_dimension=0, tiled=True)
        return jax.lax.psum(part_ND, TENSOR) if self.ranks > 1 else part_ND

    def own(self, x_ND: Float[Array, "N D"]) -> Float[Array, "n D"]:
        """This rank's tokens."""
        if not self.sharded:
            return x_ND
        n = len(x_ND) // self.ranks
        return jax.lax.dynamic_slice_in_dim(x_ND, n * jax.lax.axis_index(TENSOR), n)

    @property
    def decoding(self) -> "Residual":
        """The layout in decoding: every rank holds all of the few tokens."""
        return self._replace(sharded=False)


def vocabulary_rows(
    matrix_VD: Float[Array, "V D"], tokens_N: Int32[Array, " N"], axes: tuple[str, ...], dtype: str
) -> Float[Array, "N D"]:
    """The tokens' rows of the embedding or the head, on all ranks of `axes`, which share the vocabulary.
    Zeros where no rank has the token.

    Each rank looks up the tokens of its shard. Rows are rounded to dtype, the compute dtype, only afterwards,
    so that the gradients of a token, thousands for a frequent one, are summed in the parameters' dtype. The
    backward pass needs nothing but the indices.
    """
    own = len(matrix_VD)
    local_N = tokens_N - jax.lax.axis_index(axes) * own
    index_N = jnp.where((local_N >= 0) & (local_N < own), local_N, own)
    found_ND = matrix_VD.at[index_N].get(mode="fill", fill_value=0).astype(dtype)
    return jax.lax.psum(found_ND, axes)


def psum_live(x: Any, axes: tuple[str, ...], mesh: MeshConfig) -> Any:
    """psum over those of `axes` that have several ranks. So a single device needs no mesh."""
    live = tuple(a for a in axes if ranks_of(mesh, (a,)) > 1)
    return jax.lax.psum(x, live) if live else x
