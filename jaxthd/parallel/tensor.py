"""Tensor parallelism: a layer's width over ranks.

Each rank computes with its heads, columns or experts' columns and gets a part of a sum. The residual stream
is whole on every rank, or, sharded, 1/tensor of its tokens. Cotangents follow one convention everywhere: of
what is whole on several ranks each holds a part, and the parts add up. Then psum transposes to psum,
all_gather to psum_scatter, and gradients of parameters that several ranks hold are summed once, at the end
(step.py).
"""

from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import Float

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import TENSOR, ranks_of


class Residual(NamedTuple):
    """How the residual stream lies over the tensor ranks. N tokens, n on this rank."""

    ranks: int
    sharded: bool

    @classmethod
    def of(cls, mesh: MeshConfig, sharded: bool) -> "Residual":
        return cls(mesh.tensor, sharded and mesh.tensor > 1)

    def whole(self, x_nD: Float[Array, "n D"]) -> Float[Array, "N D"]:
        """What a mixer takes."""
        return jax.lax.all_gather(x_nD, TENSOR, axis=0, tiled=True) if self.sharded else x_nD

    def total(self, part_ND: Float[Array, "N D"]) -> Float[Array, "n D"]:
        """The sum of what the ranks' mixers return."""
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
        """In decoding every rank holds its few tokens whole."""
        return self._replace(sharded=False)


def psum_live(x: Any, axes: tuple[str, ...], mesh: MeshConfig) -> Any:
    """psum over those of the axes that have several ranks; so that one device needs no mesh."""
    live = tuple(a for a in axes if ranks_of(mesh, (a,)) > 1)
    return jax.lax.psum(x, live) if live else x
