"""A Conformer with attention in blocks, over packed recordings, and a Q-Former over its windows.

Architecture: that of the transformers library's GraniteSpeechForConditionalGeneration, whose outputs it gives
in eval mode.

Legend: A frames on this rank, W numbers of a frame, D model dim of the Conformer, N windows of L frames,
E = N P audio tokens, P queries of a window, Z model dim of the Q-Former, H heads, d head dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.batch_norm import BatchNorm
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.granite_conformer.attention import BlockAttention
from jaxthd.models.front_ends.granite_conformer.settings import GraniteConformer
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.activations import glu, silu
from jaxthd.ops.conv import centered_conv
from jaxthd.ops.neighbours import Neighbours, make_neighbours
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Buffer, Init, applied, scan_stack, stack

_QUERY_EPS = 1e-12


class FeedForward(nnx.Module):
    """LayerNorm, linear, SiLU, linear."""

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        self.norm = LayerNorm(config.model_dim, init)
        self.up = Linear(config.model_dim, config.ffn_dim, init, bias=True)
        self.down = Linear(config.ffn_dim, config.model_dim, init, bias=True)

    def __call__(self, x_AD: Float[Array, "A D"]) -> Float[Array, "A D"]:
        return self.down(silu(self.up(self.norm(x_AD))))


class ConvModule(nnx.Module):
    """LayerNorm, pointwise with GLU, depthwise inside each recording, BatchNorm, SiLU, pointwise."""

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        dim, inner = config.model_dim, config.conv_dim
        self.norm_in = LayerNorm(dim, init)
        self.up = Linear(dim, 2 * inner, init, bias=True)
        self.depthwise = init.normal((config.conv_kernel, inner))
        self.norm = BatchNorm(inner, init)
        self.down = Linear(inner, dim, init, bias=True)

    def __call__(
        self,
        x_AD: Float[Array, "A D"],
        frames: Segments,
        neighbours: Neighbours | None,
        *,
        train: bool,
        axes: tuple[str, ...],
    ) -> Float[Array, "A D"]:
        w_KC = self.depthwise[...].astype(x_AD.dtype)
        y_AC = centered_conv(glu(self.up(self.norm_in(x_AD))), w_KC, frames, neighbours)
        count = jax.lax.psum(frames.valid.sum().astype(accumulation_dtype(x_AD)), axes)
        return self.down(silu(self.norm(y_AC, frames.valid, count, train=train, axes=axes)))


class ConformerBlock(nnx.Module):
    """Half a feed-forward step, attention, convolution, half a feed-forward step, all residual; LayerNorm."""

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        self.ffn1, self.ffn2 = FeedForward(config, init), FeedForward(config, init)
        self.attention, self.conv = BlockAttention(config, init), ConvModule(config, init)
        self.norm = LayerNorm(config.model_dim, init)

    def __call__(
        self,
        x_AD: Float[Array, "A D"],
        frames: Segments,
        neighbours: Neighbours | None,
        *,
        train: bool,
        axes: tuple[str, ...],
    ) -> Float[Array, "A D"]:
        x_AD = x_AD + 0.5 * self.ffn1(x_AD)
        x_AD = x_AD + self.attention(x_AD, frames, neighbours)
        x_AD = x_AD + self.conv(x_AD, frames, neighbours, train=train, axes=axes)
        x_AD = x_AD + 0.5 * self.ffn2(x_AD)
        return self.norm(x_AD)


class Middle(nnx.Module):
    """x + linear(softmax(linear(x))): the labels' probabilities go on with the frames."""

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        self.labels = Linear(config.model_dim, config.labels, init, bias=True)
        self.back = Linear(config.labels, config.model_dim, init, bias=True)

    def __call__(self, x_AD: Float[Array, "A D"]) -> Float[Array, "A D"]:
        scores = self.labels(x_AD)
        return x_AD + self.back(jax.nn.softmax(scores.astype(accumulation_dtype(x_AD))).astype(x_AD.dtype))


class QueryAttention(nnx.Module):
    """Attention of each window's queries to its keys, then a LayerNorm of the sum with the queries."""

    def __init__(self, dim: int, keys: int, heads: int, init: Init) -> None:
        """keys: the dim of what is attended to."""
        self.q, self.out = (Linear(dim, dim, init, bias=True) for _ in range(2))
        self.k, self.v = (Linear(keys, dim, init, bias=True) for _ in range(2))
        self.norm, self.heads = LayerNorm(dim, init, _QUERY_EPS), heads

    def __call__(self, x_NPZ: Float[Array, "N P Z"], y_NLY: Float[Array, "N L Y"]) -> Float[Array, "N P Z"]:
        def heads(linear: Linear, x: Array) -> Array:
            """[N, ..., features] -> [N, ..., H, d]."""
            return linear(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], self.heads, -1)

        q_NPHd, k_NLHd, v_NLHd = heads(self.q, x_NPZ), heads(self.k, y_NLY), heads(self.v, y_NLY)
        acc = accumulation_dtype(x_NPZ)
        scores = jnp.einsum("nphd,nlhd->nhpl", q_NPHd, k_NLHd, preferred_element_type=acc)
        weights = jax.nn.softmax(scores * q_NPHd.shape[-1] ** -0.5).astype(x_NPZ.dtype)
        o_EZ = jnp.einsum("nhpl,nlhd->nphd", weights, v_NLHd).reshape(-1, x_NPZ.shape[-1])
        return self.norm.of_heads(x_NPZ + self.out(o_EZ).reshape(x_NPZ.shape))


class QueryLayer(nnx.Module):
    """Attention among a window's queries, attention to its frames (in some layers), feed-forward; each with a
    LayerNorm behind its sum."""

    def __init__(self, config: GraniteConformer, number: int, init: Init) -> None:
        dim, heads = config.query_dim, config.query_heads
        self.self_attention = QueryAttention(dim, dim, heads, init)
        sees = number % config.cross_every == 0
        self.cross_attention = QueryAttention(dim, config.read_dim, heads, init) if sees else None
        self.up = Linear(dim, config.query_ffn_dim, init, bias=True)
        self.down = Linear(config.query_ffn_dim, dim, init, bias=True)
        self.norm = LayerNorm(dim, init, _QUERY_EPS)

    def __call__(
        self, x_NPZ: Float[Array, "N P Z"], frames_NLD: Float[Array, "N L D"]
    ) -> Float[Array, "N P Z"]:
        x_NPZ = self.self_attention(x_NPZ, x_NPZ)
        if self.cross_attention is not None:
            x_NPZ = self.cross_attention(x_NPZ, frames_NLD)
        up_EF = jax.nn.gelu(self.up(x_NPZ.reshape(-1, x_NPZ.shape[-1])), approximate=False)
        return self.norm.of_heads(x_NPZ + self.down(up_EF).reshape(x_NPZ.shape))


class QFormer(nnx.Module):
    """Learnt queries, which every window has, and layers. Source: Li et al., BLIP-2 (2023)."""

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        self.queries = init.normal((config.queries, config.query_dim), std=1.0)
        self.norm = LayerNorm(config.query_dim, init, _QUERY_EPS)
        self.layers = nnx.List([QueryLayer(config, i, init) for i in range(config.query_layers)])

    def __call__(self, frames_NLD: Float[Array, "N L D"]) -> Float[Array, "E Z"]:
        queries_PZ = self.norm(self.queries[...].astype(frames_NLD.dtype))
        x_NPZ = jnp.broadcast_to(queries_PZ, (len(frames_NLD), *queries_PZ.shape))
        for layer in self.layers:
            x_NPZ = layer(x_NPZ, frames_NLD)
        return x_NPZ.reshape(-1, x_NPZ.shape[-1])


class GraniteConformerEncoder(nnx.Module):
    """A linear layer, Conformer blocks with the labels' probabilities in their middle, a Q-Former."""

    def __init__(
        self, config: GraniteConformer, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        self.input = Linear(config.width, config.model_dim, init, bias=True)
        self.blocks = stack(lambda init: ConformerBlock(config, init), init, config.layers)
        self.middle, self.qformer = Middle(config, init), QFormer(config, init)
        self.config, self.remat, self.unroll = config, compute.remat, compute.unroll_layers
        self.keeps_gathered = init.mesh.pipeline == 1

    def __call__(
        self,
        features_AW: Float[Array, "A W"],
        mask_A: Bool[Array, " A"],
        pieces: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E Z"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder. train: as of FastConformer's BatchNorms."""
        config = self.config
        frames = self._frames(pieces, mask_A)
        neighbours = make_neighbours(frames, max(config.block - 1, config.conv_kernel // 2), row_axes, axes)
        module = partial(applied, keeps_gathered=self.keeps_gathered)
        x_AD = module(self.input, jnp.where(mask_A[:, None], features_AW, 0))

        def body(block: ConformerBlock, x_AD: Array) -> tuple[Array, tuple[dict[str, Any], Array | None]]:
            """One block, its running statistics, and its outputs where they are joined."""
            x_AD = block(x_AD, frames, neighbours, train=train, axes=axes)
            return x_AD, (nnx.to_pure_dict(nnx.state(block, Buffer)), x_AD if config.joined_layers else None)

        run, half = partial(scan_stack, remat=self.remat, unroll=self.unroll), config.layers // 2
        graph, state = nnx.split(self.blocks)
        found, outputs = [], [x_AD]
        for part in (slice(0, half), slice(half, config.layers)):
            if part.start == half and half:
                x_AD = outputs[-1] = module(self.middle, x_AD)
            if part.start < part.stop:
                some = nnx.merge(graph, jax.tree.map(lambda w, part=part: w[part], state))
                x_AD, (buffers, of_blocks) = run(some, body, x_AD)
                found.append(buffers)
                outputs.extend([] if of_blocks is None else of_blocks)
        x_AD = jnp.concatenate([*(outputs[number] for number in config.joined_layers), x_AD], axis=1)
        windows_NLD = jnp.where(frames.valid[:, None], x_AD, 0).reshape(-1, config.window, config.read_dim)
        y_EZ = module(self.qformer, windows_NLD)
        buffers = jax.tree.map(lambda *each: jnp.concatenate(each), *found)
        return jnp.where(pieces.valid[:, None], y_EZ, 0), {"blocks": buffers}

    def _frames(self, pieces: Segments, mask_A: Array) -> Segments:
        """The recordings' frames; pieces are of the audio tokens."""
        window, queries = self.config.window, self.config.queries
        ids_A, first_A = (x[::queries].repeat(window) for x in (pieces.ids, pieces.positions))
        at_A = jnp.tile(jnp.arange(window, dtype=jnp.int32), len(pieces.ids) // queries)
        is_real_A, positions_A = mask_A & (ids_A > 0), first_A // queries * window + at_A
        ids_A, positions_A = (jnp.where(is_real_A, x, 0) for x in (ids_A, positions_A))
        ids_RA, positions_RA = (x.reshape(pieces.rows, -1) for x in (ids_A, positions_A))
        return make_segments(ids_RA, positions_RA, block=pieces.block, axis=None)
