"""Stacked mel frames and Transformer blocks over packed pieces of recordings.

Legend: A mel frames on this rank, M mel bands, E outputs, k frames of an output, S outputs of the window
around this rank's (ops/neighbours.py), D model dim, H heads, d head dim.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.config import ComputeConfig, RopeConfig
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.attention.blockwise import interval_attention
from jaxthd.ops.neighbours import Neighbours, make_neighbours
from jaxthd.ops.rotary import rotated
from jaxthd.packing.intervals import KeyIntervals
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, applied, scan_stack, stack


class Pieces(NamedTuple):
    """The pieces as every block uses them. neighbours: of the ranks that pieces may be divided over; None
    where they lie whole on this rank."""

    segments: Segments
    neighbours: Neighbours | None

    @classmethod
    def of(
        cls,
        segments: Segments,
        hidden_E: Int32[Array, " E"] | None,
        longest: int,
        axes: tuple[str, ...],
        row_axes: tuple[str, ...],
    ) -> "Pieces":
        """hidden: at the last output of a piece, how many of its last ones no output sees; None: there are
        none. longest: outputs of a piece that ranks divide. axes, row_axes: as in the contract (Encoder)."""
        neighbours = make_neighbours(segments, longest - 1, row_axes, axes)
        if hidden_E is not None:
            if neighbours is not None:
                keys = _without_last(neighbours.keys, neighbours.window(hidden_E))
                neighbours = neighbours._replace(keys=keys)
            segments = replace(segments, whole=_without_last(segments.whole, hidden_E))
        return cls(segments, neighbours)


def _without_last(keys: KeyIntervals, hidden_S: Array) -> KeyIntervals:
    """The intervals, each without its last keys that are hidden."""
    return keys._replace(hi=keys.hi - hidden_S[jnp.maximum(keys.hi - 1, 0)] * (keys.hi > keys.lo))


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

    def __call__(self, x_ED: Float[Array, "E D"], pieces: Pieces) -> Float[Array, "E D"]:
        segments, scale = pieces.segments, self.head_dim**-0.5
        q_EHd, k_EHd, v_EHd = (
            f(x_ED).reshape(len(x_ED), -1, self.head_dim) for f in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_EHd, k_EHd = self.q_norm.of_heads(q_EHd), self.k_norm.of_heads(k_EHd)
        q_EHd, k_EHd = (rotated(x, segments.positions, self.rope) for x in (q_EHd, k_EHd))

        def own(q_EHd: Array, k_EHd: Array, v_EHd: Array) -> Array:
            """Attends within the rank's own outputs."""
            return interval_attention(q_EHd, k_EHd, v_EHd, None, segments.whole, scale, segments.block)

        def over_ranks(neighbours: Neighbours, q_EHd: Array, k_EHd: Array, v_EHd: Array) -> Array:
            """Attends to the rank's own outputs and to those of its neighbours."""
            k_SHd, v_SHd = jnp.unstack(neighbours.window(jnp.stack([k_EHd, v_EHd], axis=1)), axis=1)
            return interval_attention(q_EHd, k_SHd, v_SHd, None, neighbours.keys, scale, segments.block)

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

    def __call__(self, x_ED: Float[Array, "E D"], pieces: Pieces) -> Float[Array, "E D"]:
        x_ED = x_ED + self.attention(self.norm1(x_ED), pieces)
        return x_ED + self.down(jax.nn.gelu(self.up(self.norm2(x_ED)), approximate=False))


class Transformer(nnx.Module):
    """LayerNorm, blocks, LayerNorm. config: of its blocks."""

    def __init__(self, config: Stacked, init: Init, compute: ComputeConfig) -> None:
        self.input_norm, self.final_norm = LayerNorm(config.dim, init), LayerNorm(config.dim, init)
        self.blocks = stack(lambda init: _Block(config, init), init, config.layers)
        self.remat, self.unroll = compute.remat, compute.unroll_layers
        self.keeps_gathered = init.mesh.pipeline == 1

    def run(self, x_ED: Float[Array, "E D"], pieces: Pieces) -> Float[Array, "E D"]:
        """The outputs; in padding they are of no use."""
        x_ED = applied(self.input_norm, x_ED, keeps_gathered=self.keeps_gathered)

        def body(block: _Block, x_ED: Array) -> tuple[Array, None]:
            """One block."""
            return block(x_ED, pieces), None

        x_ED, _ = scan_stack(self.blocks, body, x_ED, remat=self.remat, unroll=self.unroll)
        normed_ED: Array = applied(self.final_norm, x_ED, keeps_gathered=self.keeps_gathered)
        return normed_ED


class StackedEncoder(Transformer):
    """A linear layer over stacked frames, then a Transformer."""

    def __init__(
        self, config: Stacked, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        self.projection = Linear(config.stack * config.mel_bands, config.dim, init)
        super().__init__(config, init, compute)
        self.longest = config.units(config.longest)

    def embedded(
        self, features_AM: Float[Array, "A M"], mask_A: Bool[Array, " A"], outputs: int
    ) -> Float[Array, "E D"]:
        """The Transformer's input, of so many outputs. Frames that the mask excludes count as zeros."""
        frames_EF = jnp.where(mask_A[:, None], features_AM, 0).reshape(outputs, -1)
        found: Array = applied(self.projection, frames_EF, keeps_gathered=self.keeps_gathered)
        return found

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
        x_ED = self.embedded(features_AM, mask_A, len(segments.ids))
        x_ED = self.run(x_ED, Pieces.of(segments, None, self.longest, axes, row_axes))
        return jnp.where(segments.valid[:, None], x_ED, 0), {}
