"""FastConformer over packed log-mel frames: no clip reads another clip's frames, no compute on padded rows.

Architecture: Rekesh et al., Fast Conformer (2023), after Gulati et al., Conformer (2020). It has the form of
the transformers library's ParakeetEncoder and gives the same outputs in eval mode.

Legend: A mel frames on this rank, M mel bands, E = A / 8 encoder frames, D model dim.
"""

import math
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
from jaxthd.models.front_ends.fastconformer.attention import Clips, RelativeAttention, frequencies
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING, FastConformer
from jaxthd.models.front_ends.fastconformer.subsampling import Subsampling
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.activations import glu, silu
from jaxthd.ops.conv import centered_conv
from jaxthd.ops.neighbours import Neighbours, extended, make_neighbours
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.rotary import waves
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Buffer, Init, applied, scan_stack, stack


class FeedForward(nnx.Module):
    """Linear, SiLU, linear."""

    def __init__(self, config: FastConformer, init: Init) -> None:
        self.up = Linear(config.dim, config.ffn_dim, init, bias=config.linear_bias)
        self.down = Linear(config.ffn_dim, config.dim, init, bias=config.linear_bias)

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "E D"]:
        return self.down(silu(self.up(x_ED)))


class ConvModule(nnx.Module):
    """Pointwise with GLU, depthwise inside each clip, BatchNorm, SiLU, pointwise."""

    def __init__(self, config: FastConformer, init: Init) -> None:
        dim, taps = config.dim, config.conv_kernel
        self.up = Linear(dim, 2 * dim, init, bias=config.conv_bias)
        self.depthwise = init.normal((taps, dim))
        self.depthwise_bias = init.zeros((dim,)) if config.conv_bias else None
        self.norm = BatchNorm(dim, init)
        self.down = Linear(dim, dim, init, bias=config.conv_bias)

    def __call__(
        self, x_ED: Float[Array, "E D"], clips: Clips, *, train: bool, axes: tuple[str, ...]
    ) -> Float[Array, "E D"]:
        w_KD = self.depthwise[...].astype(x_ED.dtype)
        y_ED = glu(self.up(x_ED))
        if clips.padded is not None:
            y_ED = jnp.where(clips.segments.valid[:, None], y_ED, 0)
        y_ED = centered_conv(y_ED, w_KD, clips.padded or clips.segments, clips.neighbours)
        if self.depthwise_bias is not None:
            y_ED = y_ED + self.depthwise_bias[...].astype(x_ED.dtype)
        y_ED = self.norm(y_ED, clips.segments.valid, clips.frames, train=train, axes=axes)
        return self.down(silu(y_ED))


class ConformerBlock(nnx.Module):
    """Half a feed-forward step, attention, convolution, half a feed-forward step, all residual; LayerNorm."""

    def __init__(self, config: FastConformer, init: Init) -> None:
        self.ffn1, self.ffn2 = FeedForward(config, init), FeedForward(config, init)
        self.attention = RelativeAttention(config, init)
        self.conv = ConvModule(config, init)
        self.norm_ffn1, self.norm_attention, self.norm_conv, self.norm_ffn2, self.norm_out = (
            LayerNorm(config.dim, init) for _ in range(5)
        )

    def __call__(
        self, x_ED: Float[Array, "E D"], clips: Clips, *, train: bool, axes: tuple[str, ...]
    ) -> Float[Array, "E D"]:
        x_ED = x_ED + 0.5 * self.ffn1(self.norm_ffn1(x_ED))
        x_ED = x_ED + self.attention(self.norm_attention(x_ED), clips)
        x_ED = x_ED + self.conv(self.norm_conv(x_ED), clips, train=train, axes=axes)
        x_ED = x_ED + 0.5 * self.ffn2(self.norm_ffn2(x_ED))
        return self.norm_out(x_ED)


class FastConformerEncoder(nnx.Module):
    """Subsampling by 8, then conformer blocks, stacked and scanned."""

    def __init__(
        self, config: FastConformer, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        """Raises ValueError when num_mels is not a multiple of 8, or heads does not divide dim."""
        init = Init.of(init, compute)
        if config.dim % config.heads:
            raise ValueError(
                f"encoder.dim {config.dim} is not a multiple of encoder.heads {config.heads}; change either"
            )
        self.subsampling = Subsampling(config, init, compute.blocks.front_end, remat=compute.remat != "none")
        self.blocks = stack(lambda init: ConformerBlock(config, init), init, config.layers)
        self.scale = math.sqrt(config.dim) if config.scale_input else 1.0
        self.longest = None if config.longest is None else config.units(config.longest)
        self.output_layers = config.output_layers
        self.remat, self.unroll = compute.remat, compute.unroll_layers
        self.keeps_gathered = init.mesh.pipeline == 1
        self.attention = compute.encoder_attention.replace("auto", "blocks")

    def __call__(
        self,
        mels_AM: Float[Array, "A M"],
        mel_mask_A: Bool[Array, " A"],
        segments: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder.

        mels_AM: log-mel features; every clip starts at a multiple of 8 frames. train: BatchNorm uses the
        statistics of the valid frames of all ranks of `axes`, and updates its running ones if there are any;
        else it uses the running ones. A clip that is divided over ranks, and is longer than config.longest or
        shares its id with another clip of the row, is NaN. Raises ValueError when A is not 8 E.
        """
        if len(mels_AM) != SUBSAMPLING * len(segments.ids):
            raise ValueError(
                f"{len(mels_AM)} mel frames for {len(segments.ids)} encoder frames; "
                f"expected {SUBSAMPLING} for each: check features against piece_ids"
            )
        how: dict[str, Any] = {"train": train, "axes": axes, "row_axes": row_axes}
        outputs, buffers = self.outputs(mels_AM, mel_mask_A, segments, None, **how)
        x_ED = jnp.concatenate(outputs, axis=-1) if len(outputs) > 1 else outputs[0]
        return jnp.where(segments.valid[:, None], x_ED, 0), buffers

    def outputs(
        self,
        mels_AM: Float[Array, "A M"],
        mel_mask_A: Bool[Array, " A"],
        segments: Segments,
        padded: Segments | None,
        *,
        train: bool,
        axes: tuple[str, ...],
        row_axes: tuple[str, ...] = (),
    ) -> tuple[list[Float[Array, "E D"]], dict[str, Any]]:
        """The outputs of output_layers, or of the last block, and the buffers. Padding has any values.

        padded: the clips with frames of padding behind them, which are computed as NeMo does; None: without.
        Else as a call.
        """
        of_row = segments.row_length * jax.lax.axis_size(row_axes)
        longest = of_row if self.longest is None else self.longest
        neighbours = make_neighbours(segments, longest - 1, row_axes, axes)
        x_ED = self._subsampled(mels_AM, mel_mask_A, segments, neighbours)
        dim, acc = x_ED.shape[1], accumulation_dtype(mels_AM)
        w_F = frequencies(dim, acc)
        angle_EF = segments.positions[:, None].astype(acc) * w_F
        frames = jax.lax.psum(segments.valid.sum().astype(acc), axes)
        clips = Clips(segments, frames, *waves(angle_EF), self.attention, longest, padded=padded)
        if neighbours is not None:
            angle_SF = neighbours.positions.reshape(-1, 1).astype(acc) * w_F
            waves_SX = jnp.concatenate(waves(angle_SF), axis=-1)
            clips = clips._replace(neighbours=neighbours, waves=waves_SX.astype(x_ED.dtype))
            is_too_long = neighbours.is_split & (segments.positions >= longest).any()
            x_ED = jnp.where(is_too_long, jnp.nan, x_ED)

        def body(block: ConformerBlock, x_ED: Array) -> tuple[Array, tuple[Array | None, dict[str, Any]]]:
            """One block of the encoder: (its output, that again if it is asked for, running statistics)."""
            x_ED = block(x_ED, clips, train=train, axes=axes)
            return x_ED, (x_ED if self.output_layers else None, nnx.to_pure_dict(nnx.state(block, Buffer)))

        x_ED, (each_LED, buffers) = scan_stack(self.blocks, body, x_ED, remat=self.remat, unroll=self.unroll)
        found = [each_LED[layer] for layer in self.output_layers] if self.output_layers else [x_ED]
        return found, {"blocks": buffers}

    def _subsampled(
        self, mels_AM: Array, mel_mask_A: Array, segments: Segments, neighbours: Neighbours | None
    ) -> Array:
        """An encoder frame reads mel frames of the frame before, which a neighbour may have."""
        subsampling = partial(applied, self.subsampling, keeps_gathered=self.keeps_gathered)
        start_E = segments.positions == 0
        if neighbours is None:
            return subsampling(mels_AM, mel_mask_A, start_E) * self.scale
        rows, frames = segments.rows, segments.row_length
        mels_RAM = mels_AM.reshape(rows, -1, mels_AM.shape[1])
        mels_RAM = extended(mels_RAM, SUBSAMPLING, 0, neighbours.is_split, neighbours.axes)
        start_RE = start_E.reshape(rows, frames)
        # A chunk that goes on here has filled the frame before.
        before_R8 = jnp.repeat(~start_RE[:, :1], SUBSAMPLING, axis=1)
        mask_RA = jnp.concatenate([before_R8, mel_mask_A.reshape(rows, -1)], axis=1)
        start_RE = jnp.pad(start_RE, ((0, 0), (1, 0)), constant_values=True)
        x_ED = subsampling(mels_RAM.reshape(-1, mels_AM.shape[1]), mask_RA.reshape(-1), start_RE.reshape(-1))
        x_RED = x_ED.reshape(rows, 1 + frames, -1)[:, 1:]
        return x_RED.reshape(rows * frames, -1) * self.scale
