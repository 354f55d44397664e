"""Multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3, 2024; Moonlight, 2025).

A token has one latent, from which the keys and values of all heads are expanded, and one rotated key that all
heads share. Training expands them and is then plain attention, whose value heads may have another dim than
its query heads. Decoding keeps latents and rotated keys alone: the expansion of the keys moves into the
queries and that of the values behind the softmax, so that all heads attend to the same kept vectors.

Legend: N tokens, D model dim, H heads of this rank, d dim of a query head, V dim of a value head, R dim of
the latent, C = R + rotated features, the numbers kept of a token; in decoding n documents of this rank, m
new tokens of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig, RopeConfig
from jaxthd.config.block import AttentionSizes, Block, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.rope import rope_faults
from jaxthd.config.values import DERIVED, Index
from jaxthd.files.tensor_names import Shape, Table, matrix
from jaxthd.models import lora_tokens
from jaxthd.models.blocks.attention import COST_KEYS
from jaxthd.models.blocks.contract import Prefilled, residual_std
from jaxthd.models.layers import Linear, RMSNorm
from jaxthd.ops.attention.blockwise import attention_forward
from jaxthd.ops.attention.ring import gather_in_order, gathered_attention, merge, packed_attention
from jaxthd.ops.backend import resolve_backend
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.rotary import rotated
from jaxthd.packing.prompts import KEYS_BLOCK, Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Block):
    """Multi-head latent attention (DeepSeek-V2, 2024; DeepSeek-V3; Moonlight): the keys and values of all
    heads are expanded from one latent a token, which is all that decoding keeps."""

    title = "latent attention"
    letter = "L"
    splits_documents = True
    rolls_back = True
    read_with_others = ("rope.*",)
    equal_sizes = ("heads",)
    kind: Annotated[Literal["latent_attention"], DERIVED] = "latent_attention"
    heads: int = 4
    """Heads."""
    q_lora_rank: Index = 0
    """Dim of the latent that queries are expanded from (DeepSeek-V3: 1536); 0: they are projected from the
    model dim (Moonlight)."""
    kv_lora_rank: int = 64
    """Dim of the latent that keys and values are expanded from (DeepSeek-V3: 512)."""
    qk_nope_head_dim: int = 32
    """Features of a query or key head that are not rotated (DeepSeek-V3: 128)."""
    qk_rope_head_dim: int = 16
    """Rotated features of a query head (DeepSeek-V3: 64); those of the key are shared by all heads."""
    v_head_dim: int = 32
    """Dim of a value head (DeepSeek-V3: 128)."""
    norm_eps: float = 1e-6
    """RMSNorm epsilon of the latents; that of published models, whatever their model.llm.norm_eps."""
    rope: RopeConfig = field(default_factory=RopeConfig)

    @property
    def qk_head_dim(self) -> int:
        """Dim of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kept(self) -> int:
        """Numbers that decoding keeps of a token: the latent, and the rotated features of its key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "LatentAttentionMixer":
        return LatentAttentionMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        rank = self.q_lora_rank
        queries = (rank or dim) * self.heads * self.qk_head_dim + dim * rank
        expanded = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        out = self.heads * self.v_head_dim * dim
        pairs = COST_KEYS * self.heads * (self.qk_head_dim + self.v_head_dim)
        return float(queries + dim * self.kept + expanded + out + pairs)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        yield from rope_faults(self.rope, where, "qk_rope_head_dim", self.qk_rope_head_dim)

    def attention(self, tensor: int) -> AttentionSizes:
        heads = self.heads // tensor
        return AttentionSizes(heads, max(heads, 1), self.qk_head_dim, self.v_head_dim, 0, self.kept)

    def tensors(self, *, is_paired: bool = True) -> Table:
        """is_paired: whether the checkpoint has the two numbers that are rotated together side by side."""

        def halves(others: int) -> Shape:
            """The order of rows that puts the first of each pair before the second ones, behind `others`."""
            turned = [*range(others, others + self.qk_rope_head_dim)]
            return (*range(others), *turned[::2], *turned[1::2]) if is_paired else ()

        queries = matrix("q.w", block=halves(self.qk_nope_head_dim))
        return {
            "q_a_proj": "q_down",
            "q_a_layernorm": "q_norm",
            f"{'q_b_proj' if self.q_lora_rank else 'q_proj'}.weight": queries,
            "kv_a_proj_with_mqa.weight": matrix("kv_down.w", block=halves(self.kv_lora_rank)),
            "kv_a_layernorm": "kv_norm",
            "kv_b_proj": "kv",
            "o_proj": "out",
        }


class LatentAttentionMixer(nnx.Module):
    """With or without a latent for the queries.

    Heads are sharded over the tensor ranks. All ranks hold the projections to the latents, and compute them.
    """

    absorbed = ("kv",)

    def __init__(
        self,
        latent: LatentAttention,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
    ) -> None:
        init, all_heads = Init.of(init, compute), latent.heads
        heads, rank = over_tensor(all_heads), latent.q_lora_rank
        queries, values = all_heads * latent.qk_head_dim, all_heads * latent.v_head_dim
        self.q_down = Linear(llm.dim, rank, init) if rank else None
        self.q_norm = RMSNorm(rank, latent.norm_eps, init) if rank else None
        self.q = Linear(rank or llm.dim, queries, init, sharded_out=heads)
        self.kv_down = Linear(llm.dim, latent.kept, init)
        self.kv_norm = RMSNorm(latent.kv_lora_rank, latent.norm_eps, init)
        expanded = all_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.kv = Linear(latent.kv_lora_rank, expanded, init, sharded_out=heads)
        self.out = Linear(values, llm.dim, init, std=residual_std(values, llm), sharded_in=heads)
        self.sizes, self.rope = latent, latent.rope
        self.scale = latent.qk_head_dim**-0.5 * latent.rope.score_factor
        self.exchange, self.backend = compute.context_exchange, resolve_backend(compute.attention_backend)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        positions_N = segments.sequence_positions
        return self._attend(self._queries(x_ND, positions_N), self._kept(x_ND, positions_N), segments)

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """Fixed: what is kept of all prompts' tokens. State: room for the new tokens' own."""
        positions_N = segments.sequence_positions
        kept_NC = self._kept(x_ND, positions_N)
        room = jnp.zeros((prompts.documents, prompts.room(), self.sizes.kept), kept_NC.dtype)
        fixed = gather_in_order(kept_NC[:, None], segments)
        return Prefilled(self._attend(self._queries(x_ND, positions_N), kept_NC, segments), [fixed], [room])

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        (kept_S1C,), acc = fixed, accumulation_dtype(x_ND)
        keys_RHn, values_RHV = self._expansion(x_ND.dtype)
        q_NHn, q_NHr = self._queries(x_ND, now.positions)
        q_NHC = jnp.concatenate([jnp.einsum("nhd,rhd->nhr", q_NHn, keys_RHn), q_NHr], axis=-1)
        own_nmC = now.kept(state[0], self._kept(x_ND, now.positions))
        # The kept vectors are the values too: what is weighted of their rotated features is dropped.
        keys = kept_S1C, kept_S1C, now.keys, self.scale, KEYS_BLOCK, now.query_block
        prompt, prompt_lse = now.of_prompts(lambda q_NHC: attention_forward(q_NHC, *keys), q_NHC)
        q_nLHC = now.by_document(q_NHC)
        s_nLHm = self.scale * jnp.einsum("nlhc,nmc->nlhm", q_nLHC, own_nmC, preferred_element_type=acc)
        s_nLHm = jnp.where(now.seen(own_nmC.shape[1])[:, :, None], s_nLHm, -jnp.inf)
        lse_nLH = jax.nn.logsumexp(s_nLHm, axis=-1)
        p_nLHm = jnp.exp(s_nLHm - lse_nLH[..., None]).astype(own_nmC.dtype)
        own = jnp.einsum("nlhm,nmc->nlhc", p_nLHm, own_nmC, preferred_element_type=acc)
        o_NHC, _ = merge(prompt, prompt_lse, own.reshape(prompt.shape), lse_nLH.reshape(prompt_lse.shape))
        o_NHR = o_NHC[..., : self.sizes.kv_lora_rank].astype(x_ND.dtype)
        o_NHV = jnp.einsum("nhr,rhv->nhv", o_NHR, values_RHV)
        return self.out(o_NHV.reshape(len(x_ND), -1)), [own_nmC]

    def _queries(self, x_ND: Array, positions_N: Array) -> tuple[Array, Array]:
        """The features of every head without rotation, and the rotated ones."""
        if self.q_down is not None and self.q_norm is not None:
            x_ND = self.q_norm(self.q_down(x_ND))
        q_NHd = self.q(x_ND).reshape(len(x_ND), -1, self.sizes.qk_head_dim)
        q_NHn, q_NHr = jnp.split(q_NHd, [self.sizes.qk_nope_head_dim], axis=-1)
        return q_NHn, self._rotated(q_NHr, positions_N)

    def _kept(self, x_ND: Array, positions_N: Array) -> Array:
        """[N, C]: the tokens' latents, and the rotated features of their keys."""
        latent_NR, k_Nr = jnp.split(self.kv_down(x_ND), [self.sizes.kv_lora_rank], axis=-1)
        k_Nr = self._rotated(k_Nr[:, None], positions_N)[:, 0]
        return jnp.concatenate([self.kv_norm(latent_NR), k_Nr], axis=-1)

    def _rotated(self, x_NHr: Array, positions_N: Array) -> Array:
        return rotated(x_NHr, positions_N, self.rope) if self.rope.theta else x_NHr

    def _expansion(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The matrices that expand a latent to this rank's keys [R, H, n] and values [R, H, V]."""
        sizes, w_RF = self.sizes, self.kv.matrix(dtype)
        w_RHf = w_RF.reshape(sizes.kv_lora_rank, -1, sizes.qk_nope_head_dim + sizes.v_head_dim)
        keys_RHn, values_RHV = jnp.split(w_RHf, [sizes.qk_nope_head_dim], axis=-1)
        return keys_RHn, values_RHV

    def _attend(self, q: tuple[Array, Array], kept_NC: Array, segments: Segments) -> Array:
        """Where keys are gathered the ranks exchange what is kept, and each expands all of it."""
        q_NHd = self._filled(jnp.concatenate(q, axis=-1))
        gathers = self.exchange == "all_gather" or not segments.uniform_program
        if gathers and segments.context > 1 and segments.splits is None:
            kept_RNC = jax.lax.all_gather(kept_NC, segments.axis)
            with lora_tokens.of_all_ranks(segments.axis):
                pair = self._expanded(kept_RNC.reshape(-1, self.sizes.kept))
            k, v = (x.reshape(*kept_RNC.shape[:2], *x.shape[1:]) for x in pair)
            o_NHV = gathered_attention(q_NHd, k, v, segments, scale=self.scale, backend=self.backend)
        else:
            o_NHV = packed_attention(
                q_NHd,
                *self._expanded(kept_NC),
                segments,
                scale=self.scale,
                exchange=self.exchange,
                backend=self.backend,
            )
        return self.out(o_NHV[..., : self.sizes.v_head_dim].reshape(len(kept_NC), -1))

    def _expanded(self, kept_NC: Array) -> tuple[Array, Array]:
        """Keys and values of all heads."""
        sizes = self.sizes
        latent_NR, k_Nr = jnp.split(kept_NC, [sizes.kv_lora_rank], axis=-1)
        expanded_NHf = self.kv(latent_NR).reshape(len(kept_NC), -1, sizes.qk_nope_head_dim + sizes.v_head_dim)
        k_NHn, v_NHV = jnp.split(expanded_NHf, [sizes.qk_nope_head_dim], axis=-1)
        k_NHr = jnp.broadcast_to(k_Nr[:, None], (*k_NHn.shape[:2], sizes.qk_rope_head_dim))
        return self._filled(jnp.concatenate([k_NHn, k_NHr], axis=-1)), self._filled(v_NHV)

    def _filled(self, x_NHd: Array) -> Array:
        """The heads, with zeros behind them where a fused kernel takes heads of one dim alone."""
        missing = max(self.sizes.qk_head_dim, self.sizes.v_head_dim) - x_NHd.shape[-1]
        if self.backend == "xla" or not missing:
            return x_NHd
        return jnp.pad(x_NHd, ((0, 0), (0, 0), (0, missing)))


register_block(LatentAttention)
