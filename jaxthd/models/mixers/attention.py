"""Grouped-query attention (Nemotron-H, 2025; Nemotron 3, 2025; Qwen3, 2025).

Legend: N tokens, D model dim, H query heads of this rank, K key and value heads, d head dim, G = H / K; in
decoding n documents of this rank, m new tokens of each.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.models.mixers.contract import LayerKind, Prefilled, residual_std
from jaxthd.ops.attention.blockwise import attention_forward
from jaxthd.ops.attention.ring import gather_in_order, merge, packed_attention
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.rotary import rotated
from jaxthd.packing.prompts import DOCUMENTS_BLOCK, Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor


class Attention(nnx.Module):
    """Causal grouped-query attention.

    Queries and keys are normalised if llm.qk_norm, then rotated by their positions if llm.rope.theta.
    """

    def __init__(
        self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        heads, shared = over_tensor(llm.q_heads), over_tensor(llm.kv_heads)
        inner = llm.q_heads * llm.head_dim
        bias = llm.attention_bias
        self.q = Linear(llm.dim, inner, init, bias=bias, sharded_out=heads)
        self.k = Linear(llm.dim, llm.kv_heads * llm.head_dim, init, bias=bias, sharded_out=shared)
        self.v = Linear(llm.dim, llm.kv_heads * llm.head_dim, init, bias=bias, sharded_out=shared)
        self.out = Linear(inner, llm.dim, init, bias=bias, std=residual_std(inner, llm), sharded_in=heads)
        self.q_norm = RMSNorm(llm.head_dim, llm.norm_eps, init) if llm.qk_norm else None
        self.k_norm = RMSNorm(llm.head_dim, llm.norm_eps, init) if llm.qk_norm else None
        self.head_dim, self.rope = llm.head_dim, llm.rope
        self.exchange, self.backend = compute.context_exchange, compute.attention_backend

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._attend(*self._project(x_ND, segments.sequence_positions), segments)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """Fixed: the packed keys and values of all prompts. State: room for the new tokens' own."""
        q_NHd, k_NKd, v_NKd = self._project(x_ND, segments.sequence_positions)
        fixed = [gather_in_order(x, segments) for x in (k_NKd, v_NKd)]
        room = jnp.zeros((prompts.documents, prompts.new_tokens, *k_NKd.shape[1:]), k_NKd.dtype)
        return Prefilled(self._attend(q_NHd, k_NKd, v_NKd, segments), fixed, [room, room])

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        q_nHd, *new = self._project(x_nD, now.positions)
        number_m, token_n1 = jnp.arange(state[0].shape[1], dtype=jnp.int32), now.token[:, None]
        k_nmKd, v_nmKd = state = [
            jnp.where((number_m == token_n1)[..., None, None], x[:, None], old)
            for old, x in zip(state, new, strict=True)
        ]
        scale, kv_heads, acc = self.head_dim**-0.5, k_nmKd.shape[2], accumulation_dtype(x_nD)
        q_in_order = q_nHd if now.order is None else q_nHd[now.order]
        prompt, prompt_lse = attention_forward(
            q_in_order, fixed[0], fixed[1], now.keys, scale, now.block, DOCUMENTS_BLOCK
        )
        if now.order is not None:
            back_n = jnp.argsort(now.order)
            prompt, prompt_lse = prompt[back_n], prompt_lse[back_n]
        q_nKGd = q_nHd.reshape(len(q_nHd), kv_heads, -1, self.head_dim)
        s_nKGm = scale * jnp.einsum("nkgd,nmkd->nkgm", q_nKGd, k_nmKd, preferred_element_type=acc)
        s_nKGm = jnp.where((number_m <= token_n1)[:, None, None], s_nKGm, -jnp.inf)
        lse_nKG = jax.nn.logsumexp(s_nKGm, axis=-1)
        p_nKGm = jnp.exp(s_nKGm - lse_nKG[..., None]).astype(v_nmKd.dtype)
        own = jnp.einsum("nkgm,nmkd->nkgd", p_nKGm, v_nmKd, preferred_element_type=acc)
        o_nHd, _ = merge(prompt, prompt_lse, own.reshape(q_nHd.shape), lse_nKG.reshape(q_nHd.shape[:2]))
        return self.out(o_nHd.astype(x_nD.dtype).reshape(len(x_nD), -1)), state

    def _project(self, x_ND: Array, positions_N: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values of tokens at these positions of their documents."""
        q, k, v = (f(x_ND).reshape(len(x_ND), -1, self.head_dim) for f in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        if self.rope.theta:
            q, k = (rotated(x, positions_N, self.rope) for x in (q, k))
        return q, k, v

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


COST_KEYS = 1024
"""Keys that a token sees, as the cost counts them."""


def cost(llm: LLMConfig) -> float:
    heads = 2 * llm.q_heads + 2 * llm.kv_heads
    return float(llm.head_dim * (llm.dim * heads + 2 * COST_KEYS * llm.q_heads))


KIND = LayerKind("*", "attention", "attention", Attention, cost)
