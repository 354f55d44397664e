"""The multilayer perceptron of Nemotron-H (2025), and the gated ones of Qwen3 and GPT-OSS (2025).

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import Linear
from jaxthd.models.mixers.contract import LayerKind, Stateless, residual_std
from jaxthd.ops.ffn import FFNForm
from jaxthd.packing.prompts import Now
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor


class MLP(Stateless):
    """llm.ffn_form. inner: its inner dim; None: llm.ffn_dim."""

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
        bias, self.form = llm.ffn_bias, FFNForm.of(llm)
        self.up = Linear(llm.dim, inner, init, bias=bias, sharded_out=columns)
        self.gate = Linear(llm.dim, inner, init, bias=bias, sharded_out=columns) if llm.is_gated else None
        self.down = Linear(inner, llm.dim, init, bias=bias, std=residual_std(inner, llm), sharded_in=columns)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._applied(x_ND)

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        return self._applied(x_nD), state

    def _applied(self, x_ND: Array) -> Array:
        up_NF = self.up(x_ND)
        return self.down(self.form.inner(up_NF, None if self.gate is None else self.gate(x_ND)))


def cost(llm: LLMConfig) -> float:
    return float(llm.ffn_matrices * llm.dim * llm.ffn_dim)


KIND = LayerKind("-", "mlp", "MLP", MLP, cost)
