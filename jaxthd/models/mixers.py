"""The decoder's mixers: Mamba2, grouped-query attention, MLP, mixture of experts (Nemotron-H, Nemotron-3).

Each takes (x, segments) and no tokens but its document's reach a token's output. Dims are read from the
parameters. Definitions: NVIDIA, Nemotron-H (2025) and Nemotron 3 (2025).

Legend: N tokens, D model dim, H heads, P Mamba head dim, G Mamba groups, S Mamba state, d attention head dim,
E experts, k experts a token, M expert layout rows, F inner dim, I Mamba inner dim (H * P).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.models.layers import Linear, RMSNorm, relu_squared
from jaxthd.ops.conv import causal_conv
from jaxthd.ops.grouped_matmul import combine, dispatch, expert_layout, grouped_matmul
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.ring import packed_attention
from jaxthd.ops.ssd import ssd
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init


def _residual_std(fan_in: int, config: LLMConfig) -> float:
    """Projections back into the residual stream start smaller, against growth with depth."""
    return 1 / math.sqrt(fan_in * len(config.pattern))


class Attention(nnx.Module):
    """Causal grouped-query attention, no rotary embedding, no bias."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        llm = config.llm
        self.q = Linear(llm.dim, llm.q_heads * llm.head_dim, init)
        self.k = Linear(llm.dim, llm.kv_heads * llm.head_dim, init)
        self.v = Linear(llm.dim, llm.kv_heads * llm.head_dim, init)
        inner = llm.q_heads * llm.head_dim
        self.out = Linear(inner, llm.dim, init, std=_residual_std(inner, llm))
        self.head_dim = llm.head_dim
        self.exchange = config.context_exchange

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        q_NHd, k_NKd, v_NKd = (
            f(x_ND).reshape(len(x_ND), -1, self.head_dim) for f in (self.q, self.k, self.v)
        )
        scale = 1 / math.sqrt(self.head_dim)
        o_NHd = packed_attention(q_NHd, k_NKd, v_NKd, segments, scale=scale, exchange=self.exchange)
        return self.out(o_NHd.reshape(len(x_ND), -1))


class Mamba2(nnx.Module):
    """Mamba2 (Dao and Gu, 2024): convolution over x, B, C; scan; gate; grouped RMSNorm."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        llm = config.llm
        inner, shared = llm.mamba_heads * llm.mamba_head_dim, llm.mamba_groups * llm.mamba_state
        self.z = Linear(llm.dim, inner, init)
        self.x = Linear(llm.dim, inner, init)
        self.b = Linear(llm.dim, shared, init)
        self.c = Linear(llm.dim, shared, init)
        self.dt = Linear(llm.dim, llm.mamba_heads, init)
        taps, std = llm.mamba_conv, 1 / math.sqrt(llm.mamba_conv)
        self.conv_x, self.conv_b, self.conv_c = (
            init.normal((taps, dim), std=std) for dim in (inner, shared, shared)
        )
        self.conv_bias_x, self.conv_bias_b, self.conv_bias_c = (
            init.zeros((dim,)) for dim in (inner, shared, shared)
        )
        # Time steps start log-uniform in [0.001, 0.1], decay rates uniform in [1, 16].
        uniform = jax.random.uniform(init.next_key(), (2, llm.mamba_heads))
        step_H = jnp.exp(math.log(1e-3) + uniform[0] * math.log(100))
        self.dt_bias = init.param(step_H + jnp.log(-jnp.expm1(-step_H)))
        self.a_log = init.param(jnp.log(1 + 15 * uniform[1]))
        self.d = init.ones((llm.mamba_heads,))
        self.norm = RMSNorm(inner, llm.norm_eps, init, groups=llm.mamba_groups)
        self.out = Linear(inner, llm.dim, init, std=_residual_std(inner, llm))
        self.groups = llm.mamba_groups
        self.chunk = llm.mamba_chunk
        self.dt_limit = llm.mamba_dt_limit

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        n, heads = len(x_ND), self.a_log.shape[0]
        acc = accumulation_dtype(x_ND)
        projected = [f(x_ND) for f in (self.x, self.b, self.c)]
        taps = jnp.concatenate([w[...] for w in (self.conv_x, self.conv_b, self.conv_c)], axis=1)
        bias = jnp.concatenate([b[...] for b in (self.conv_bias_x, self.conv_bias_b, self.conv_bias_c)])
        joined = jnp.concatenate(projected, axis=1)
        joined = jax.nn.silu(causal_conv(joined, taps.astype(x_ND.dtype), bias.astype(x_ND.dtype), segments))
        inner, shared = projected[0].shape[1], projected[1].shape[1]
        x_NI, b_NGS, c_NGS = jnp.split(joined, (inner, inner + shared), axis=1)
        x_NHP = x_NI.reshape(n, heads, -1)
        b_NGS, c_NGS = (v.reshape(n, self.groups, -1) for v in (b_NGS, c_NGS))
        dt_NH = jax.nn.softplus(self.dt(x_ND).astype(acc) + self.dt_bias[...].astype(acc))
        dt_NH = jnp.clip(dt_NH, *self.dt_limit)
        a_H = -jnp.exp(self.a_log[...].astype(acc))
        y_NHP = ssd(x_NHP, dt_NH, a_H, b_NGS, c_NGS, segments, chunk=self.chunk)
        y_NHP = y_NHP + self.d[...].astype(acc)[:, None] * x_NHP
        gated_NI = y_NHP.reshape(n, inner) * jax.nn.silu(self.z(x_ND).astype(acc))
        return self.out(self.norm(gated_NI).astype(x_ND.dtype))


class MLP(nnx.Module):
    """up, relu^2, down; no gate, no bias."""

    def __init__(self, dim: int, inner: int, config: ModelConfig, init: Init) -> None:
        self.up = Linear(dim, inner, init)
        self.down = Linear(inner, dim, init, std=_residual_std(inner, config.llm))

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self.down(relu_squared(self.up(x_ND)))


class MoE(nnx.Module):
    """Routed experts with a float32 sigmoid router, plus one shared expert.

    The correction bias enters the choice of experts only. Padding is not routed.
    """

    def __init__(self, config: ModelConfig, init: Init) -> None:
        llm = config.llm
        width = llm.latent_dim or llm.dim
        self.router = Linear(llm.dim, llm.experts, init)
        self.correction_bias = init.buffer(jnp.zeros(llm.experts))
        self.up = init.normal((llm.experts, width, llm.expert_dim))
        self.down = init.normal((llm.experts, llm.expert_dim, width), std=_residual_std(llm.expert_dim, llm))
        self.latent_in = Linear(llm.dim, width, init) if llm.latent_dim else None
        self.latent_out = Linear(width, llm.dim, init) if llm.latent_dim else None
        self.shared = MLP(llm.dim, llm.shared_expert_dim, config, init)
        self.per_token = llm.experts_per_token
        self.scale = llm.router_scale
        self.block = config.expert_block

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        acc = accumulation_dtype(x_ND)
        score_NE = jax.nn.sigmoid(self.router(x_ND.astype(acc)))
        _, chosen_Nk = jax.lax.top_k(
            jax.lax.stop_gradient(score_NE) + self.correction_bias[...], self.per_token
        )
        weight_Nk = jnp.take_along_axis(score_NE, chosen_Nk, axis=1)
        weight_Nk = self.scale * weight_Nk / (weight_Nk.sum(-1, keepdims=True) + 1e-20)
        layout = expert_layout(chosen_Nk, segments.valid, self.up.shape[0], self.block)
        routed = x_ND if self.latent_in is None else self.latent_in(x_ND)
        up, down = (w[...].astype(x_ND.dtype) for w in (self.up, self.down))
        inner_MF = grouped_matmul(dispatch(routed, layout), up, layout.expert, layout.used)
        out_M = grouped_matmul(relu_squared(inner_MF), down, layout.expert, layout.used)
        routed = combine(out_M, weight_Nk, layout)
        if self.latent_out is not None:
            routed = self.latent_out(routed)
        return routed + self.shared(x_ND, segments)
