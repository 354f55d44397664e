"""Transformer blocks over packed pieces of recordings that lie whole on a rank, as Whisper has them.

Legend: E outputs, D model dim, H heads, d head dim.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32

from jaxthd.config import RopeConfig
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.attention.blockwise import interval_attention
from jaxthd.ops.rotary import rotated
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, applied, scan_stack, stack


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block. key_bias: whether keys have a bias, as queries, values and outputs have. rope: the
    rotary embedding of queries and keys; its theta is 0 without one."""

    dim: int
    heads: int
    ffn_dim: int
    key_bias: bool
    rope: RopeConfig = field(default_factory=RopeConfig)


class Attention(nnx.Module):
    """Attention inside each piece, in both directions."""

    def __init__(self, sizes: BlockSizes, init: Init) -> None:
        """Raises ValueError where heads does not divide dim."""
        if sizes.dim % sizes.heads:
            raise ValueError(
                f"the encoder's dim is {sizes.dim} with {sizes.heads} heads; expected a multiple: change "
                "either"
            )
        self.q, self.k, self.v, self.out = (
            Linear(sizes.dim, sizes.dim, init, bias=has_bias)
            for has_bias in (True, sizes.key_bias, True, True)
        )
        self.head_dim, self.rope = sizes.dim // sizes.heads, sizes.rope

    def __call__(self, x_ED: Float[Array, "E D"], segments: Segments) -> Float[Array, "E D"]:
        q, k, v = (f(x_ED).reshape(len(x_ED), -1, self.head_dim) for f in (self.q, self.k, self.v))
        if self.rope.theta:
            q, k = (rotated(x, segments.positions, self.rope) for x in (q, k))
        o_EHd = interval_attention(q, k, v, None, segments.whole, self.head_dim**-0.5, segments.block)
        return self.out(o_EHd.reshape(len(x_ED), -1))


class Block(nnx.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)) with GELU."""

    def __init__(self, sizes: BlockSizes, init: Init) -> None:
        self.norm1, self.norm2 = LayerNorm(sizes.dim, init), LayerNorm(sizes.dim, init)
        self.attention = Attention(sizes, init)
        self.up = Linear(sizes.dim, sizes.ffn_dim, init, bias=True)
        self.down = Linear(sizes.ffn_dim, sizes.dim, init, bias=True)

    def __call__(self, x_ED: Float[Array, "E D"], segments: Segments) -> Float[Array, "E D"]:
        x_ED = x_ED + self.attention(self.norm1(x_ED), segments)
        return x_ED + self.down(jax.nn.gelu(self.up(self.norm2(x_ED)), approximate=False))


class Transformer(nnx.Module):
    """Blocks, stacked and scanned, and a LayerNorm."""

    def __init__(self, sizes: BlockSizes, layers: int, init: Init, compute: Any) -> None:
        """compute: ComputeConfig."""
        self.blocks = stack(lambda init: Block(sizes, init), init, layers)
        self.norm = LayerNorm(sizes.dim, init)
        self.remat, self.unroll = compute.remat, compute.unroll_layers

    def run(self, x_ED: Float[Array, "E D"], segments: Segments) -> Float[Array, "E D"]:
        """The blocks alone. Their parameters are gathered layer by layer."""

        def body(block: Block, x_ED: Array) -> tuple[Array, None]:
            """One block."""
            return block(x_ED, segments), None

        x_ED, _ = scan_stack(self.blocks, body, x_ED, remat=self.remat, unroll=self.unroll)
        return x_ED

    def normed(self, x_ED: Float[Array, "E D"], *, keeps_gathered: bool) -> Float[Array, "E D"]:
        """The LayerNorm behind the blocks."""
        found: Array = applied(self.norm, x_ED, keeps_gathered=keeps_gathered)
        return found


def sinusoids(length: int, channels: int) -> Float32[np.ndarray, "length channels"]:
    """Sines, then cosines, of positions from 0 on: frequencies fall from 1 to 1e-4, both included.

    Raises ValueError for an odd number of channels. Source: Whisper (Radford et al., 2022).
    """
    if channels % 2 or channels < 4:
        raise ValueError(
            f"positions of {channels} dims; expected an even number from 4 on, because half of them are sines"
        )
    rate = np.exp(-np.log(10000.0) / (channels // 2 - 1) * np.arange(channels // 2, dtype=np.float32))
    angle = np.arange(length, dtype=np.float32)[:, None] * rate.astype(np.float32)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
