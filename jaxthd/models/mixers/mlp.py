"""The multilayer perceptron of Nemotron-H (2025), and the gated one of Qwen3 (2025).

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import Linear, relu_squared
from jaxthd.models.mixers.contract import LayerKind, Prefilled, residual_std
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor


class MLP(nnx.Module):
    """llm.ffn_form without bias. inner: its inner dim; None: llm.ffn_dim."""

    def __init__(
        self,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
        *,
        inner: int | None = None,
    ) -> None:
        init, inner = Init.of(init, compute), inner or llm.ffn_dim
        columns = over_tensor(inner)
        self.up = Linear(llm.dim, inner, init, sharded_out=columns)
        self.gate = Linear(llm.dim, inner, init, sharded_out=columns) if llm.is_gated else None
        self.down = Linear(inner, llm.dim, init, std=residual_std(inner, llm), sharded_in=columns)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._applied(x_ND)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        return Prefilled(self(x_ND, segments), [], [])

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        return self._applied(x_nD), state

    def _applied(self, x_ND: Array) -> Array:
        up_NF = self.up(x_ND)
        return self.down(relu_squared(up_NF) if self.gate is None else jax.nn.silu(self.gate(x_ND)) * up_NF)


def cost(llm: LLMConfig) -> float:
    return float(llm.ffn_matrices * llm.dim * llm.ffn_dim)


KIND = LayerKind("-", "mlp", "MLP", MLP, cost)
