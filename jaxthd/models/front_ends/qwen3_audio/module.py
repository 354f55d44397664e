"""Qwen3's audio encoder over packed windows: no window sees another one.

Legend: A mel frames on this rank, M mel bands, B chunks of 100 frames, F bands after convolutions,
C channels, O outputs of a chunk, E = 13 B outputs, D model dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.qwen3_audio.settings import CHUNK, OUTPUTS, Qwen3Audio, halved
from jaxthd.models.front_ends.transformer import BlockSizes, Transformer, sinusoids
from jaxthd.models.layers import Linear
from jaxthd.ops.product import narrowed
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Init, applied


class Conv(nnx.Module):
    """A 3 x 3 convolution of stride 2 over (frames, bands), with zeros beyond all ends; GELU.

    It is a product with nine shifted inputs side by side: XLA's convolution takes 1.4 times as long on a CPU,
    and ten times as long in a loop.
    """

    def __init__(self, inputs: int, channels: int, init: Init) -> None:
        self.w = init.normal((3, 3, inputs, channels), std=(9 * inputs) ** -0.5)
        self.bias = init.zeros((channels,))

    def __call__(self, x_BTFC: Float[Array, "B T F C"]) -> Float[Array, "B t f c"]:
        _, frames, bands, _ = x_BTFC.shape
        ends = [(1, size % 2) for size in (frames, bands)]
        x_BTFC = jnp.pad(x_BTFC, ((0, 0), *ends, (0, 0)))
        # Output n reads the inputs 2n, 2n + 1 and 2n + 2 of those with a zero before them.
        taps = [x_BTFC[:, i : i + frames : 2, j : j + bands : 2] for i in range(3) for j in range(3)]
        w_9cC = narrowed(self.w[...], x_BTFC.dtype).reshape(-1, self.w.shape[-1])
        y_BTFC = jnp.concatenate(taps, axis=-1) @ w_9cC
        return jax.nn.gelu(y_BTFC + self.bias[...].astype(x_BTFC.dtype), approximate=False)


class Stem(nnx.Module):
    """Three convolutions of each chunk alone, then a linear layer over channels and bands.

    Chunks are computed some at a time, and again in the backward pass, so their activations exist for some
    at a time. With compute.remat none, which keeps all activations, they are computed at once.
    """

    def __init__(self, config: Qwen3Audio, init: Init, compute: ComputeConfig) -> None:
        inputs = (1, config.channels, config.channels)
        self.convs = nnx.List([Conv(n, config.channels, init) for n in inputs])
        self.out = Linear(config.channels * halved(config.mel_bands), config.dim, init)
        layers: tuple[Linear | Conv, ...] = (self.out, *self.convs)
        for layer in layers:
            layer.w.set_metadata(cast=False)  # its gradient is a sum over parts
        self.chunks = max(1, compute.blocks.front_end // OUTPUTS)
        self.remat = compute.remat != "none"

    def __call__(self, x_AM: Float[Array, "A M"], ends_B: Int32[Array, " B"]) -> Float[Array, "E D"]:
        """ends: how many frames of each chunk there are; those behind are as if beyond the end of all."""
        x_BAM, count = x_AM.reshape(-1, CHUNK, x_AM.shape[1]), len(ends_B)
        if not self.remat:
            return self._part(x_BAM, ends_B)

        parts = -(-count // self.chunks)
        size = -(-count // parts)

        def cut(x_B: Array) -> Array:
            """[B, ...] -> [parts, size, ...]; behind the last chunk are zeros."""
            rest = [(0, parts * size - count)] + [(0, 0)] * (x_B.ndim - 1)
            return jnp.pad(x_B, rest).reshape(parts, size, *x_B.shape[1:])

        part = jax.checkpoint(self._part)
        y_pED = jax.lax.map(lambda given: part(*given), (cut(x_BAM), cut(ends_B)))
        return y_pED.reshape(-1, y_pED.shape[-1])[: count * OUTPUTS]

    def _part(self, x_BAM: Array, ends_B: Array) -> Array:
        """[B, CHUNK, M] -> [B * OUTPUTS, D]."""
        x_BTFC = x_BAM[..., None]
        for conv in self.convs:
            x_BTFC, ends_B = conv(x_BTFC), (ends_B + 1) // 2
            is_there_BT = jnp.arange(x_BTFC.shape[1], dtype=jnp.int32) < ends_B[:, None]
            x_BTFC = jnp.where(is_there_BT[:, :, None, None], x_BTFC, 0)
        return self.out(x_BTFC.reshape(len(x_BTFC) * OUTPUTS, -1))


class Qwen3AudioEncoder(nnx.Module):
    """The stem, positions that begin anew in each chunk, Transformer blocks, LayerNorm."""

    def __init__(
        self, config: Qwen3Audio, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        self.stem = Stem(config, init, compute)
        sizes = BlockSizes(config.dim, config.heads, config.ffn_dim, key_bias=True)
        self.transformer = Transformer(sizes, config.layers, init, compute)
        self.filled = config.filled
        self.keeps_gathered = init.mesh.pipeline == 1

    def __call__(
        self,
        features_AM: Float[Array, "A M"],
        mask_A: Bool[Array, " A"],
        pieces: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder."""
        x_AM = jnp.where(mask_A[:, None], features_AM, 0)
        frames_B = mask_A.reshape(-1, CHUNK).sum(axis=1, dtype=jnp.int32)
        ends_B = self._ends(frames_B, recordings)
        x_ED = applied(self.stem, x_AM, ends_B, keeps_gathered=self.keeps_gathered)
        place_BO = jnp.arange(OUTPUTS, dtype=jnp.int32)[None]
        x_ED += jnp.tile(
            jnp.asarray(sinusoids(OUTPUTS, x_ED.shape[1]), x_ED.dtype), (len(x_ED) // OUTPUTS, 1)
        )
        # Of a chunk that is not full, outputs that begin with padding do not count.
        filled_B1 = halved(frames_B[:, None])
        is_real_E = (place_BO < filled_B1).reshape(-1)
        ids_RE, positions_RE = (
            jnp.where(is_real_E, x, 0).reshape(pieces.rows, -1) for x in (pieces.ids, pieces.positions)
        )
        outputs = make_segments(ids_RE, positions_RE, block=pieces.block, axis=None)
        x_ED = self.transformer.run(x_ED, outputs)
        x_ED = self.transformer.normed(x_ED, keeps_gathered=self.keeps_gathered)
        return jnp.where(outputs.valid[:, None], x_ED, 0), {}

    def _ends(self, frames_B: Int32[Array, " B"], recordings: Recordings | None) -> Int32[Array, " B"]:
        """Frames of each chunk, zeros that count among them: the first chunk of a recording is not filled up,
        unless Qwen3Audio.filled says so."""
        whole_B = jnp.full_like(frames_B, CHUNK)
        if self.filled or recordings is None:
            return whole_B
        return jnp.where(recordings.positions.reshape(-1, OUTPUTS)[:, 0] == 0, frames_B, whole_B)
