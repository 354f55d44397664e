"""Kimi Delta Attention (Kimi Team, Kimi Linear, 2025): the gated delta rule with a decay for each feature of
the keys.

Legend: as delta.py; each value head has keys of its own, of its dim: K = V, U = I = H K.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import Block, PassedSizes, register_block
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Arrays, Table, matrix
from jaxthd.models.blocks.contract import residual_std, step_bias
from jaxthd.models.blocks.delta import LONGEST_CHUNK, DeltaMixer, delta_rule, rule_shapes, taps
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.parallel.params import Init, over_tensor

RATES = 1.0, 16.0
STEPS = 1e-3, 1e-1
"""Ranges of the rates and, before the input enters, of the time steps of new weights."""


@dataclass(frozen=True, kw_only=True)
class KimiDelta(Block):
    """Kimi Delta Attention (Kimi Team, Kimi Linear, 2025): the gated delta rule with a decay for each feature
    of the keys, and an output gate; both are projected by way of as many features as a head has."""

    title = "Kimi delta attention"
    letter = "K"
    splits_documents = True
    rolls_back = True
    equal_sizes = ("heads",)
    convolution = "conv"
    kind: Annotated[Literal["kimi_delta"], DERIVED] = "kimi_delta"
    heads: int = 4
    """Heads, each of queries, keys, values and decays, with a state [head_dim, head_dim]."""
    head_dim: int = 32
    """Dim of a head, and of what decays and output gates are projected from."""
    conv: int = 4
    """Taps of the causal convolution over queries, keys and values."""

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "KimiDeltaMixer":
        return KimiDeltaMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        projections = dim * (4 * self.inner + self.heads + 2 * self.head_dim) + 2 * self.head_dim * self.inner
        pairs = LONGEST_CHUNK * 2.5 * self.inner
        return float(projections + pairs + 4 * self.inner * self.head_dim)

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        """The map of a context chunk has a matrix a head."""
        inner = self.inner // tensor
        state = inner * 2 * self.head_dim * max(activation, 4)
        return PassedSizes(state, (self.conv - 1) * 3 * inner * activation)

    def recurrence(self, tensor: int, tokens: int, dtype: Any) -> tuple[Any, Any]:
        heads, dim = self.heads // tensor, self.head_dim
        return delta_rule, rule_shapes(tokens, dtype, heads, heads, dim, dim, decays=(heads, dim))

    def tensors(self) -> Table:
        return {
            **{f"{x}_proj": x for x in "qkv"},
            **{f"{x}_conv1d.weight": matrix(f"conv_{x}", tail=(1, 0)) for x in "qkv"},
            "f_a_proj": "decay_down",
            "f_b_proj": "decay",
            "dt_bias": "dt_bias",
            "A_log": Arrays(("a_log",), view=(1, 1, self.heads, 1), order=(0, 1, 2, 3)),
            "b_proj": "rate",
            "g_a_proj": "gate_down",
            "g_b_proj": "gate",
            "o_norm": "norm",
            "o_proj": "out",
        }


class KimiDeltaMixer(DeltaMixer):
    """As DeltaMixer, with decays of features and a sigmoid gate.

    Heads are sharded over the tensor ranks. All ranks hold the projections that decays and gates come from,
    and compute them.
    """

    no_fp8 = ("decay_down", "decay", "rate")  # decays are exponents

    def __init__(
        self,
        block: KimiDelta,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        init, heads, inner = Init.of(init, compute), over_tensor(block.heads), block.inner
        self.q, self.k, self.v = (Linear(llm.dim, inner, init, sharded_out=heads) for _ in range(3))
        self.conv_q, self.conv_k, self.conv_v = taps(block.conv, [(inner, heads)] * 3, init)
        self.decay_down, self.gate_down = (Linear(llm.dim, block.head_dim, init) for _ in range(2))
        self.decay, self.gate = (Linear(block.head_dim, inner, init, sharded_out=heads) for _ in range(2))
        self.rate = Linear(llm.dim, block.heads, init, sharded_out=heads)
        rate_H = jax.random.uniform(init.next_key(), (block.heads,), minval=RATES[0], maxval=RATES[1])
        self.a_log = init.param(jnp.log(rate_H), (heads,))
        least, most = jnp.log(jnp.asarray(STEPS))
        step_U = jnp.exp(jax.random.uniform(init.next_key(), (inner,), minval=least, maxval=most))
        self.dt_bias = init.param(step_bias(step_U), (heads,))
        self.norm = RMSNorm(block.head_dim, llm.norm_eps, init)
        self.out = Linear(inner, llm.dim, init, std=residual_std(inner, llm), sharded_in=heads)
        self.key_dim = self.value_dim = block.head_dim
        self.groups, self.mesh, self.largest_rate = heads, init.mesh, 1.0
        self.chunk = min(compute.blocks.scan, LONGEST_CHUNK)

    def _decays(self, x_ND: Array) -> Array:
        acc = accumulation_dtype(x_ND)
        step_NU = self.decay(self.decay_down(x_ND)).astype(acc) + self.dt_bias[...].astype(acc)
        step_NHK = jax.nn.softplus(step_NU).reshape(len(x_ND), -1, self.key_dim)
        return -jnp.exp(self.a_log[...].astype(acc))[:, None] * step_NHK

    def _gate(self, x_ND: Array, dtype: Any) -> Array:
        return jax.nn.sigmoid(self.gate(self.gate_down(x_ND)).astype(dtype))


register_block(KimiDelta)
