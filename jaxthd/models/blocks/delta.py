"""The gated delta rule's layer (Yang et al., Gated Delta Networks, 2024), as in Qwen3-Next (2025).

Legend: N tokens, D model dim, H value heads, V value dim, G key heads, K key dim, I = H V, U = G K,
C = 2 U + I channels of the convolution; in decoding n documents of this rank.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import Block, PassedSizes, equal_parts, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Table, matrix
from jaxthd.models.blocks.contract import Prefilled, residual_std
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.ops.activations import silu
from jaxthd.ops.conv import causal_conv, last_inputs, next_inputs
from jaxthd.ops.delta.rule import DeltaInputs
from jaxthd.ops.delta.split_documents import outputs_and_states
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, ShardedDim, over_tensor, own_part

UNIT_EPS = 1e-6
"""Added to the square of a query's or key's length before it is made 1."""


LONGEST_CHUNK = 64
"""Most tokens of a scan chunk: the inverse of its triangle costs the square of its length for each token.
The cost counts it, so that pipeline stages do not depend on compute.blocks."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Block):
    """The gated delta rule (Yang et al., Gated Delta Networks, 2024), as in Qwen3-Next."""

    title = "gated delta rule"
    letter = "D"
    splits_documents = True
    rolls_back = True
    equal_sizes = ("value_heads",)
    shared_sizes = ("key_heads",)
    convolution = "conv"
    kind: Annotated[Literal["delta"], DERIVED] = "delta"
    key_heads: int = 2
    """Heads of queries and keys; must divide value_heads."""
    value_heads: int = 4
    """Heads of values, decays and output gates; each has a state [key_dim, value_dim]."""
    key_dim: int = 32
    """Dim of a query or key head."""
    value_dim: int = 32
    """Dim of a value head."""
    conv: int = 4
    """Taps of the causal convolution over queries, keys and values."""
    negative_eigenvalues: bool = False
    """Whether rates are up to 2, not 1, so that what a token leaves of the state along its key may have the
    other sign (Grazzi et al., 2025; OLMo Hybrid)."""
    norm_eps: float = 0.0
    """Epsilon of the norm of the heads' outputs (OLMo Hybrid: 1e-5); 0: the decoder's."""

    @property
    def keys(self) -> int:
        """Features of all keys."""
        return self.key_heads * self.key_dim

    @property
    def inner(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "DeltaMixer":
        return DeltaMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        projections = dim * (2 * self.keys + 3 * self.inner + 2 * self.value_heads)
        pairs = LONGEST_CHUNK * (self.keys + self.value_heads * (self.key_dim + 2 * self.value_dim) / 2)
        return float(projections + pairs + 4 * self.inner * self.key_dim)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        sizes = "value_heads", self.value_heads, "key_heads", self.key_heads
        yield from equal_parts(where, *sizes, "equally many value heads share each key head")

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        """The map of a context chunk has a matrix a head."""
        heads, groups = self.value_heads // tensor, max(self.key_heads // tensor, 1)
        state = heads * self.key_dim * (self.key_dim + self.value_dim) * max(activation, 4)
        channels = heads * self.value_dim + 2 * groups * self.key_dim
        return PassedSizes(state, (self.conv - 1) * channels * activation)

    def recurrence(self, tensor: int, tokens: int, dtype: Any) -> tuple[Any, Any]:
        heads = self.value_heads // tensor
        sizes = max(self.key_heads // tensor, 1), heads, self.key_dim, self.value_dim
        return delta_rule, rule_shapes(tokens, dtype, *sizes, decays=(heads,))

    def tensors(self) -> Table:
        return {
            "in_proj_qkvz.weight": matrix("q.w", "k.w", "v.w", "z.w", groups=self.key_heads),
            "in_proj_ba.weight": matrix("rate.w", "dt.w", groups=self.key_heads),
            "conv1d.weight": matrix("conv_q", "conv_k", "conv_v", tail=(1, 0)),
            "dt_bias": "dt_bias",
            "A_log": "a_log",
            "norm": "norm",
            "out_proj": "out",
        }


class DeltaMixer(nnx.Module):
    """Convolution over q, k, v; queries and keys of length 1; the rule; RMSNorm of each head; gate."""

    no_fp8: tuple[str, ...] = ("dt", "rate")  # time steps are exponents

    def __init__(
        self,
        delta: GatedDelta,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        init = Init.of(init, compute)
        heads, groups = over_tensor(delta.value_heads), over_tensor(delta.key_heads)
        self.q = Linear(llm.dim, delta.keys, init, sharded_out=groups)
        self.k = Linear(llm.dim, delta.keys, init, sharded_out=groups)
        self.v = Linear(llm.dim, delta.inner, init, sharded_out=heads)
        self.z = Linear(llm.dim, delta.inner, init, sharded_out=heads)
        self.rate = Linear(llm.dim, delta.value_heads, init, sharded_out=heads)
        self.dt = Linear(llm.dim, delta.value_heads, init, sharded_out=heads)
        sizes = (delta.keys, groups), (delta.keys, groups), (delta.inner, heads)
        self.conv_q, self.conv_k, self.conv_v = taps(delta.conv, sizes, init)
        # Decays start as Qwen3-Next's: rates uniform in [0, 16], time steps softplus(1).
        rate_H = 16 * jax.random.uniform(init.next_key(), (delta.value_heads,), minval=1e-3)
        self.a_log = init.param(jnp.log(rate_H), (heads,))
        self.dt_bias = init.ones((delta.value_heads,), (heads,))
        self.norm = RMSNorm(delta.value_dim, delta.norm_eps or llm.norm_eps, init)
        self.out = Linear(delta.inner, llm.dim, init, std=residual_std(delta.inner, llm), sharded_in=heads)
        self.key_dim, self.value_dim = delta.key_dim, delta.value_dim
        self.groups, self.mesh = groups, init.mesh
        self.largest_rate = 2.0 if delta.negative_eigenvalues else 1.0
        self.chunk = min(compute.blocks.scan, LONGEST_CHUNK)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        inputs = self._inputs(x_ND, self._project(x_ND), segments)
        nowhere = jnp.zeros(0, jnp.int32)
        y_NHV, _ = outputs_and_states(inputs, segments, nowhere, chunk=self.chunk)
        return self._finish(y_NHV, x_ND)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """State: the convolution's last inputs and the rule's state, at the end of each prompt."""
        inputs_NC = self._project(x_ND)
        inputs = self._inputs(x_ND, inputs_NC, segments)
        ends = segments.local_index(prompts.ends.last)
        y_NHV, state_DHKV = outputs_and_states(inputs, segments, ends, chunk=self.chunk)
        last_DkC = last_inputs(inputs_NC, *prompts.ends, self.conv_v.shape[0], segments)
        state = [prompts.state(x, segments) for x in (last_DkC, state_DHKV)]
        return Prefilled(self._finish(y_NHV, x_ND), [], state)

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        last_nkC, state_nHKV = map(now.latest, state)
        window_NKC, last_nLkC = next_inputs(last_nkC, now.by_document(self._project(x_ND)))
        convolved_NC = silu((window_NKC * self._taps(x_ND.dtype)).sum(axis=1))
        inputs = self._by_head(convolved_NC, self._decays(x_ND), self._rates(x_ND))
        acc, heads = state_nHKV.dtype, state_nHKV.shape[1]
        q_NHK, k_NHK = (jnp.repeat(x, heads // x.shape[1], axis=1).astype(acc) for x in inputs[:2])
        factors_NHK1 = jnp.exp(inputs.decay).reshape(len(x_ND), heads, -1, 1)
        each_N = k_NHK, inputs.v.astype(acc), inputs.rate, factors_NHK1
        each_Ln = (now.by_document(x).swapaxes(0, 1) for x in each_N)
        states = []
        for k_nHK, v_nHV, rate_nH, factors_nHK1 in zip(*each_Ln, strict=True):
            state_nHKV = factors_nHK1 * state_nHKV
            known_nHV = jnp.einsum("nhkv,nhk->nhv", state_nHKV, k_nHK)
            written_nHV = rate_nH[..., None] * (v_nHV - known_nHV)
            state_nHKV = state_nHKV + k_nHK[..., None] * written_nHV[:, :, None]
            states.append(state_nHKV)
        state_nLHKV = jnp.stack(states, axis=1)
        y_nLHV = jnp.einsum("nlhkv,nlhk->nlhv", state_nLHKV, now.by_document(q_NHK))
        return self._finish(y_nLHV.reshape(-1, *y_nLHV.shape[2:]), x_ND), [last_nLkC, state_nLHKV]

    # --- before the rule ---

    def _project(self, x_ND: Array) -> Float[Array, "N C"]:
        """Inputs of the convolution: q, k and v side by side."""
        return jnp.concatenate([self.q(x_ND), self.k(x_ND), self.v(x_ND)], axis=1)

    def _taps(self, dtype: Any) -> Array:
        """This rank's taps of the convolution, [taps, C]."""
        q_KU, k_KU = (own_part(w[...], 1, self.groups, self.mesh) for w in (self.conv_q, self.conv_k))
        return jnp.concatenate([q_KU, k_KU, self.conv_v[...]], axis=1).astype(dtype)

    def _inputs(self, x_ND: Array, inputs_NC: Array, segments: Segments) -> DeltaInputs:
        taps_KC = self._taps(x_ND.dtype)
        no_bias_C = jnp.zeros(taps_KC.shape[1], taps_KC.dtype)
        convolved_NC = causal_conv(inputs_NC, taps_KC, no_bias_C, segments, silu=True)
        return self._by_head(convolved_NC, self._decays(x_ND), self._rates(x_ND))

    def _decays(self, x_ND: Array) -> Array:
        """Logarithms, at most 0, [N, H] or, of features, [N, H, K], in promote(float32, x)."""
        acc = accumulation_dtype(x_ND)
        step_NH = jax.nn.softplus(self.dt(x_ND).astype(acc) + self.dt_bias[...].astype(acc))
        return -jnp.exp(self.a_log[...].astype(acc)) * step_NH

    def _rates(self, x_ND: Array) -> Array:
        return self.largest_rate * jax.nn.sigmoid(self.rate(x_ND).astype(accumulation_dtype(x_ND)))

    def _by_head(self, convolved_NC: Array, decay: Array, rate_NH: Array) -> DeltaInputs:
        """convolved_NC: q, k and v side by side."""
        keys = (convolved_NC.shape[1] - rate_NH.shape[1] * self.value_dim) // 2
        q_NU, k_NU, v_NI = jnp.split(convolved_NC, (keys, 2 * keys), axis=1)
        q_NGK, k_NGK = (x.reshape(len(x), -1, self.key_dim) for x in (q_NU, k_NU))
        v_NHV = v_NI.reshape(*rate_NH.shape, -1)
        return DeltaInputs(_unit(q_NGK, self.key_dim**-0.5), _unit(k_NGK), v_NHV, decay, rate_NH)

    # --- after the rule ---

    def _finish(self, y_NHV: Array, x_ND: Array) -> Array:
        gate_NI = self._gate(x_ND, y_NHV.dtype)
        normed_NI = self.norm.of_heads(y_NHV).reshape(gate_NI.shape)
        return self.out((normed_NI * gate_NI).astype(x_ND.dtype))

    def _gate(self, x_ND: Array, dtype: Any) -> Array:
        return silu(self.z(x_ND).astype(dtype))


def delta_rule(segments: Segments, inputs: DeltaInputs) -> Array:
    """The rule's outputs, in chunks as a GPU has them."""
    return outputs_and_states(inputs, segments, jnp.zeros(0, jnp.int32), chunk=LONGEST_CHUNK)[0]


def rule_shapes(
    tokens: int, dtype: Any, groups: int, heads: int, key_dim: int, value_dim: int, decays: tuple[int, ...]
) -> DeltaInputs:
    """Shapes of the rule's inputs. decays: of a token."""
    acc = jnp.promote_types(dtype, jnp.float32)
    keys, values = (groups, key_dim), (heads, value_dim)
    of = ((keys, dtype), (keys, dtype), (values, dtype), (decays, acc), ((heads,), acc))
    shapes: list[Any] = [jax.ShapeDtypeStruct((tokens, *shape), kind) for shape, kind in of]
    return DeltaInputs(*shapes)


def taps(count: int, sizes: Iterable[tuple[int, ShardedDim | None]], init: Init) -> list[nnx.Param]:
    """New taps of convolutions, [count, channels] each. sizes: (channels, how tensor ranks divide them)."""
    return [init.normal((count, dim), (None, sharded), std=1 / math.sqrt(count)) for dim, sharded in sizes]


def _unit(x_NGK: Array, length: float = 1.0) -> Array:
    """Each head's vector with this length, computed in promote(float32, x)."""
    x = x_NGK.astype(accumulation_dtype(x_NGK))
    squares = jnp.square(x).sum(-1, keepdims=True)
    return (length * x * jax.lax.rsqrt(squares + UNIT_EPS)).astype(x_NGK.dtype)


register_block(GatedDelta)
