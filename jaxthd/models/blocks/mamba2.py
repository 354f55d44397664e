"""Mamba2 (Dao and Gu, 2024), as in Nemotron-H, Nemotron 3, Granite 4 and Falcon-H1 (all 2025).

Legend: N tokens, D model dim, H heads, P head dim, G groups, S state, I inner dim (H * P), U = G S,
C = I + 2 U channels of the convolution, K taps; in decoding n documents of this rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import Block, PassedSizes, ScanSizes, equal_parts, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Table, matrix, rows
from jaxthd.models.blocks.contract import Prefilled, residual_std, step_bias
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.ops.activations import silu
from jaxthd.ops.backend import resolve_backend
from jaxthd.ops.conv import causal_conv, last_inputs, next_inputs
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.ssd import ssd_and_states
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor, own_part

PROJECTED = ("z", "x", "b", "c", "dt")
"""The projections of the input: gates, inputs, B, C, time steps."""
COST_CHUNK = 128
"""Tokens of a scan chunk, as the cost counts them: pipeline stages do not depend on compute.blocks."""


@dataclass(frozen=True, kw_only=True)
class Mamba2(Block):
    """Mamba2 (Dao and Gu, 2024), as in Nemotron-H, Granite 4 and Falcon-H1."""

    title = "Mamba2"
    letter = "M"
    splits_documents = True
    rolls_back = True
    equal_sizes = ("heads",)
    shared_sizes = ("groups",)
    convolution = "conv"
    kind: Annotated[Literal["mamba"], DERIVED] = "mamba"
    heads: int = 8
    """Heads."""
    head_dim: int = 32
    """Dim of a head."""
    state: int = 32
    """State size N of a head."""
    groups: int = 2
    """Groups of heads that share B and C; must divide heads."""
    conv: int = 4
    """Taps of the causal convolution."""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Lower and upper limit of the time step after softplus."""
    bias: bool = False
    """Whether the projections have biases."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """Where the grouped RMSNorm of the outputs stands: behind the gate, before it, or nowhere (Falcon-H1)."""
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on z, x, B, C and on the time step before dt_bias (Falcon-H1: ssm_multipliers)."""

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Features of B, and of C."""
        return self.groups * self.state

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "Mamba2Mixer":
        return Mamba2Mixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        scan = self.inner * (2 * self.state + COST_CHUNK) + self.shared * COST_CHUNK
        return float(dim * (3 * self.inner + 2 * self.shared + self.heads) + scan)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        why = "equally many heads share each group's B, C and norm"
        yield from equal_parts(where, "heads", self.heads, "groups", self.groups, why)
        low, high = self.dt_limit
        if not 0 <= low < high:
            expected = "0 <= lower < upper, because they clamp a time step"
            change = f"set {where}.dt_limit to (0.0, inf), which clamps nothing"
            yield Finding(f"{where}.dt_limit is ({low}, {high})", expected, change)

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        heads, groups, head_dim, state = self.scan(tensor)
        inner = heads * head_dim
        return PassedSizes(
            (heads + inner * state) * 4, (self.conv - 1) * (inner + 2 * groups * state) * activation
        )

    def scan(self, tensor: int) -> ScanSizes:
        return ScanSizes(self.heads // tensor, max(self.groups // tensor, 1), self.head_dim, self.state)

    def tensors(self) -> Table:
        return {
            "in_proj.weight": matrix(*(f"{part}.w" for part in PROJECTED)),
            "in_proj.bias": rows(*(f"{part}.bias" for part in PROJECTED)),
            "conv1d.weight": matrix("conv_x", "conv_b", "conv_c", tail=(1, 0)),
            "conv1d.bias": rows("conv_bias_x", "conv_bias_b", "conv_bias_c"),
            "dt_bias": "dt_bias",
            "A_log": "a_log",
            "D": "d",
            "norm": "norm",
            "out_proj": "out",
        }


class Mamba2Mixer(nnx.Module):
    """Convolution over x, B, C; scan; gate; grouped RMSNorm."""

    no_fp8 = ("dt",)  # time steps are exponents

    def __init__(
        self, block: Mamba2, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        inner, shared = block.inner, block.shared
        heads, groups = over_tensor(block.heads), over_tensor(block.groups)
        bias = block.bias
        self.z = Linear(llm.dim, inner, init, bias=bias, sharded_out=heads)
        self.x = Linear(llm.dim, inner, init, bias=bias, sharded_out=heads)
        self.b = Linear(llm.dim, shared, init, bias=bias, sharded_out=groups)
        self.c = Linear(llm.dim, shared, init, bias=bias, sharded_out=groups)
        self.dt = Linear(llm.dim, block.heads, init, bias=bias, sharded_out=heads)
        taps, std = block.conv, 1 / math.sqrt(block.conv)
        convolved = ((inner, heads), (shared, groups), (shared, groups))
        self.conv_x, self.conv_b, self.conv_c = (
            init.normal((taps, dim), (None, sharded), std=std) for dim, sharded in convolved
        )
        self.conv_bias_x, self.conv_bias_b, self.conv_bias_c = (
            init.zeros((dim,), (sharded,)) if block.conv_bias else None for dim, sharded in convolved
        )
        # Time steps start log-uniform in [0.001, 0.1], decay rates uniform in [1, 16].
        uniform = jax.random.uniform(init.next_key(), (2, block.heads))
        step_H = jnp.exp(math.log(1e-3) + uniform[0] * math.log(100))
        self.dt_bias = init.param(step_bias(step_H), (heads,))
        self.a_log = init.param(jnp.log(1 + 15 * uniform[1]), (heads,))
        self.d = init.ones((block.heads,), (heads,))
        norm = RMSNorm(inner, llm.norm_eps, init, groups=block.groups, sharded=heads)
        self.norm = None if block.norm == "none" else norm
        self.out = Linear(inner, llm.dim, init, bias=bias, std=residual_std(inner, llm), sharded_in=heads)
        self.state = block.state
        self.groups, self.mesh = groups, init.mesh
        self.chunk, self.backend = compute.blocks.scan, resolve_backend(compute.scan_backend)
        self.dt_limit, self.factors = block.dt_limit, block.factors
        self.gates_first = block.norm == "after_gate"

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        inputs = self._scan_inputs(x_ND, self._project(x_ND), segments)
        y_NHP = scan(inputs, segments, chunk=self.chunk, backend=self.backend)
        return self._scan_outputs(y_NHP, inputs.x, x_ND)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """State: the convolution's last inputs and the scan's state, at the end of each prompt."""
        inputs_NC = self._project(x_ND)
        inputs = self._scan_inputs(x_ND, inputs_NC, segments)
        ends = segments.local_index(prompts.ends.last)
        y_NHP, state_DHPS = ssd_and_states(inputs, segments, ends, chunk=self.chunk)
        last_DkC = last_inputs(inputs_NC, *prompts.ends, self.conv_x.shape[0], segments)
        state = [prompts.state(x, segments) for x in (last_DkC, state_DHPS)]
        return Prefilled(self._scan_outputs(y_NHP, inputs.x, x_ND), [], state)

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        last_nkC, state_nHPS = map(now.latest, state)
        window_NKC, last_nLkC = next_inputs(last_nkC, now.by_document(self._project(x_ND)))
        taps_KC, bias_C = self._taps(x_ND.dtype)
        convolved_NC = silu(bias_C + (window_NKC * taps_KC).sum(axis=1))
        x_NHP, dt_NH, a_H, b_NGS, c_NGS = self._by_head(
            convolved_NC, self._time_steps(x_ND), self._rates(x_ND)
        )
        b_NHS, c_NHS = (jnp.repeat(v, x_NHP.shape[1] // v.shape[1], axis=1) for v in (b_NGS, c_NGS))
        added_NHPS = (dt_NH[..., None] * x_NHP)[..., None] * b_NHS[:, :, None]
        kept_NH11 = jnp.exp(dt_NH * a_H)[..., None, None]
        each_Ln = (now.by_document(v).swapaxes(0, 1) for v in (kept_NH11, added_NHPS))
        states = []
        for kept, added in zip(*each_Ln, strict=True):
            state_nHPS = kept * state_nHPS + added
            states.append(state_nHPS)
        state_nLHPS = jnp.stack(states, axis=1)
        c_nLHS = now.by_document(c_NHS).astype(state_nLHPS.dtype)
        y_NHP = jnp.einsum("nlhps,nlhs->nlhp", state_nLHPS, c_nLHS).reshape(x_NHP.shape)
        y_NHP = y_NHP + self.d[...].astype(y_NHP.dtype)[:, None] * x_NHP
        return self._finish(y_NHP, x_ND), [last_nLkC, state_nLHPS]

    # --- before the scan ---

    def _project(self, x_ND: Array) -> Float[Array, "N C"]:
        """Inputs of the convolution: x, B and C side by side."""
        parts = zip(self.factors[1:4], (self.x, self.b, self.c), strict=True)
        return jnp.concatenate([factor * part(x_ND) for factor, part in parts], axis=1)

    def _taps(self, dtype: Any) -> tuple[Array, Array]:
        """This rank's taps [K, C] and biases [C] of the convolution."""
        b_KU, c_KU = (own_part(w[...], 1, self.groups, self.mesh) for w in (self.conv_b, self.conv_c))
        taps_KC = jnp.concatenate([self.conv_x[...], b_KU, c_KU], axis=1)
        if self.conv_bias_x is None or self.conv_bias_b is None or self.conv_bias_c is None:
            return taps_KC.astype(dtype), jnp.zeros(taps_KC.shape[1], dtype)
        b_U, c_U = (own_part(b[...], 0, self.groups, self.mesh) for b in (self.conv_bias_b, self.conv_bias_c))
        return taps_KC.astype(dtype), jnp.concatenate([self.conv_bias_x[...], b_U, c_U]).astype(dtype)

    def _scan_inputs(self, x_ND: Array, inputs_NC: Array, segments: Segments) -> ScanInputs:
        convolved_NC = causal_conv(inputs_NC, *self._taps(x_ND.dtype), segments, silu=True)
        return self._by_head(convolved_NC, self._time_steps(x_ND), self._rates(x_ND))

    def _time_steps(self, x_ND: Array) -> Array:
        acc = accumulation_dtype(x_ND)
        raw_NH = self.factors[4] * self.dt(x_ND).astype(acc)
        dt_NH = jax.nn.softplus(raw_NH + self.dt_bias[...].astype(acc))
        return jnp.clip(dt_NH, *self.dt_limit)

    def _rates(self, x_ND: Array) -> Array:
        """Decay rates, negative, in promote(float32, x)."""
        return -jnp.exp(self.a_log[...].astype(accumulation_dtype(x_ND)))

    def _by_head(self, convolved_NC: Array, dt_NH: Array, a_H: Array) -> ScanInputs:
        """convolved_NC: x, B and C side by side."""
        n, heads = dt_NH.shape
        inner = heads * (self.conv_x.shape[1] // len(self.a_log[...]))
        x_NI, b_NU, c_NU = jnp.split(convolved_NC, (inner, (inner + convolved_NC.shape[1]) // 2), axis=1)
        b_NGS, c_NGS = (v.reshape(n, -1, self.state) for v in (b_NU, c_NU))
        return ScanInputs(x_NI.reshape(n, heads, -1), dt_NH, a_H, b_NGS, c_NGS)

    # --- after the scan ---

    def _scan_outputs(self, y_NHP: Array, x_NHP: Array, x_ND: Array) -> Array:
        """The sum is in promote(float32, x) and then in x's dtype, in which it goes through memory."""
        acc = accumulation_dtype(x_ND)
        y_NHP = y_NHP.astype(acc) + self.d[...].astype(acc)[:, None] * x_NHP
        return self._finish(y_NHP.astype(x_ND.dtype), x_ND)

    def _finish(self, y_NHP: Array, x_ND: Array) -> Array:
        y_NI, z_NI = y_NHP.reshape(len(x_ND), -1), self.factors[0] * self.z(x_ND)
        if self.norm is not None and self.gates_first:
            return self.out(self.norm.gated(y_NI, z_NI))
        acc = accumulation_dtype(z_NI)
        y_NI = y_NI.astype(acc) if self.norm is None else self.norm(y_NI.astype(acc))
        return self.out((y_NI * silu(z_NI.astype(acc))).astype(z_NI.dtype))


register_block(Mamba2)
