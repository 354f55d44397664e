"""The mixture of experts of Nemotron 3 (2025), with one that all tokens share, and of Qwen3 and
GPT-OSS (2025), without.

Legend: N tokens, D model dim, E experts, k experts a token; in decoding n documents of this rank.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import Linear
from jaxthd.models.mixers.contract import LayerKind, Routing, Stateless, residual_std
from jaxthd.models.mixers.mlp import MLP
from jaxthd.ops.ffn import FFNForm
from jaxthd.ops.grouped_matmul import IN_ROUNDS, combine, dispatch, expert_layout
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.product import narrowed
from jaxthd.packing.prompts import Now
from jaxthd.packing.segments import Segments
from jaxthd.parallel.experts import Experts, exchanged_experts, expert_mlp, expert_sharding
from jaxthd.parallel.mesh import TOKEN_AXES
from jaxthd.parallel.params import Init, ShardedDim, once, over_tensor
from jaxthd.parallel.tensor import psum_live


class MoE(Stateless):
    """Routed experts with a float32 router (llm.router), plus one shared expert if it has a dim.

    The sigmoid router's correction bias enters the choice of experts only. Padding is not routed.
    """

    def __init__(
        self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        width = llm.latent_dim or llm.dim
        owners = expert_sharding(llm.experts, init.mesh)
        columns = over_tensor(llm.expert_dim)
        self.router = Linear(llm.dim, llm.experts, init, bias=llm.router_bias)
        self.router.w.set_metadata(cast=False)
        is_sigmoid = llm.router == "sigmoid"
        self.correction_bias = init.buffer(jnp.zeros(llm.experts)) if is_sigmoid else None
        inward = (llm.experts, width, llm.expert_dim), (owners, None, columns)
        self.up = init.normal(*inward, projects=True)
        std = residual_std(llm.expert_dim, llm)
        shape = llm.experts, llm.expert_dim, width
        self.down = init.normal(shape, (owners, columns, None), std, projects=True)
        self.latent_in = Linear(llm.dim, width, init) if llm.latent_dim else None
        self.latent_out = Linear(width, llm.dim, init) if llm.latent_dim else None
        has_shared = llm.shared_expert_dim > 0
        self.shared = MLP(llm, init, compute, inner=llm.shared_expert_dim) if has_shared else None
        is_gated = has_shared and llm.shared_expert_gate
        self.shared_gate = Linear(llm.dim, 1, init) if is_gated else None
        self.gate = init.normal(*inward, projects=True) if llm.is_gated else None
        self._add_biases(llm, init, owners, width)
        self.form = FFNForm.of(llm)._replace(in_fp8=compute.fp8_experts)
        self.per_token = llm.experts_per_token
        self.groups, self.groups_per_token = llm.router_groups, llm.router_groups_per_token
        self.scale, self.is_normalised = llm.router_scale, llm.router_normalised
        self.block = IN_ROUNDS if compute.blocks.expert_rounds else compute.blocks.experts
        self.capacity = compute.blocks.expert_slots
        self.axes = owners.axes if owners else ()
        self.mesh = init.mesh

    def _add_biases(self, llm: LLMConfig, init: Init, owners: ShardedDim | None, width: int) -> None:
        has, columns = llm.ffn_bias, over_tensor(llm.expert_dim)
        inner = (llm.experts, llm.expert_dim), (owners, columns)
        self.up_bias = init.zeros(*inner) if has else None
        self.gate_bias = init.zeros(*inner) if has and llm.is_gated else None
        self.down_bias = init.zeros((llm.experts, width), (owners, None)) if has else None
        self.columns = columns

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self.routed(x_ND, segments)[0]

    def routed(self, x_ND: Float[Array, "N D"], segments: Segments) -> tuple[Float[Array, "N D"], Routing]:
        """As a call, and where the tokens went."""
        y_ND, chosen_Nk, score_NE = self._experts(x_ND, segments.valid)
        if self.shared is not None:
            y_ND = y_ND + self._gated(self.shared(x_ND, segments), x_ND)
        return y_ND, self._routing(chosen_Nk, score_NE, segments.valid)

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        y_nD = self._experts(x_nD, now.active)[0]
        if self.shared is not None:
            y_nD = y_nD + self._gated(self.shared.step(x_nD, [], [], now)[0], x_nD)
        return y_nD, state

    def _gated(self, shared_ND: Array, x_ND: Array) -> Array:
        """The shared expert's part of the outputs."""
        return shared_ND if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x_ND)) * shared_ND

    def _experts(self, x_ND: Array, routed_N: Array) -> tuple[Array, Array, Array]:
        """(the routed experts' weighted sum, the experts chosen, the scores of all)."""
        acc = accumulation_dtype(x_ND)
        with jax.default_matmul_precision("highest"):  # GPUs would round to 10 bits of mantissa
            logit_NE = self.router(x_ND.astype(acc))
        if self.correction_bias is None:
            score_NE = jax.nn.softmax(logit_NE)
            ranked_NE = jax.lax.stop_gradient(score_NE)
        else:
            score_NE = jax.nn.sigmoid(logit_NE)
            ranked_NE = jax.lax.stop_gradient(score_NE) + self.correction_bias[...]
        if self.groups > 1:
            ranked_NE = of_best_groups(ranked_NE, self.groups, self.groups_per_token)
        _, chosen_Nk = jax.lax.top_k(ranked_NE, self.per_token)
        weight_Nk = jnp.take_along_axis(score_NE, chosen_Nk, axis=1)
        scaled_Nk = self.scale * weight_Nk
        weight_Nk = (
            scaled_Nk / (weight_Nk.sum(-1, keepdims=True) + 1e-20) if self.is_normalised else scaled_Nk
        )
        routed = x_ND if self.latent_in is None else self.latent_in(x_ND)
        experts = self._weights(x_ND.dtype)
        if self.axes:
            sizes = self.axes, self.capacity, self.block
            out = exchanged_experts(routed, experts, chosen_Nk, weight_Nk, routed_N, self.form, *sizes)
        else:
            layout = expert_layout(chosen_Nk, routed_N, self.up.shape[0], self.block)
            mlp = expert_mlp(dispatch(routed, layout), experts, layout, self.form)
            out = combine(mlp, weight_Nk, layout)
        return out if self.latent_out is None else self.latent_out(out), chosen_Nk, score_NE

    def _weights(self, dtype: Any) -> Experts:
        """Matrices in the compute dtype, biases in that of the parameters."""
        up, down = (narrowed(w[...], dtype) for w in (self.up, self.down))
        gate = None if self.gate is None else narrowed(self.gate[...], dtype)
        if self.up_bias is None or self.down_bias is None:
            return Experts(up, down, gate)
        down_bias = once(self.down_bias[...], self.columns, self.mesh)
        gate_bias = None if self.gate_bias is None else self.gate_bias[...]
        return Experts(up, down, gate, self.up_bias[...], down_bias, gate_bias)

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


def of_best_groups(ranked_NE: Float[Array, "N E"], groups: int, most: int) -> Float[Array, "N E"]:
    """-inf for the experts outside the `most` best groups of each token (DeepSeek-V3, 2024).

    A group is a run of E / groups experts, at least two; its score is the sum of its two best experts'.
    """
    ranked_NGe = ranked_NE.reshape(len(ranked_NE), groups, -1)
    score_NG = jax.lax.top_k(ranked_NGe, 2)[0].sum(-1)
    _, best_Nm = jax.lax.top_k(score_NG, most)
    is_best_NG = (best_Nm[..., None] == jnp.arange(groups)).any(1)
    return jnp.where(is_best_NG[..., None], ranked_NGe, -jnp.inf).reshape(ranked_NE.shape)


def cost(llm: LLMConfig) -> float:
    width = llm.latent_dim or llm.dim
    latent = 2 * llm.dim * llm.latent_dim
    routed = llm.experts_per_token * width * llm.expert_dim
    mlps = llm.ffn_matrices * (routed + llm.dim * llm.shared_expert_dim)
    return float(llm.dim * llm.experts + latent + mlps)


KIND = LayerKind("E", "moe", "mixture of experts", MoE, cost)
