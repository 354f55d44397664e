"""Grouped-query attention (Nemotron-H, 2025; Nemotron 3, 2025; Qwen3, 2025; GPT-OSS, 2025).

Legend: N tokens, D model dim, H query heads of this rank, K key and value heads, d head dim, G = H / K; in
decoding n documents of this rank, L tokens of each that a step takes, N = n L, m kept of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig, RopeConfig
from jaxthd.config.block import AttentionSizes, Block, equal_parts, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.rope import rope_faults
from jaxthd.config.values import DERIVED, Index
from jaxthd.files.tensor_names import Table, matrix
from jaxthd.models.blocks.contract import Prefilled, residual_std
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.ops.attention.backends import for_any_intervals
from jaxthd.ops.attention.blockwise import BACKEND as BLOCKWISE
from jaxthd.ops.attention.blockwise import attention_forward
from jaxthd.ops.attention.contract import Call
from jaxthd.ops.attention.ring import gather_in_order, merge, packed_attention, with_sink
from jaxthd.ops.backend import resolve_backend
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.rotary import rotated
from jaxthd.packing.intervals import KeyIntervals, key_intervals
from jaxthd.packing.prompts import KEYS_BLOCK, Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor

COST_KEYS = 1024
"""Keys that a token sees, as the cost counts them."""


@dataclass(frozen=True, kw_only=True)
class Attention(Block):
    """Causal grouped-query attention; with a window, in a sliding one (GPT-OSS, 2025).

    Keys in windows are no runs of whole documents. So they are computed blockwise if
    compute.attention_backend is one of the fused libraries. Blocks of keys outside all windows of a block of
    queries are skipped, and so are whole context ranks.
    """

    title = "attention"
    letter = "*"
    splits_documents = True
    rolls_back = True
    read_with_others = ("rope.*", "window")
    equal_sizes = ("heads",)
    shared_sizes = ("kv_heads",)
    kind: Annotated[Literal["attention"], DERIVED] = "attention"
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; must divide heads."""
    head_dim: int = 32
    """Dim of a head."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    qk_norm: bool = False
    """Whether queries and keys are normalised, each head by itself (Qwen3)."""
    joint_norm: bool = False
    """Whether that norm is over all heads together (OLMo 2)."""
    norm_after: bool = False
    """Whether the layer's RMSNorm is not before the block, but of what it adds to the residual (OLMo 2)."""
    window: Index = 0
    """Tokens that a token sees: itself and those before it (GPT-OSS: 128); 0: all before it."""
    sinks: bool = False
    """Whether each head has a learnt score that stands beside its keys in the softmax (GPT-OSS)."""
    bias: bool = False
    """Whether the four projections have biases (GPT-OSS)."""
    out_bias: bool = True
    """Whether the output's projection has one too, where the others have biases (Qwen2: no)."""
    scale: float = 0.0
    """Factor on the scores (Granite: attention_multiplier); 0: 1 / sqrt(head_dim)."""
    gate: bool = False
    """Whether outputs are multiplied by the sigmoid of a projection of the input (Qwen3-Next)."""

    @classmethod
    def usual(cls) -> dict[str, Block]:
        return {"*": cls(), "W": cls(window=128)}

    @property
    def without_effect(self) -> tuple[str, ...]:
        return (*(() if self.bias else ("out_bias",)), *(() if self.qk_norm else ("joint_norm",)))

    @property
    def norms(self) -> Literal["before", "after", "both"]:
        return "after" if self.norm_after else "before"

    @property
    def label(self) -> str:
        return "attention in a window" if self.window else "attention"

    @property
    def stack(self) -> str:
        return "window_attention" if self.window else "attention"

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "AttentionMixer":
        return AttentionMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        keys = min(COST_KEYS, self.window) if self.window else COST_KEYS
        heads = (3 if self.gate else 2) * self.heads + 2 * self.kv_heads
        return float(self.head_dim * (dim * heads + 2 * keys * self.heads))

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        why = "equally many query heads share each key and value head"
        yield from equal_parts(where, "heads", self.heads, "kv_heads", self.kv_heads, why)
        yield from rope_faults(self.rope, where, "head_dim", self.head_dim)

    def attention(self, tensor: int) -> AttentionSizes:
        heads, kv_heads, dim = self.heads // tensor, max(self.kv_heads // tensor, 1), self.head_dim
        return AttentionSizes(heads, kv_heads, dim, dim, self.window, 2 * kv_heads * dim)

    def tensors(self) -> Table:
        queries: Table = {"q_proj": "q"}
        if self.gate:
            queries = {"q_proj.weight": matrix("q.w", "gate.w", groups=self.heads)}
        others = {"k_proj": "k", "v_proj": "v", "o_proj": "out", "q_norm": "q_norm", "k_norm": "k_norm"}
        return {**queries, **others, "sinks": "sinks"}


class AttentionMixer(nnx.Module):
    """Queries and keys are normalised if block.qk_norm, then rotated by their positions if block.rope.theta.
    Outputs have a gate if block.gate.
    """

    def __init__(
        self,
        block: Attention,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        init = Init.of(init, compute)
        heads, shared = over_tensor(block.heads), over_tensor(block.kv_heads)
        inner, values = block.heads * block.head_dim, block.kv_heads * block.head_dim
        bias, out_bias = block.bias, block.bias and block.out_bias
        self.q = Linear(llm.dim, inner, init, bias=bias, sharded_out=heads)
        self.k = Linear(llm.dim, values, init, bias=bias, sharded_out=shared)
        self.v = Linear(llm.dim, values, init, bias=bias, sharded_out=shared)
        self.out = Linear(inner, llm.dim, init, bias=out_bias, std=residual_std(inner, llm), sharded_in=heads)
        self.gate = Linear(llm.dim, inner, init, sharded_out=heads) if block.gate else None
        self.joint_norm = block.joint_norm
        self.q_norm, self.k_norm = (
            RMSNorm(
                block.head_dim * (units.units if block.joint_norm else 1),
                llm.norm_eps,
                init,
                sharded=units if block.joint_norm else None,
                zero_centred=llm.norm_zero_centred,
            )
            if block.qk_norm
            else None
            for units in (heads, shared)
        )
        self.sinks = init.zeros((block.heads,), (heads,)) if block.sinks else None
        self.head_dim, self.rope, self.window = block.head_dim, block.rope, block.window
        self.scale = block.scale or block.head_dim**-0.5
        self.exchange, self.backend = compute.context_exchange, resolve_backend(compute.attention_backend)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._attend(x_ND, *self._project(x_ND, segments.sequence_positions), segments)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """Fixed: the packed keys and values of all prompts. State: room for the new tokens' own; in a window
        for no more than it has, where the newest takes the place of the oldest.
        """
        q_NHd, k_NKd, v_NKd = self._project(x_ND, segments.sequence_positions)
        fixed = [gather_in_order(x, segments) for x in (k_NKd, v_NKd)]
        room = jnp.zeros((prompts.documents, prompts.room(self.window), *k_NKd.shape[1:]), k_NKd.dtype)
        return Prefilled(self._attend(x_ND, q_NHd, k_NKd, v_NKd, segments), fixed, [room, room])

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        q_NHd, *new = self._project(x_ND, now.positions)
        k_nmKd, v_nmKd = state = [now.kept(old, x) for old, x in zip(state, new, strict=True)]
        scale, kv_heads, acc = self.scale, k_nmKd.shape[2], accumulation_dtype(x_ND)
        prompt, prompt_lse = now.of_prompts(partial(self._attend_prompts, fixed, now, scale), q_NHd)
        q_nLKGd = now.by_document(q_NHd.reshape(len(q_NHd), kv_heads, -1, self.head_dim))
        s_nLKGm = scale * jnp.einsum("nlkgd,nmkd->nlkgm", q_nLKGd, k_nmKd, preferred_element_type=acc)
        seen_nLm = now.seen(k_nmKd.shape[1], self.window)
        s_nLKGm = jnp.where(seen_nLm[:, :, None, None], s_nLKGm, -jnp.inf)
        lse_nLKG = jax.nn.logsumexp(s_nLKGm, axis=-1)
        p_nLKGm = jnp.exp(s_nLKGm - lse_nLKG[..., None]).astype(v_nmKd.dtype)
        own = jnp.einsum("nlkgm,nmkd->nlkgd", p_nLKGm, v_nmKd, preferred_element_type=acc)
        found = merge(prompt, prompt_lse, own.reshape(q_NHd.shape), lse_nLKG.reshape(q_NHd.shape[:2]))
        o_NHd, _ = with_sink(*found, self._sink())
        return self._finish(o_NHd.astype(x_ND.dtype), x_ND), state

    def _attend_prompts(
        self, fixed: list[Array], now: Now, scale: float, q_nHd: Array
    ) -> tuple[Array, Array]:
        """Output and log-sum-exp over the prompts' keys."""
        keys, backend = self._prompt_keys(now), for_any_intervals(self.backend)
        if backend is BLOCKWISE:
            return attention_forward(q_nHd, fixed[0], fixed[1], keys, scale, KEYS_BLOCK, now.query_block)
        call = Call(key_intervals(keys.lo, keys.hi, KEYS_BLOCK), False, KEYS_BLOCK, None)
        return backend.forward(q_nHd, fixed[0], fixed[1], call, scale)

    def _prompt_keys(self, now: Now) -> KeyIntervals:
        if not self.window:
            return now.keys
        nearest_N = now.keys.hi + now.in_order(now.token) - (self.window - 1)
        return key_intervals(jnp.maximum(now.keys.lo, nearest_N), now.keys.hi, KEYS_BLOCK, now.query_block)

    def _sink(self) -> Array | None:
        return None if self.sinks is None else self.sinks[...]

    def _project(self, x_ND: Array, positions_N: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values of tokens at these positions of their documents."""
        q, k, v = (f(x_ND).reshape(len(x_ND), -1, self.head_dim) for f in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if self.rope.theta:
            q, k = (rotated(x, positions_N, self.rope) for x in (q, k))
        return q, k, v

    def _normed(self, norm: RMSNorm, x_NHd: Array) -> Array:
        """Queries or keys, each head by itself or all heads together."""
        return (
            norm(x_NHd.reshape(len(x_NHd), -1)).reshape(x_NHd.shape)
            if self.joint_norm
            else norm.of_heads(x_NHd)
        )

    def _attend(self, x_ND: Array, q_NHd: Array, k_NKd: Array, v_NKd: Array, segments: Segments) -> Array:
        o_NHd = packed_attention(
            q_NHd,
            k_NKd,
            v_NKd,
            segments,
            scale=self.scale,
            exchange=self.exchange,
            backend=self.backend,
            sink_H=self._sink(),
            in_window=self.window > 0,
        )
        return self._finish(o_NHd, x_ND)

    def _finish(self, o_NHd: Array, x_ND: Array) -> Array:
        o_NI = o_NHd.reshape(len(x_ND), -1)
        return self.out(o_NI if self.gate is None else o_NI * jax.nn.sigmoid(self.gate(x_ND)))


register_block(Attention)
