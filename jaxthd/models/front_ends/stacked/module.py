"""Stacked mel frames and Transformer blocks over packed pieces of recordings.

Legend: A mel frames on this rank, M mel bands, E outputs, k frames of an output, S outputs of the window
around this rank's (ops/neighbours.py), D model dim, H heads, d head dim.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.config import ComputeConfig, RopeConfig
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.attention.blockwise import interval_attention
from jaxthd.ops.neighbours import Neighbours, make_neighbours
from jaxthd.ops.rotary import rotated
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, applied, scan_stack, stack


class _Pieces(NamedTuple):
    """The pieces as every block uses them. neighbours: of the ranks that pieces may be divided over; None
    where they lie whole on this rank."""

    segments: Segments
    neighbours: Neighbours | None


class _Attention(nnx.Module):
    """Attention inside each piece, in both directions, with rotary positions."""

    def __init__(self, config: Stacked, init: Init) -> None:
        inner = config.heads * config.head_dim
        self.q, self.k, self.v = (Linear(config.dim, inner, init) for _ in range(3))
        self.q_norm, self.k_norm = (
            LayerNorm(config.head_dim, init) if config.qk_norm else None for _ in range(2)
        )
        self.out = Linear(inner, config.dim, init, bias=True)
        self.head_dim = config.head_dim
        self.rope = RopeConfig(theta=config.rope_theta, fraction=config.rope_fraction)

    def __call__(self, x_ED: Float[Array, "E D"], pieces: _Pieces) -> Float[Array, "E D"]:
        segments, scale = pieces.segments, self.head_dim**-0.5
        q_EHd, k_EHd, v_EHd = (
            f(x_ED).reshape(len(x_ED), -1, self.head_dim) for f in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_EHd, k_EHd = self.q_norm.of_heads(q_EHd), self.k_norm.of_heads(k_EHd)
        q_EHd, k_EHd = (rotated(x, segments.positions, self.rope) for x in (q_EHd, k_EHd))

        def own(q_EHd: Array, k_EHd: Array, v_EHd: Array) -> Array:
            """Attends within the rank's own outputs."""
            return interval_attention(q_EHd, k_EHd, v_EHd, segments.whole, scale, segments.block)

        def over_ranks(neighbours: Neighbours, q_EHd: Array, k_EHd: Array, v_EHd: Array) -> Array:
            """Attends to the rank's own outputs and to those of its neighbours."""
            k_SHd, v_SHd = jnp.unstack(neighbours.window(jnp.stack([k_EHd, v_EHd], axis=1)), axis=1)
            return interval_attention(q_EHd, k_SHd, v_SHd, neighbours.keys, scale, segments.block)

        if pieces.neighbours is None:
            o_EHd = own(q_EHd, k_EHd, v_EHd)
        else:
            is_split, with_window = pieces.neighbours.is_split, partial(over_ranks, pieces.neighbours)
            o_EHd = jax.lax.cond(is_split, with_window, own, q_EHd, k_EHd, v_EHd)
        return self.out(o_EHd.reshape(len(x_ED), -1))


class _Block(nnx.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)) with GELU."""

    def __init__(self, config: Stacked, init: Init) -> None:
        self.norm1, self.norm2 = LayerNorm(config.dim, init), LayerNorm(config.dim, init)
        self.attention = _Attention(config, init)
        self.up = Linear(config.dim, config.ffn_dim, init, bias=True)
        self.down = Linear(config.ffn_dim, config.dim, init, bias=True)

    def __call__(self, x_ED: Float[Array, "E D"], pieces: _Pieces) -> Float[Array, "E D"]:
        x_ED = x_ED + self.attention(self.norm1(x_ED), pieces)
        return x_ED + self.down(jax.nn.gelu(self.up(self.norm2(x_ED)), approximate=False))


class StackedEncoder(nnx.Module):
    """A linear layer over stacked frames, LayerNorm, blocks, LayerNorm."""

    def __init__(
        self, config: Stacked, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        self.projection = Linear(config.stack * config.mel_bands, config.dim, init)
        self.input_norm, self.final_norm = LayerNorm(config.dim, init), LayerNorm(config.dim, init)
        self.blocks = stack(lambda init: _Block(config, init), init, config.layers)
        self.longest = config.units(config.longest)
        self.remat, self.unroll = compute.remat, compute.unroll_layers
        self.keeps_gathered = init.mesh.pipeline == 1

    def __call__(
        self,
        features_AM: Float[Array, "A M"],
        mask_A: Bool[Array, " A"],
        segments: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder. A piece that is longer than config.longest must not
        be divided over ranks."""
        neighbours = make_neighbours(segments, self.longest - 1, row_axes, axes)
        frames_EF = jnp.where(mask_A[:, None], features_AM, 0).reshape(len(segments.ids), -1)
        project, normed = (
            partial(applied, module, keeps_gathered=self.keeps_gathered)
            for module in (self.projection, self.input_norm)
        )
        x_ED = normed(project(frames_EF))
        pieces = _Pieces(segments, neighbours)

        def body(block: _Block, x_ED: Array) -> tuple[Array, None]:
            """One block."""
            return block(x_ED, pieces), None

        x_ED, _ = scan_stack(self.blocks, body, x_ED, remat=self.remat, unroll=self.unroll)
        x_ED = applied(self.final_norm, x_ED, keeps_gathered=self.keeps_gathered)
        return jnp.where(segments.valid[:, None], x_ED, 0), {}
