"""FastConformer over packed log-mel frames: no clip reads another clip's frames, no compute on padded rows.

Architecture: Rekesh et al., Fast Conformer (2023), after Gulati et al., Conformer (2020). It has the form of
the transformers library's ParakeetEncoder and gives the same outputs in eval mode.

Legend: A mel frames on this rank, M mel bands, E = A / 8 encoder frames, D model dim, H heads, d head dim,
F = D / 2 frequencies of the position encoding. In the subsampling: N frames in, n = N / 2 frames out, B
bands in, b = B / 2 bands out, C channels.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.config import ComputeConfig, EncoderConfig
from jaxthd.models.layers import Linear
from jaxthd.ops.attention.banded import banded_attention
from jaxthd.ops.attention.blockwise import interval_attention
from jaxthd.ops.attention.dense import dense_attention
from jaxthd.ops.attention.relative import distances, relative_attention
from jaxthd.ops.conv import centered_conv
from jaxthd.ops.neighbours import Neighbours, make_neighbours
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.document import SUBSAMPLING, encoder_frames
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Buffer, Init, applied, remat_of, scan_stack, stack

_EPS = 1e-5
_MOMENTUM = 0.1
PIECE = 128
"""The subsampling works on this many encoder frames (10 s) at a time, where compute.subsampling_frames does
not say otherwise."""
DENSE_FRAMES = 512
"""Attention over this many encoder frames of a row on a rank (41 s), or fewer, is one dense product."""


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias, over the last dim, in promote(float32, x)."""

    def __init__(self, dim: int, init: Init) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "E D"]:
        wide = x_ED.astype(accumulation_dtype(x_ED))
        wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + _EPS)
        return (wide * self.weight[...] + self.bias[...]).astype(x_ED.dtype)


class BatchNorm(nnx.Module):
    """Normalises each channel over the valid frames of all ranks (Ioffe and Szegedy, 2015).

    In training, it computes the batch's mean and then its centred variance, in promote(float32, x), with one
    sum over ranks for each. The running statistics move a tenth of the way to the batch's mean and unbiased
    variance; they stay unchanged if no rank has a valid frame. Outside training, it normalises with the
    running statistics.
    """

    def __init__(self, dim: int, init: Init) -> None:
        self.weight, self.bias = init.ones((dim,)), init.zeros((dim,))
        self.mean, self.variance = init.buffer(jnp.zeros(dim)), init.buffer(jnp.ones(dim))

    def __call__(
        self,
        x_ED: Float[Array, "E D"],
        valid_E: Bool[Array, " E"],
        frames: Float[Array, ""],
        *,
        train: bool,
        axes: tuple[str, ...],
    ) -> Float[Array, "E D"]:
        """frames: valid frames of all ranks, a count. Training updates the running statistics in place."""
        wide, valid_E1 = x_ED.astype(accumulation_dtype(x_ED)), valid_E[:, None]
        mean_D, variance_D = self.mean[...], self.variance[...]
        if train:
            some = jnp.maximum(frames, 1)
            mean_D = jax.lax.psum(jnp.where(valid_E1, wide, 0).sum(0), axes) / some
            squares_ED = jnp.where(valid_E1, jnp.square(wide - mean_D), 0)
            variance_D = jax.lax.psum(squares_ED.sum(0), axes) / some
            unbiased_D = variance_D * (frames / jnp.maximum(frames - 1, 1))
            for running, batch_D in ((self.mean, mean_D), (self.variance, unbiased_D)):
                moved_D = (1 - _MOMENTUM) * running[...] + _MOMENTUM * jax.lax.stop_gradient(batch_D)
                running[...] = jnp.where(frames > 0, moved_D, running[...]).astype(running.dtype)
        scale_D = self.weight[...] * jax.lax.rsqrt(variance_D + _EPS)
        return ((wide - mean_D) * scale_D + self.bias[...]).astype(x_ED.dtype)


def _neighbours(x_NBC: Array, start_n: Array) -> list[Array]:
    """The nine [n, b, C] inputs of a 3x3 convolution of stride 2 and padding 1, frames before bands.

    start_n: True where a clip starts. There the output reads 0 in place of the frame before its own two.
    """
    n, _, channels = x_NBC.shape
    pairs_n2BC = x_NBC.reshape(n // 2, 2, -1, channels)
    before_nBC = jnp.pad(pairs_n2BC[:-1, 1], ((1, 0), (0, 0), (0, 0)))
    before_nBC = jnp.where(start_n[:, None, None], 0, before_nBC)
    taps = []
    for row_nBC in (before_nBC, pairs_n2BC[:, 0], pairs_n2BC[:, 1]):
        even_nbC, odd_nbC = jnp.moveaxis(row_nBC.reshape(n // 2, -1, 2, channels), 2, 0)
        taps += [jnp.pad(odd_nbC[:, :-1], ((0, 0), (1, 0), (0, 0))), even_nbC, odd_nbC]
    return taps


class SeparableConv(nnx.Module):
    """3x3 depthwise convolution of stride 2, then a pointwise one.

    The depthwise convolution is nine multiply-adds on shifted inputs, because XLA's grouped convolution takes
    7 times as long on a CPU.
    """

    def __init__(self, channels: int, init: Init) -> None:
        self.w = init.normal((9, channels))
        self.bias = init.zeros((channels,))
        self.pointwise = Linear(channels, channels, init, bias=True)

    def __call__(self, x_NBC: Float[Array, "N B C"], start_n: Bool[Array, " n"]) -> Float[Array, "n b C"]:
        w_9C, bias_C = (w[...].astype(x_NBC.dtype) for w in (self.w, self.bias))
        y_nbC = bias_C + sum(w * tap for w, tap in zip(w_9C, _neighbours(x_NBC, start_n), strict=True))
        return self.pointwise(y_nbC.reshape(-1, y_nbC.shape[-1])).reshape(y_nbC.shape)


class Subsampling(nnx.Module):
    """Three 3x3 convolutions of stride 2 over (frames, bands), each with ReLU; then a linear layer: A -> E.

    A clip starts at a multiple of 8 frames. At every level, output n reads inputs 2n - 1, 2n and 2n + 1. Only
    the first of them can belong to the previous clip, and it is set to 0 where a clip starts. All frames
    after a clip's valid ones are also set to 0 at every level. So each clip sees the zero padding that it
    would have alone.

    Encoder frame e reads only mel frames 8e - 7 to 8e + 7. So the buffer is divided into pieces of PIECE
    encoder frames, or more, each with the 8 mel frames before it. The pieces are computed one after the
    other, and recomputed in the backward pass. Activations exist for one piece at a time (those of the first
    convolution alone have 64 times the size of the mels, at 256 channels). With 16,000 frames, 80 mels and 64
    channels on a CPU, they take 27 MB instead of 400 MB, in two thirds of the time.
    """

    def __init__(self, config: EncoderConfig, init: Init, piece: int = PIECE) -> None:
        if config.num_mels % SUBSAMPLING:
            raise ValueError(
                f"encoder.num_mels is {config.num_mels}; it must be a multiple of {SUBSAMPLING}, "
                "because three convolutions halve the bands; use 80 or 128"
            )
        channels = config.subsampling_channels
        self.first = Linear(9, channels, init, bias=True, projects=False)
        self.later = nnx.List([SeparableConv(channels, init) for _ in range(2)])
        self.out = Linear(config.num_mels // SUBSAMPLING * channels, config.dim, init, bias=True)
        self.piece = piece

    def __call__(
        self, mels_AM: Float[Array, "A M"], mask_A: Bool[Array, " A"], start_E: Bool[Array, " E"]
    ) -> Float[Array, "E D"]:
        """start_E: True on the first frame of a clip. Frames that mask_A excludes may hold any values."""
        frames = len(start_E)
        per_piece = min(self.piece, frames)

        def pieces(x: Array, per_frame: int) -> Array:
            """[E * per_frame, ...] -> [pieces, (1 + per_piece) * per_frame, ...]; 0 beyond both ends of x."""
            x = jnp.pad(x, [(0, -frames % per_piece * per_frame)] + [(0, 0)] * (x.ndim - 1))
            x = x.reshape(-1, per_piece * per_frame, *x.shape[1:])
            halo = jnp.pad(x[:-1, -per_frame:], [(1, 0)] + [(0, 0)] * (x.ndim - 1))
            return jnp.concatenate([halo, x], axis=1)

        cut = (pieces(mels_AM, SUBSAMPLING), pieces(mask_A, SUBSAMPLING), pieces(start_E, 1))
        y_pED = jax.lax.map(jax.checkpoint(lambda piece: self._piece(*piece)[1:]), cut)
        return y_pED.reshape(-1, y_pED.shape[-1])[:frames]

    def _piece(self, mels_AM: Array, mask_A: Array, start_E: Array) -> Array:
        def starts(per_frame: int) -> Array:
            """start_E with `per_frame` entries for each encoder frame, of which the first may be True."""
            return jnp.pad(start_E[:, None], ((0, 0), (0, per_frame - 1))).reshape(-1)

        def mask(stride: int) -> Array:
            """1 on the valid frames of a level, else 0. (For a choice, XLA fills an array with the zeros.)"""
            return mask_A[::stride, None, None].astype(mels_AM.dtype)

        x_NBC = jnp.where(mask_A[:, None], mels_AM, 0)[..., None]
        taps_nb9 = jnp.concatenate(_neighbours(x_NBC, starts(4)), axis=-1)
        y_nbC = self.first(taps_nb9.reshape(-1, 9)).reshape(*taps_nb9.shape[:2], -1)
        x_NBC = jax.nn.relu(y_nbC) * mask(2)
        for conv, stride, per_frame in zip(self.later, (4, 8), (2, 1), strict=True):
            y_nbC = conv(x_NBC, starts(per_frame))
            x_NBC = jax.nn.relu(y_nbC) * mask(stride)
        return self.out(x_NBC.reshape(len(start_E), -1))


class FeedForward(nnx.Module):
    """Linear, SiLU, linear."""

    def __init__(self, config: EncoderConfig, init: Init) -> None:
        self.up = Linear(config.dim, config.ffn_dim, init, bias=config.linear_bias)
        self.down = Linear(config.ffn_dim, config.dim, init, bias=config.linear_bias)

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "E D"]:
        return self.down(jax.nn.silu(self.up(x_ED)))


class Clips(NamedTuple):
    """The description of the clips that every block uses, computed once.

    frames: the number of valid frames on all ranks.
    attention: how it is computed (compute.encoder_attention).
    cos, sin: cos(p w_f) and sin(p w_f), for a frame's position p in its clip and every frequency w_f.
    neighbours: of the ranks that clips are cut over; None where they lie whole on this rank. waves: the
    cosines and sines of the neighbours' window, in the compute dtype.
    """

    segments: Segments
    frames: Float[Array, ""]
    cos: Float[Array, "E F"]
    sin: Float[Array, "E F"]
    attention: str
    neighbours: Neighbours | None = None
    waves: Float[Array, "S X"] | None = None


class _Query(NamedTuple):
    """The query's parts: its product with a key's content, and with the key's waves (RelativeAttention)."""

    content: Float[Array, "E H d"]
    position: Float[Array, "E H X"]


def _dense_attention(
    query: _Query, k_EHd: Array, waves_EX: Array, v_EHd: Array, segments: Segments, scale: float
) -> Array:
    """All pairs of frames in a row, those of different clips masked: a few large matrix products, no loop.

    All heads meet the same waves, so the position term is one product, and the waves are not copied for each.
    Unused frames see each other, and nothing reads what they get.
    """

    def by_row(x: Array) -> Array:
        return x.reshape(segments.rows, -1, *x.shape[1:])

    arrays = map(by_row, (query.content, k_EHd, query.position, waves_EX, v_EHd))
    ids = by_row(segments.ids)
    return dense_attention(*arrays, ids, ids, scale).reshape(v_EHd.shape)


def _banded_attention(
    query: _Query,
    k_EHd: Array,
    waves_EX: Array,
    v_EHd: Array,
    segments: Segments,
    scale: float,
    *,
    longest: int,
) -> Array:
    """A few large matrix products at a cost linear in the frames. longest: frames of a clip."""
    arrays = query.content, k_EHd, query.position, waves_EX, v_EHd, segments.whole.lo, segments.whole.hi
    return banded_attention(*arrays, scale, segments.block, longest)


def _blockwise_attention(
    query: _Query, k_EHd: Array, waves_EX: Array, v_EHd: Array, segments: Segments, scale: float
) -> Array:
    """In memory linear in the frames: blocks of frames whose clips do not meet are skipped."""
    waves_EHX = jnp.broadcast_to(waves_EX[:, None], query.position.shape)
    q_EHX, k_EHX = jnp.concatenate(query, axis=-1), jnp.concatenate([k_EHd, waves_EHX], axis=-1)
    return interval_attention(q_EHX, k_EHX, v_EHd, segments.whole, scale, segments.block)


def _attention_over_ranks(
    query: _Query, k_EHd: Array, v_EHd: Array, clips: Clips, scale: float, longest: int
) -> Array:
    """For clips that are cut over ranks: with the keys and values of the neighbours' window.

    It is dense for the rows that _dense_attention takes. The band, which stands for the kernels too, has
    queries in the whole window, of which only this rank's see anything.
    """
    segments, neighbours, waves_SX = clips.segments, clips.neighbours, clips.waves
    assert neighbours is not None
    assert waves_SX is not None
    k_SHd, v_SHd = jnp.unstack(neighbours.window(jnp.stack([k_EHd, v_EHd], axis=1)), axis=1)
    rows, keys = segments.rows, neighbours.keys

    def by_row(x: Array) -> Array:
        return x.reshape(rows, -1, *x.shape[1:])

    if segments.row_length <= DENSE_FRAMES:
        arrays = map(by_row, (query.content, k_SHd, query.position, waves_SX, v_SHd, segments.ids))
        return dense_attention(*arrays, neighbours.ids, scale).reshape(v_EHd.shape)
    if clips.attention != "blocks":

        def in_window(x: Array) -> Array:
            padding = [(0, 0), (neighbours.reach, neighbours.reach), *[(0, 0)] * (x.ndim - 1)]
            return jnp.pad(by_row(x), padding).reshape(-1, *x.shape[1:])

        content, position, lo, hi = map(in_window, (*query, keys.lo, keys.hi))
        given = content, k_SHd, position, waves_SX, v_SHd, lo, hi
        return neighbours.own(banded_attention(*given, scale, segments.block, longest))
    waves_SHX = jnp.broadcast_to(waves_SX[:, None], (len(waves_SX), *query.position.shape[1:]))
    q_EHX, k_SHX = jnp.concatenate(query, axis=-1), jnp.concatenate([k_SHd, waves_SHX], axis=-1)
    return interval_attention(q_EHX, k_SHX, v_SHd, keys, scale, segments.block)


class RelativeAttention(nnx.Module):
    """Bidirectional attention in a clip, with Transformer-XL's relative positions (Dai et al., 2019, 3.3).

    The score of query i and key j is (q_i + u) . k_j + (q_i + v) . W phi(p_i - p_j), where phi(t) holds
    sin(t w_f) and cos(t w_f) for every frequency w_f. With s and c those parts of W^T (q_i + v), the second
    term is sum_f s_f sin((p_i - p_j) w_f) + c_f cos((p_i - p_j) w_f). By the formulas for a difference of
    angles, sin(a - b) = sin a cos b - cos a sin b and cos(a - b) = cos a cos b + sin a sin b, it equals

        sum_f (s_f sin a_f + c_f cos a_f) cos b_f + (c_f sin a_f - s_f cos a_f) sin b_f,

    a = p_i w and b = p_j w: the dot product of a query vector (s and c, rotated) and a key vector (its
    cosines and sines, the same for every head). So this is plain attention with query and key dim d + D;
    nothing is gathered by the difference of two positions. The angles are computed in promote(float32, x).
    Only the kernels (ops/attention/relative.py) take W phi of all differences that a clip can have.

    position: W transposed, [D, D]: rows sin and cos of f = 0, then of f = 1, ...; columns heads x d.
    """

    def __init__(self, config: EncoderConfig, init: Init) -> None:
        self.q, self.k, self.v, self.out = (
            Linear(config.dim, config.dim, init, bias=config.linear_bias) for _ in range(4)
        )
        self.position = init.normal((config.dim, config.dim), projects=True)
        self.content_bias, self.position_bias = (
            init.zeros((config.heads, config.dim // config.heads)) for _ in range(2)
        )
        self.longest = encoder_frames(config.chunk_frames)

    def __call__(self, x_ED: Float[Array, "E D"], clips: Clips) -> Float[Array, "E D"]:
        dtype, (heads, dim) = x_ED.dtype, self.content_bias.shape
        q_EHd, k_EHd, v_EHd = (f(x_ED).reshape(len(x_ED), heads, dim) for f in (self.q, self.k, self.v))
        w_F2Hd = self.position[...].astype(dtype).reshape(-1, 2, heads, dim)
        given = q_EHd, k_EHd, v_EHd, w_F2Hd

        def own(q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array) -> Array:
            return self._own(q_EHd, k_EHd, v_EHd, w_F2Hd, clips)

        def over_ranks(q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array) -> Array:
            query, scale = self._query(q_EHd, w_F2Hd, clips), 1 / math.sqrt(dim)
            return _attention_over_ranks(query, k_EHd, v_EHd, clips, scale, self.longest)

        if clips.neighbours is None:
            o_EHd = own(*given)
        else:
            o_EHd = jax.lax.cond(clips.neighbours.is_cut, over_ranks, own, *given)
        return self.out(o_EHd.reshape(x_ED.shape))

    def _own(self, q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array, clips: Clips) -> Array:
        """Attention inside the clips that lie whole on this rank."""
        scale, segments, dtype = 1 / math.sqrt(q_EHd.shape[-1]), clips.segments, q_EHd.dtype
        if clips.attention == "pallas":
            u_Hd, v_Hd = (b[...].astype(dtype) for b in (self.content_bias, self.position_bias))
            far_WHd = self._far(w_F2Hd, accumulation_dtype(q_EHd))
            given = q_EHd + u_Hd, k_EHd, q_EHd + v_Hd, far_WHd, v_EHd
            return relative_attention(*given, segments.whole.lo, segments.whole.hi, scale, self.longest)
        waves_EX = jnp.concatenate([clips.cos, clips.sin], axis=-1).astype(dtype)
        banded = partial(_banded_attention, longest=self.longest)
        long = banded if clips.attention == "banded" else _blockwise_attention
        attend = _dense_attention if segments.row_length <= DENSE_FRAMES else long
        return attend(self._query(q_EHd, w_F2Hd, clips), k_EHd, waves_EX, v_EHd, segments, scale)

    def _query(self, q_EHd: Array, w_F2Hd: Array, clips: Clips) -> _Query:
        u_Hd, v_Hd = (b[...].astype(q_EHd.dtype) for b in (self.content_bias, self.position_bias))
        s_EHF, c_EHF = jnp.einsum(
            "ehd,fthd->tehf", q_EHd + v_Hd, w_F2Hd, preferred_element_type=accumulation_dtype(q_EHd)
        )
        cos_E1F, sin_E1F = clips.cos[:, None], clips.sin[:, None]
        rotated = (s_EHF * sin_E1F + c_EHF * cos_E1F, c_EHF * sin_E1F - s_EHF * cos_E1F)
        return _Query(q_EHd + u_Hd, jnp.concatenate(rotated, axis=-1).astype(q_EHd.dtype))

    def _far(self, w_F2Hd: Array, acc: jnp.dtype) -> Float[Array, "W H d"]:
        """W phi(t) for all distances t of two frames in a clip."""
        frequencies = len(w_F2Hd)
        angle_WF = distances(self.longest)[:, None].astype(acc) * _frequencies(2 * frequencies, acc)
        phi_WF2 = jnp.stack([jnp.sin(angle_WF), jnp.cos(angle_WF)], axis=-1).astype(w_F2Hd.dtype)
        return jnp.einsum("wft,fthd->whd", phi_WF2, w_F2Hd)


def _frequencies(dim: int, acc: jnp.dtype) -> Float[Array, " F"]:
    found: Array = 10000.0 ** (-jnp.arange(0, dim, 2, dtype=acc) / dim)
    return found


class ConvModule(nnx.Module):
    """Pointwise with GLU, depthwise inside each clip, BatchNorm, SiLU, pointwise."""

    def __init__(self, config: EncoderConfig, init: Init) -> None:
        dim, taps = config.dim, config.conv_kernel
        self.up = Linear(dim, 2 * dim, init, bias=config.conv_bias)
        self.depthwise = init.normal((taps, dim))
        self.depthwise_bias = init.zeros((dim,)) if config.conv_bias else None
        self.norm = BatchNorm(dim, init)
        self.down = Linear(dim, dim, init, bias=config.conv_bias)

    def __call__(
        self, x_ED: Float[Array, "E D"], clips: Clips, *, train: bool, axes: tuple[str, ...]
    ) -> Float[Array, "E D"]:
        value_ED, gate_ED = jnp.split(self.up(x_ED), 2, axis=1)
        w_KD = self.depthwise[...].astype(x_ED.dtype)
        y_ED = centered_conv(value_ED * jax.nn.sigmoid(gate_ED), w_KD, clips.segments, clips.neighbours)
        if self.depthwise_bias is not None:
            y_ED = y_ED + self.depthwise_bias[...].astype(x_ED.dtype)
        y_ED = self.norm(y_ED, clips.segments.valid, clips.frames, train=train, axes=axes)
        return self.down(jax.nn.silu(y_ED))


class ConformerBlock(nnx.Module):
    """Half a feed-forward step, attention, convolution, half a feed-forward step, all residual; LayerNorm."""

    def __init__(self, config: EncoderConfig, init: Init) -> None:
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


class FastConformer(nnx.Module):
    """Subsampling by 8, then conformer blocks, stacked and scanned."""

    def __init__(
        self, config: EncoderConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        """Raises ValueError when num_mels is not a multiple of 8, or heads does not divide dim."""
        init = Init.of(init, compute)
        if config.dim % config.heads:
            raise ValueError(
                f"encoder.dim {config.dim} is not a multiple of encoder.heads {config.heads}; change either"
            )
        self.subsampling = Subsampling(config, init, compute.subsampling_frames or PIECE)
        self.blocks = stack(lambda init: ConformerBlock(config, init), init, config.layers)
        self.scale = math.sqrt(config.dim) if config.scale_input else 1.0
        self.longest = encoder_frames(config.chunk_frames)
        self.remat, self.unroll = remat_of(compute, compute.remat_encoder), compute.unroll_layers
        self.keeps_gathered = init.mesh.pipeline == 1 or compute.recomputed_of_stage == "stage"
        self.attention = compute.encoder_attention.replace("auto", "blocks")

    def __call__(
        self,
        mels_AM: Float[Array, "A M"],
        mel_mask_A: Bool[Array, " A"],
        segments: Segments,
        *,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """Encodes every clip in the buffer. Returns [E, D] in mels' dtype, 0 in padding, and the running
        statistics.

        mels_AM: log-mel features in the compute dtype; every clip starts at a multiple of 8 frames.
        mel_mask_A: True on valid frames. Other frames may hold any values.
        segments: of the E encoder frames, from batch.chunk_ids and chunk_positions; a clip is a document.
        train: BatchNorm uses the statistics of all ranks' valid frames if True, else the running statistics.
        axes: the mesh axes over which clips are sharded; () on a single device. Every rank of these axes must
            call this, even without clips.
        row_axes: those of them whose ranks share a row. A clip may be cut over these ranks, if it is no
            longer than config.chunk_frames; it goes on at the start of the next rank's frames, with the same
            id, which no other clip of the row has. Else the result is NaN.

        The second result has the structure of nnx.to_pure_dict(nnx.state(self, Buffer)). The running
        statistics in it are updated if train is True and any rank has a valid frame. self keeps the old ones.
        Raises ValueError when A is not 8 E.
        """
        if len(mels_AM) != SUBSAMPLING * len(segments.ids):
            raise ValueError(
                f"{len(mels_AM)} mel frames for {len(segments.ids)} encoder frames; "
                f"expected {SUBSAMPLING} for each: check mels against chunk_ids"
            )
        neighbours = make_neighbours(segments, self.longest - 1, row_axes, axes)
        x_ED = self._subsampled(mels_AM, mel_mask_A, segments, neighbours)
        dim, acc = x_ED.shape[1], accumulation_dtype(mels_AM)
        w_F = _frequencies(dim, acc)
        angle_EF = segments.positions[:, None].astype(acc) * w_F
        frames = jax.lax.psum(segments.valid.sum().astype(acc), axes)
        clips = Clips(segments, frames, jnp.cos(angle_EF), jnp.sin(angle_EF), self.attention)
        if neighbours is not None:
            angle_SF = neighbours.positions.reshape(-1, 1).astype(acc) * w_F
            waves_SX = jnp.concatenate([jnp.cos(angle_SF), jnp.sin(angle_SF)], axis=-1)
            clips = clips._replace(neighbours=neighbours, waves=waves_SX.astype(x_ED.dtype))
            is_too_long = neighbours.is_cut & (segments.positions >= self.longest).any()
            x_ED = jnp.where(is_too_long, jnp.nan, x_ED)

        def body(block: ConformerBlock, x_ED: Array) -> tuple[Array, dict[str, Any]]:
            x_ED = block(x_ED, clips, train=train, axes=axes)
            return x_ED, nnx.to_pure_dict(nnx.state(block, Buffer))

        x_ED, buffers = scan_stack(self.blocks, body, x_ED, remat=self.remat, unroll=self.unroll)
        return jnp.where(segments.valid[:, None], x_ED, 0), {"blocks": buffers}

    def _subsampled(
        self, mels_AM: Array, mel_mask_A: Array, segments: Segments, neighbours: Neighbours | None
    ) -> Array:
        """An encoder frame reads mel frames of the frame before, which a neighbour may have."""
        subsampling = partial(applied, self.subsampling, keeps_gathered=self.keeps_gathered)
        start_E = segments.positions == 0
        if neighbours is None:
            return subsampling(mels_AM, mel_mask_A, start_E) * self.scale
        rows, frames = segments.rows, segments.row_length
        mels_RAM = neighbours.extended(mels_AM.reshape(rows, -1, mels_AM.shape[1]), SUBSAMPLING, 0)
        start_RE = start_E.reshape(rows, frames)
        # A chunk that goes on here has filled the frame before.
        before_R8 = jnp.repeat(~start_RE[:, :1], SUBSAMPLING, axis=1)
        mask_RA = jnp.concatenate([before_R8, mel_mask_A.reshape(rows, -1)], axis=1)
        start_RE = jnp.pad(start_RE, ((0, 0), (1, 0)), constant_values=True)
        x_ED = subsampling(mels_RAM.reshape(-1, mels_AM.shape[1]), mask_RA.reshape(-1), start_RE.reshape(-1))
        x_RED = x_ED.reshape(rows, 1 + frames, -1)[:, 1:]
        return x_RED.reshape(rows * frames, -1) * self.scale
