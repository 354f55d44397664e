"""The decoder's mixers: Mamba2, grouped-query attention, MLP, mixture of experts (Nemotron-H, Nemotron-3).

Each takes (x, segments) and no tokens but its document's reach a token's output. Dims are read from the
parameters. Definitions: NVIDIA, Nemotron-H (2025) and Nemotron 3 (2025).

For decoding each also has
    prefill(x, segments, prompts) -> (y, fixed, state): y as ever; what the prompts' documents need to go on
    step(x, fixed, state, now) -> (y, state): one token more of every document of this rank
where `fixed` stays as it is and `state` has a fixed shape (models/decoding.py).

Legend: N tokens, D model dim, H heads, P Mamba head dim, G Mamba groups, S Mamba state, d attention head dim,
E experts, k experts a token, M expert layout rows, F inner dim, I Mamba inner dim (H * P), C = I + 2 G S
channels of the convolution, U = G S; in decoding n documents of this rank, m new tokens of each. What Mamba2
scans: L tokens, h heads, c channels; these are N, H, C, or, where heads are sharded over R context ranks, all
tokens of the rows, H / R and a share of the channels (ops/head_exchange.py).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import Linear, RMSNorm, relu_squared
from jaxthd.ops.attention.blockwise import attention_forward
from jaxthd.ops.attention.ring import gather_in_order, merge, packed_attention
from jaxthd.ops.conv import causal_conv, last_inputs
from jaxthd.ops.grouped_matmul import combine, dispatch, expert_layout
from jaxthd.ops.head_exchange import head_ranks, own_heads, scan_segments, to_documents, to_heads, to_tokens
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.ssd import ssd_and_states
from jaxthd.packing.prompts import DOCUMENTS_BLOCK, Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.experts import exchanged_experts, expert_mlp, expert_sharding
from jaxthd.parallel.mesh import TOKEN_AXES
from jaxthd.parallel.params import Init, over_tensor, own_part
from jaxthd.parallel.tensor import psum_live

Prefilled = tuple[Array, list[Array], list[Array]]
"""(outputs, fixed, state) of a mixer."""
Parts = tuple[Array, Array, Array]
"""Mamba2's x, B and C before the convolution."""
ScanInputs = tuple[Array, Array, Array, Array, Array]
"""x, dt, a, B and C of Mamba2's scan."""


def _residual_std(fan_in: int, llm: LLMConfig) -> float:
    """Projections back into the residual stream start smaller, against growth with depth."""
    return 1 / math.sqrt(fan_in * len(llm.letters))


class Attention(nnx.Module):
    """Causal grouped-query attention, no rotary embedding, no bias."""

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        heads, shared = over_tensor(llm.q_heads), over_tensor(llm.kv_heads)
        inner = llm.q_heads * llm.head_dim
        self.q = Linear(llm.dim, inner, init, sharded_out=heads)
        self.k = Linear(llm.dim, llm.kv_heads * llm.head_dim, init, sharded_out=shared)
        self.v = Linear(llm.dim, llm.kv_heads * llm.head_dim, init, sharded_out=shared)
        self.out = Linear(inner, llm.dim, init, std=_residual_std(inner, llm), sharded_in=heads)
        self.head_dim = llm.head_dim
        self.exchange, self.backend = compute.context_exchange, compute.attention_backend

    def _project(self, x_ND: Array) -> tuple[Array, Array, Array]:
        q, k, v = (f(x_ND).reshape(len(x_ND), -1, self.head_dim) for f in (self.q, self.k, self.v))
        return q, k, v

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._attend(*self._project(x_ND), segments)

    def _attend(self, q_NHd: Array, k_NKd: Array, v_NKd: Array, segments: Segments) -> Array:
        o_NHd = packed_attention(
            q_NHd,
            k_NKd,
            v_NKd,
            segments,
            scale=self.head_dim**-0.5,
            exchange=self.exchange,
            backend=self.backend,
        )
        return self.out(o_NHd.reshape(len(q_NHd), -1))

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """Fixed: the packed keys and values of all prompts. State: room for the new tokens' own."""
        q_NHd, k_NKd, v_NKd = self._project(x_ND)
        fixed = [gather_in_order(x, segments) for x in (k_NKd, v_NKd)]
        room = jnp.zeros((prompts.documents, prompts.new_tokens, *k_NKd.shape[1:]), k_NKd.dtype)
        return self._attend(q_NHd, k_NKd, v_NKd, segments), fixed, [room, room]

    def step(self, x_nD: Float[Array, "n D"], fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        q_nHd, *new = self._project(x_nD)
        k_nmKd, v_nmKd = state = [
            jax.lax.dynamic_update_index_in_dim(old, x, now.token, axis=1)
            for old, x in zip(state, new, strict=True)
        ]
        scale, kv_heads, acc = self.head_dim**-0.5, k_nmKd.shape[2], accumulation_dtype(x_nD)
        prompt, prompt_lse = attention_forward(
            q_nHd, fixed[0], fixed[1], now.keys, scale, now.block, DOCUMENTS_BLOCK
        )
        q_nKGd = q_nHd.reshape(len(q_nHd), kv_heads, -1, self.head_dim)
        s_nKGm = scale * jnp.einsum("nkgd,nmkd->nkgm", q_nKGd, k_nmKd, preferred_element_type=acc)
        s_nKGm = jnp.where(jnp.arange(k_nmKd.shape[1]) <= now.token, s_nKGm, -jnp.inf)
        lse_nKG = jax.nn.logsumexp(s_nKGm, axis=-1)
        p_nKGm = jnp.exp(s_nKGm - lse_nKG[..., None]).astype(v_nmKd.dtype)
        own = jnp.einsum("nkgm,nmkd->nkgd", p_nKGm, v_nmKd, preferred_element_type=acc)
        o_nHd, _ = merge(prompt, prompt_lse, own.reshape(q_nHd.shape), lse_nKG.reshape(q_nHd.shape[:2]))
        return self.out(o_nHd.astype(x_nD.dtype).reshape(len(x_nD), -1)), state


class Mamba2(nnx.Module):
    """Mamba2 (Dao and Gu, 2024): convolution over x, B, C; scan; gate; grouped RMSNorm."""

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        inner, shared = llm.mamba_heads * llm.mamba_head_dim, llm.mamba_groups * llm.mamba_state
        heads, groups = over_tensor(llm.mamba_heads), over_tensor(llm.mamba_groups)
        self.z = Linear(llm.dim, inner, init, sharded_out=heads)
        self.x = Linear(llm.dim, inner, init, sharded_out=heads)
        self.b = Linear(llm.dim, shared, init, sharded_out=groups)
        self.c = Linear(llm.dim, shared, init, sharded_out=groups)
        self.dt = Linear(llm.dim, llm.mamba_heads, init, sharded_out=heads)
        taps, std = llm.mamba_conv, 1 / math.sqrt(llm.mamba_conv)
        convolved = ((inner, heads), (shared, groups), (shared, groups))
        self.conv_x, self.conv_b, self.conv_c = (
            init.normal((taps, dim), (None, sharded), std=std) for dim, sharded in convolved
        )
        self.conv_bias_x, self.conv_bias_b, self.conv_bias_c = (
            init.zeros((dim,), (sharded,)) for dim, sharded in convolved
        )
        # Time steps start log-uniform in [0.001, 0.1], decay rates uniform in [1, 16].
        uniform = jax.random.uniform(init.next_key(), (2, llm.mamba_heads))
        step_H = jnp.exp(math.log(1e-3) + uniform[0] * math.log(100))
        self.dt_bias = init.param(step_H + jnp.log(-jnp.expm1(-step_H)), (heads,))
        self.a_log = init.param(jnp.log(1 + 15 * uniform[1]), (heads,))
        self.d = init.ones((llm.mamba_heads,), (heads,))
        self.norm = RMSNorm(inner, llm.norm_eps, init, groups=llm.mamba_groups, sharded=heads)
        self.out = Linear(inner, llm.dim, init, std=_residual_std(inner, llm), sharded_in=heads)
        self.state = llm.mamba_state
        self.groups, self.mesh = groups, init.mesh
        self.chunk, self.backend = compute.scan_chunk, compute.scan_backend
        self.dt_limit = llm.mamba_dt_limit

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        inputs = self._scan_inputs(x_ND, self._project(x_ND), segments)
        y_LhP = scan(*inputs, scan_segments(segments), chunk=self.chunk, backend=self.backend)
        return self._scan_outputs(y_LhP, inputs[0], x_ND, segments)

    def _project(self, x_ND: Array) -> Parts:
        return self.x(x_ND), self.b(x_ND), self.c(x_ND)

    def _side_by_side(self, parts: Parts, ranks: int = 1) -> Array:
        """x, B and C of each rank's heads, [L, ranks, c]; a group whose heads lie on several is repeated."""
        x_LI, *shared = parts
        groups = shared[0].shape[1] // self.state
        repeats = math.lcm(groups, ranks) // groups
        b_LGS, c_LGS = (v.reshape(len(v), groups, -1).repeat(repeats, axis=1) for v in shared)
        return jnp.concatenate([v.reshape(len(v), ranks, -1) for v in (x_LI, b_LGS, c_LGS)], axis=2)

    def _taps(self, dtype: Any, ranks: int = 1) -> tuple[Array, Array]:
        """Of this rank's part of the convolution: taps [K, ranks, c] and bias [ranks, c]."""
        b_KC, c_KC = (own_part(w[...], 1, self.groups, self.mesh) for w in (self.conv_b, self.conv_c))
        b_C, c_C = (own_part(b[...], 0, self.groups, self.mesh) for b in (self.conv_bias_b, self.conv_bias_c))
        taps_KRc = self._side_by_side((self.conv_x[...], b_KC, c_KC), ranks)
        bias_1Rc = self._side_by_side((self.conv_bias_x[...][None], b_C[None], c_C[None]), ranks)
        return taps_KRc.astype(dtype), bias_1Rc[0].astype(dtype)

    def _scan_inputs(self, x_ND: Array, projected: Parts, segments: Segments) -> ScanInputs:
        """Of the heads that this rank scans."""
        ranks = head_ranks(segments)
        taps_KRc, bias_Rc = self._taps(x_ND.dtype, ranks)
        joined_Lc = to_heads(self._side_by_side(projected, ranks), segments)[:, 0]
        convolved_Lc = causal_conv(
            joined_Lc,
            own_heads(taps_KRc, segments, axis=1)[:, 0],
            own_heads(bias_Rc, segments)[0],
            scan_segments(segments),
            silu=True,
        )
        dt_Lh = to_heads(self._time_steps(x_ND), segments)
        return self._by_head(convolved_Lc, dt_Lh, own_heads(self._rates(x_ND), segments))

    def _time_steps(self, x_ND: Array) -> Array:
        acc = accumulation_dtype(x_ND)
        dt_NH = jax.nn.softplus(self.dt(x_ND).astype(acc) + self.dt_bias[...].astype(acc))
        return jnp.clip(dt_NH, *self.dt_limit)

    def _rates(self, x_ND: Array) -> Array:
        return -jnp.exp(self.a_log[...].astype(accumulation_dtype(x_ND)))

    def _by_head(self, joined_Lc: Array, dt_Lh: Array, a_h: Array) -> ScanInputs:
        """joined_Lc: x, B and C side by side."""
        n, heads = dt_Lh.shape
        inner = heads * (self.conv_x.shape[1] // len(self.a_log[...]))
        x_LI, b_LU, c_LU = jnp.split(joined_Lc, (inner, (inner + joined_Lc.shape[1]) // 2), axis=1)
        b_LGS, c_LGS = (v.reshape(n, -1, self.state) for v in (b_LU, c_LU))
        return x_LI.reshape(n, heads, -1), dt_Lh, a_h, b_LGS, c_LGS

    def _scan_outputs(self, y_LhP: Array, x_LhP: Array, x_ND: Array, segments: Segments) -> Array:
        y_LhP = y_LhP + own_heads(self.d[...].astype(y_LhP.dtype), segments)[:, None] * x_LhP
        return self._finish(to_tokens(y_LhP, segments, x_ND.dtype), x_ND)

    def _finish(self, y_NHP: Array, x_ND: Array) -> Array:
        gated_NI = y_NHP.reshape(len(x_ND), -1) * jax.nn.silu(self.z(x_ND).astype(y_NHP.dtype))
        return self.out(self.norm(gated_NI).astype(x_ND.dtype))

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """State: the convolution's last inputs and the scan's state at the end of each prompt."""
        projected, rows = self._project(x_ND), scan_segments(segments)
        inputs = self._scan_inputs(x_ND, projected, segments)
        ends = rows.local_index(prompts.ends.last)
        y_LhP, state_DhPS = ssd_and_states(*inputs, rows, ends, chunk=self.chunk)
        joined_NC = self._side_by_side(projected)[:, 0]
        last_DkC = last_inputs(joined_NC, *prompts.ends, self.conv_x.shape[0], segments)
        share = prompts.share if segments.in_order is None else to_documents
        state = [prompts.share(last_DkC, segments), share(state_DhPS, segments)]
        return self._scan_outputs(y_LhP, inputs[0], x_ND, segments), [], state

    def step(self, x_nD: Float[Array, "n D"], fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        last_nkC, state_nHPS = state
        window_nKC = jnp.concatenate([last_nkC, self._side_by_side(self._project(x_nD))], axis=1)
        taps_K1C, bias_1C = self._taps(x_nD.dtype)
        joined_nC = jax.nn.silu(bias_1C[0] + (window_nKC * taps_K1C[:, 0]).sum(axis=1))
        x_nHP, dt_nH, a_H, b_nGS, c_nGS = self._by_head(joined_nC, self._time_steps(x_nD), self._rates(x_nD))
        b_nHS, c_nHS = (jnp.repeat(v, x_nHP.shape[1] // v.shape[1], axis=1) for v in (b_nGS, c_nGS))
        added_nHPS = (dt_nH[..., None] * x_nHP)[..., None] * b_nHS[:, :, None]
        state_nHPS = jnp.exp(dt_nH * a_H)[..., None, None] * state_nHPS + added_nHPS
        y_nHP = jnp.einsum("nhps,nhs->nhp", state_nHPS, c_nHS.astype(state_nHPS.dtype))
        y_nHP = y_nHP + self.d[...].astype(y_nHP.dtype)[:, None] * x_nHP
        return self._finish(y_nHP, x_nD), [window_nKC[:, 1:], state_nHPS]


class MLP(nnx.Module):
    """up, relu^2, down; no gate, no bias."""

    def __init__(self, dim: int, inner: int, llm: LLMConfig, init: Init) -> None:
        columns = over_tensor(inner)
        self.up = Linear(dim, inner, init, sharded_out=columns)
        self.down = Linear(inner, dim, init, std=_residual_std(inner, llm), sharded_in=columns)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self.down(relu_squared(self.up(x_ND)))

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        return self(x_ND, segments), [], []

    def step(self, x_nD: Float[Array, "n D"], fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        return self.down(relu_squared(self.up(x_nD))), state


class Routing(NamedTuple):
    """Where an MoE layer's tokens went, over all data and context ranks.

    load: tokens sent to each expert, a token counted once for each of its experts. tokens: that were routed.
    aux: what evens out the load if it is made small (1 for an even load; Fedus et al., Switch Transformer,
        2021, over normalised sigmoid scores), times tokens; this rank's share, differentiable.
    """

    load: Float[Array, "*layers E"]
    tokens: Float[Array, "*layers"]
    aux: Float[Array, "*layers"]


class MoE(nnx.Module):
    """Routed experts with a float32 sigmoid router, plus one shared expert.

    The correction bias enters the choice of experts only. Padding is not routed.
    """

    def __init__(self, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        width = llm.latent_dim or llm.dim
        owners = expert_sharding(llm.experts, init.mesh) if compute.expert_parallel else None
        columns = over_tensor(llm.expert_dim)
        self.router = Linear(llm.dim, llm.experts, init)
        self.correction_bias = init.buffer(jnp.zeros(llm.experts))
        self.up = init.normal((llm.experts, width, llm.expert_dim), (owners, None, columns))
        std = _residual_std(llm.expert_dim, llm)
        self.down = init.normal((llm.experts, llm.expert_dim, width), (owners, columns, None), std)
        self.latent_in = Linear(llm.dim, width, init) if llm.latent_dim else None
        self.latent_out = Linear(width, llm.dim, init) if llm.latent_dim else None
        self.shared = MLP(llm.dim, llm.shared_expert_dim, llm, init)
        self.per_token = llm.experts_per_token
        self.scale = llm.router_scale
        self.block, self.capacity = compute.expert_block, compute.expert_capacity
        self.axes = owners.axes if owners else ()
        self.mesh = init.mesh

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self.routed(x_ND, segments)[0]

    def routed(self, x_ND: Float[Array, "N D"], segments: Segments) -> tuple[Float[Array, "N D"], Routing]:
        """As a call; and where the tokens went."""
        y_ND, chosen_Nk, score_NE = self._experts(x_ND, segments.valid)
        return y_ND + self.shared(x_ND, segments), self._routing(chosen_Nk, score_NE, segments.valid)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        return self(x_ND, segments), [], []

    def step(self, x_nD: Float[Array, "n D"], fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        shared_nD, _ = self.shared.step(x_nD, [], [], now)
        return self._experts(x_nD, now.active)[0] + shared_nD, state

    def _experts(self, x_ND: Array, routed_N: Array) -> tuple[Array, Array, Array]:
        """(the routed experts' weighted sum, the experts chosen, the scores of all)."""
        acc = accumulation_dtype(x_ND)
        with jax.default_matmul_precision("highest"):  # GPUs would round to 10 bits of mantissa
            score_NE = jax.nn.sigmoid(self.router(x_ND.astype(acc)))
        _, chosen_Nk = jax.lax.top_k(
            jax.lax.stop_gradient(score_NE) + self.correction_bias[...], self.per_token
        )
        weight_Nk = jnp.take_along_axis(score_NE, chosen_Nk, axis=1)
        weight_Nk = self.scale * weight_Nk / (weight_Nk.sum(-1, keepdims=True) + 1e-20)
        routed = x_ND if self.latent_in is None else self.latent_in(x_ND)
        up, down = (w[...].astype(x_ND.dtype) for w in (self.up, self.down))
        if self.axes:
            out = exchanged_experts(
                routed, up, down, chosen_Nk, weight_Nk, routed_N, self.axes, self.capacity, self.block
            )
        else:
            layout = expert_layout(chosen_Nk, routed_N, self.up.shape[0], self.block)
            out = combine(expert_mlp(dispatch(routed, layout), up, down, layout), weight_Nk, layout)
        return out if self.latent_out is None else self.latent_out(out), chosen_Nk, score_NE

    def _routing(self, chosen_Nk: Array, score_NE: Array, routed_N: Array) -> Routing:
        experts = score_NE.shape[1]
        weight_N1 = routed_N[:, None].astype(score_NE.dtype)
        load_E = jnp.zeros(experts, score_NE.dtype).at[chosen_Nk].add(weight_N1)
        load_E, tokens = psum_live((load_E, weight_N1.sum()), TOKEN_AXES, self.mesh)
        share_NE = score_NE / score_NE.sum(-1, keepdims=True)
        some = jnp.maximum(tokens, 1)
        fraction_E = jax.lax.stop_gradient(load_E) / (some * self.per_token)
        aux = experts * (fraction_E * (weight_N1 * share_NE).sum(0)).sum() / self.mesh.tensor
        return Routing(load_E, tokens, aux)
