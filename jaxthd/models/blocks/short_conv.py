"""Gated short convolutions, as in LFM2 (Liquid AI, 2025).

Legend: N tokens, D model dim, I channels of the convolution, K taps; in decoding n documents of this rank.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import Block, PassedSizes, register_block
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Table, matrix, rows
from jaxthd.models.blocks.contract import Prefilled, residual_std
from jaxthd.models.layers import Linear
from jaxthd.ops.conv import causal_conv, last_inputs, next_inputs
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor


@dataclass(frozen=True, kw_only=True)
class ShortConv(Block):
    """A causal depthwise convolution of a few taps between two gates (LFM2): out(c * conv(b * x))."""

    title = "short convolution"
    letter = "C"
    splits_documents = True
    rolls_back = True
    equal_sizes = ("inner",)
    convolution = "conv"
    kind: Annotated[Literal["short_conv"], DERIVED] = "short_conv"
    inner: int = 256
    """Channels of the convolution (LFM2: the model's dim)."""
    conv: int = 3
    """Taps of the convolution."""
    bias: bool = False
    """Whether the projections and the convolution have biases."""

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "ShortConvMixer":
        return ShortConvMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        return float(self.inner * (4 * dim + self.conv))

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        return PassedSizes(0, (self.conv - 1) * self.inner // tensor * activation)

    def tensors(self) -> Table:
        return {
            "in_proj.weight": matrix("b.w", "c.w", "x.w"),
            "in_proj.bias": rows("b.bias", "c.bias", "x.bias"),
            "conv.weight": matrix("conv", tail=(1, 0)),
            "conv.bias": "conv_bias",
            "out_proj": "out",
        }


class ShortConvMixer(nnx.Module):
    """Projections to b, c and x; the convolution of b x; times c; the output's projection."""

    def __init__(
        self,
        block: ShortConv,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        init, inner, bias = Init.of(init, compute), block.inner, block.bias
        channels = over_tensor(inner)
        self.b = Linear(llm.dim, inner, init, bias=bias, sharded_out=channels)
        self.c = Linear(llm.dim, inner, init, bias=bias, sharded_out=channels)
        self.x = Linear(llm.dim, inner, init, bias=bias, sharded_out=channels)
        self.conv = init.normal((block.conv, inner), (None, channels), std=1 / math.sqrt(block.conv))
        self.conv_bias = init.zeros((inner,), (channels,)) if bias else None
        self.out = Linear(inner, llm.dim, init, bias=bias, std=residual_std(inner, llm), sharded_in=channels)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._convolved(x_ND, self._inputs(x_ND), segments)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """State: the convolution's last inputs at the end of each prompt."""
        inputs_NI = self._inputs(x_ND)
        last_DkI = last_inputs(inputs_NI, *prompts.ends, len(self.conv[...]), segments)
        return Prefilled(self._convolved(x_ND, inputs_NI, segments), [], [prompts.state(last_DkI, segments)])

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        inputs_nLI = now.by_document(self._inputs(x_ND))
        window_NKI, last_nLkI = next_inputs(now.latest(state[0]), inputs_nLI)
        taps_KI, bias_I = self._taps(x_ND.dtype)
        convolved_NI = bias_I + (window_NKI * taps_KI).sum(axis=1)
        return self.out(self.c(x_ND) * convolved_NI), [last_nLkI]

    def _inputs(self, x_ND: Array) -> Float[Array, "N I"]:
        return self.b(x_ND) * self.x(x_ND)

    def _taps(self, dtype: Any) -> tuple[Array, Array]:
        """Taps [K, I] and biases [I] of the convolution."""
        taps_KI = self.conv[...].astype(dtype)
        bias_I = jnp.zeros_like(taps_KI[0]) if self.conv_bias is None else self.conv_bias[...].astype(dtype)
        return taps_KI, bias_I

    def _convolved(self, x_ND: Array, inputs_NI: Array, segments: Segments) -> Array:
        return self.out(self.c(x_ND) * causal_conv(inputs_NI, *self._taps(x_ND.dtype), segments))


register_block(ShortConv)
