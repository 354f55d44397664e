"""Multi-token prediction (Gloeckle et al., 2024; DeepSeek-V3, 2024; Nemotron 3, 2025).

Depth k takes, at every position, what the depth before it made of the position (at depth 0: the decoder,
behind its final norm) and the embedding of the token k + 1 places on. Its output goes to the model's own head
and predicts the token k + 2 places on.

Legend: n tokens of this rank's residual stream, N tokens, D model dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.hybrid import HybridLayers
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.models.mixers import Routing
from jaxthd.packing.segments import Segments
from jaxthd.parallel.mesh import TENSOR
from jaxthd.parallel.params import Init, gathered_state, over_tensor, stack
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import Residual


class Depth(nnx.Module):
    """What surrounds a depth's blocks: norms of embedding and hidden state, the projection of both, the norm
    behind the blocks. Named as in published checkpoints.
    """

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        dim, eps = llm.dim, llm.norm_eps
        self.enorm, self.hnorm = RMSNorm(dim, eps, init), RMSNorm(dim, eps, init)
        self.eh_proj = Linear(2 * dim, dim, init, sharded_in=over_tensor(2 * dim))
        self.final_layernorm = RMSNorm(dim, eps, init)
        self.residual = Residual.of(init.mesh, compute.sequence_sharded)

    def fused(self, h_nD: Float[Array, "n D"], e_nD: Float[Array, "n D"]) -> Float[Array, "n D"]:
        """Each tensor rank multiplies its part of the features."""
        eh_NF = self.residual.whole(jnp.concatenate([self.enorm(e_nD), self.hnorm(h_nD)], axis=1))
        if self.residual.ranks > 1:
            own = eh_NF.shape[1] // self.residual.ranks
            eh_NF = jax.lax.dynamic_slice_in_dim(eh_NF, own * jax.lax.axis_index(TENSOR), own, axis=1)
        return self.residual.total(self.eh_proj(eh_NF))


class MultiTokenPrediction(HybridLayers):
    """The blocks of all depths, stacked by kind, those of the first depth first. depths: the rest, stacked.

    With model.llm.mtp_shared all depths use the same.
    """

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        super().__init__(llm, init, Stages((llm.mtp_pattern,) * llm.mtp_modules, 1), compute)
        self.depths = stack(partial(Depth, llm, compute=compute), init, llm.mtp_modules)
        self.shared = llm.mtp_shared

    def __call__(
        self, depth: int, h_nD: Float[Array, "n D"], e_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """What head and next depth take; where the tokens went, with a row for every MoE layer of the depth.

        segments: in which tokens whose embedding is missing, being beyond the document's end, are padding.
        """
        number = 0 if self.shared else depth
        graph, states = nnx.split(self.depths)
        of_depth = nnx.merge(graph, gathered_state(jax.tree.map(lambda w: w[number], states)))
        x_nD, routing = self.stage(self.stages.patterns[number], number, of_depth.fused(h_nD, e_nD), segments)
        return of_depth.final_layernorm(x_nD), routing

    def joined(self, routing: list[Routing]) -> Routing:
        """Of the depths, in order: a row for every MoE layer of the stack."""
        if self.shared:
            return jax.tree.map(lambda *depths: sum(depths), *routing)
        return jax.tree.map(lambda *depths: jnp.concatenate(depths), *routing)
