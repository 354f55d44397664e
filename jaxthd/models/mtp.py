"""Multi-token prediction (Gloeckle et al., 2024; DeepSeek-V3, 2024; Nemotron 3, 2025).

At every position, depth k takes two vectors: the output of depth k - 1 at that position (for depth 0, the
decoder's output after its final norm), and the embedding of the future token k + 1 positions later. The
model's own head takes the depth's output and predicts the future token k + 2 positions later.

Decoding drafts with depth 0 alone (models/drafting.py): `prefill_first` and `step_first`.

Legend: n tokens of this rank's residual stream, N tokens, D model dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.blocks import Routing
from jaxthd.models.hybrid import Cache, HybridLayers
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.models.lora_tokens import adapting
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.mesh import TENSOR
from jaxthd.parallel.params import Init, gathered_state, over_tensor, stack
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import Residual


class Depth(nnx.Module):
    """The layers around a depth's blocks: the norms of embedding and hidden state, the projection of the two,
    and the norm after the blocks. The names are those of published checkpoints.
    """

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        dim = llm.dim
        norm = partial(RMSNorm, dim, llm.norm_eps, init, zero_centred=llm.norm_zero_centred)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = Linear(2 * dim, dim, init, sharded_in=over_tensor(2 * dim))
        self.final_layernorm = norm()
        self.residual = Residual.of(init.mesh, compute.sequence_sharded)

    def fused(
        self, h_nD: Float[Array, "n D"], e_nD: Float[Array, "n D"], *, decoding: bool = False
    ) -> Float[Array, "n D"]:
        """Projects the hidden state h and the embedding e. Each tensor rank multiplies its own features."""
        residual = self.residual.decoding if decoding else self.residual
        eh_NF = residual.whole(jnp.concatenate([self.enorm(e_nD), self.hnorm(h_nD)], axis=1))
        if residual.ranks > 1:
            own = eh_NF.shape[1] // residual.ranks
            eh_NF = jax.lax.dynamic_slice_in_dim(eh_NF, own * jax.lax.axis_index(TENSOR), own, axis=1)
        return residual.total(self.eh_proj(eh_NF))


class MultiTokenPrediction(HybridLayers):
    """The blocks of all depths, stacked by kind in order of depth. depths: the Depth modules, stacked.

    With llm.mtp_shared, all depths use one set of weights.
    """

    def __init__(
        self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        super().__init__(llm, init, Stages((llm.mtp_pattern,) * llm.mtp_modules, 1, llm.stacks), compute)
        self.depths = stack(partial(Depth, llm, compute=compute), init, llm.mtp_modules)
        self.shared = llm.mtp_shared

    def __call__(
        self, depth: int, h_nD: Float[Array, "n D"], e_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """Returns the input of the head and of the next depth, and the depth's Routing.

        The Routing has a row for every layer of the depth that routes tokens; it is None without such layers.
        h_nD: the output of the previous depth, or of the decoder. e_nD: embeddings of the future tokens.
        segments: here a position is padding if its document has no token that far in the future.
        """
        number = 0 if self.shared else depth
        of_depth = self._depth(number, h_nD.dtype)
        with adapting(segments.adapted):
            x_nD = of_depth.fused(h_nD, e_nD)
        x_nD, routing = self.stage(self.stages.patterns[number], number, x_nD, segments)
        return of_depth.final_layernorm(x_nD), routing

    def prefill_first(
        self, h_nD: Float[Array, "n D"], e_nD: Float[Array, "n D"], segments: Segments, prompts: Prompts
    ) -> Cache:
        """Returns what depth 0 keeps of prompts for decoding: (fixed, state) by letter.

        h, e, segments: as for a call. prompts: of the positions that have a future token.
        """
        with adapting(segments.adapted):
            x_nD = self._depth(0, h_nD.dtype).fused(h_nD, e_nD)
        return self.prefill(self.stages.patterns[0], 0, x_nD, segments, prompts)[1]

    def step_first(
        self, h_ND: Float[Array, "N D"], e_ND: Float[Array, "N D"], fixed: Cache, state: Cache, now: Now
    ) -> tuple[Float[Array, "N D"], Cache]:
        """Depth 0 over the newest tokens: the head's input, and the state after them."""
        first = self._depth(0, h_ND.dtype)
        with adapting(now.adapted):
            x_ND = first.fused(h_ND, e_ND, decoding=True)
        x_ND, state = self.step(self.stages.patterns[0], 0, x_ND, fixed, state, now)
        return first.final_layernorm(x_ND), state

    def _depth(self, number: int, dtype: Any) -> Depth:
        """The layers around this depth's blocks."""
        graph, states = nnx.split(self.depths)
        own = gathered_state(jax.tree.map(lambda w: w[number], states), dtype)
        return nnx.merge(graph, own)

    def routing_of_depths(self, routing: list[Routing]) -> Routing:
        """Combines the depths' Routings into one, with a row for every layer of the stack that routes tokens.

        routing: the Routings of the depths, in order.
        """
        if self.shared:
            return jax.tree.map(lambda *depths: sum(depths), *routing)
        return jax.tree.map(lambda *depths: jnp.concatenate(depths), *routing)
