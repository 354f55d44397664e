"""The encoder's attention: inside each clip, with relative positions.

Legend: E encoder frames on this rank, S frames of the window around them (ops/neighbours.py), D model dim,
H heads, d head dim, F = D / 2 frequencies of the position encoding, X = 2 F, W distances of two frames.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.models.front_ends.fastconformer.settings import FastConformer
from jaxthd.models.layers import Linear
from jaxthd.ops.attention.blockwise import Shared, interval_attention
from jaxthd.ops.attention.dense import dense_attention
from jaxthd.ops.attention.relative import distances, relative_attention
from jaxthd.ops.neighbours import Neighbours
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.product import narrowed
from jaxthd.ops.rotary import turned
from jaxthd.packing.intervals import KeyIntervals
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init

DENSE_FRAMES = 256
"""Attention over this many encoder frames of a row on a rank (20 s), or fewer, is one dense product."""


class Clips(NamedTuple):
    """The description of the clips that every block uses, computed once.

    frames: the number of valid frames on all ranks. longest: the most frames of a clip.
    attention: how it is computed (compute.encoder_attention).
    cos, sin: cos(p w_f) and sin(p w_f), for a frame's position p in its clip and every frequency w_f.
    padded: the clips with the frames of padding behind them that are computed too: the convolution at these
    reads the clip's frames, attention gives them 0. None: there are none.
    neighbours: of the ranks that clips are split over; None where they lie whole on this rank. waves: the
    cosines and sines of the neighbours' window, in the compute dtype.
    """

    segments: Segments
    frames: Float[Array, ""]
    cos: Float[Array, "E F"]
    sin: Float[Array, "E F"]
    attention: str
    longest: int
    neighbours: Neighbours | None = None
    waves: Float[Array, "S X"] | None = None
    padded: Segments | None = None


class _Query(NamedTuple):
    """The query's parts: its product with a key's content, and with the key's waves (RelativeAttention)."""

    content: Float[Array, "E H d"]
    position: Float[Array, "E H X"]


class _Keys(NamedTuple):
    """Keys of frames: of this rank's, or of the window around them.

    waves: cosines and sines of their positions, in the compute dtype. ids: their clips' numbers. seen: those
    that each of this rank's frames sees.
    """

    content: Float[Array, "S H d"]
    values: Float[Array, "S H d"]
    waves: Float[Array, "S X"]
    ids: Int32[Array, "R S_of_row"]
    seen: KeyIntervals


def _attend(query: _Query, keys: _Keys, segments: Segments, scale: float) -> Float[Array, "E H d"]:
    """In short rows all pairs of frames, those of different clips masked: a few large matrix products, no
    loop. Unused frames see each other, and nothing reads what they get. In longer ones blockwise, in memory
    linear in the frames: blocks of frames whose clips do not meet are skipped.
    """
    content, values, waves_SX, key_ids_RS, seen = keys
    if segments.row_length <= DENSE_FRAMES:
        given = query.content, content, query.position, waves_SX, values, segments.ids
        arrays = (x.reshape(segments.rows, -1, *x.shape[1:]) for x in given)
        return dense_attention(*arrays, key_ids_RS, scale).reshape(query.content.shape)
    shared = Shared(query.position, waves_SX)
    return interval_attention(query.content, content, values, shared, seen, scale, segments.block)


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

    def __init__(self, config: FastConformer, init: Init) -> None:
        self.q, self.k, self.v, self.out = (
            Linear(config.dim, config.dim, init, bias=config.linear_bias) for _ in range(4)
        )
        self.position = init.normal((config.dim, config.dim), projects=True)
        self.content_bias, self.position_bias = (
            init.zeros((config.heads, config.dim // config.heads)) for _ in range(2)
        )

    def __call__(self, x_ED: Float[Array, "E D"], clips: Clips) -> Float[Array, "E D"]:
        dtype, (heads, dim) = x_ED.dtype, self.content_bias.shape
        q_EHd, k_EHd, v_EHd = (f(x_ED).reshape(len(x_ED), heads, dim) for f in (self.q, self.k, self.v))
        w_F2Hd = narrowed(self.position[...], dtype).reshape(-1, 2, heads, dim)
        given = q_EHd, k_EHd, v_EHd, w_F2Hd

        def own(q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array) -> Array:
            """Attends within the rank's own frames."""
            return self._own(q_EHd, k_EHd, v_EHd, w_F2Hd, clips)

        def over_ranks(
            neighbours: Neighbours, q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array
        ) -> Array:
            """Attends to the rank's own frames and to those of its neighbours."""
            k_SHd, v_SHd = jnp.unstack(neighbours.window(jnp.stack([k_EHd, v_EHd], axis=1)), axis=1)
            if clips.attention == "pallas" and clips.segments.row_length > DENSE_FRAMES:
                return self._kernels_over_ranks(q_EHd, k_SHd, v_SHd, w_F2Hd, neighbours, clips.longest)
            assert clips.waves is not None
            keys = _Keys(k_SHd, v_SHd, clips.waves, neighbours.ids, neighbours.keys)
            return _attend(self._query(q_EHd, w_F2Hd, clips), keys, clips.segments, 1 / math.sqrt(dim))

        if clips.neighbours is None:
            o_EHd = own(*given)
        else:
            with_window = partial(over_ranks, clips.neighbours)
            o_EHd = jax.lax.cond(clips.neighbours.is_split, with_window, own, *given)
        o_ED = o_EHd.reshape(x_ED.shape)
        if clips.padded is not None:
            o_ED = jnp.where(clips.segments.valid[:, None], o_ED, 0)
        return self.out(o_ED)

    def _own(self, q_EHd: Array, k_EHd: Array, v_EHd: Array, w_F2Hd: Array, clips: Clips) -> Array:
        """Attention inside the clips that lie whole on this rank."""
        scale, segments, dtype = 1 / math.sqrt(q_EHd.shape[-1]), clips.segments, q_EHd.dtype
        if clips.attention == "pallas":
            u_Hd, v_Hd = self._biases(dtype)
            given = q_EHd + u_Hd, k_EHd, q_EHd + v_Hd, w_F2Hd, v_EHd, *segments.whole[:2]
            return self._kernels(*given, clips.longest)
        waves_EX = jnp.concatenate([clips.cos, clips.sin], axis=-1).astype(dtype)
        keys = _Keys(k_EHd, v_EHd, waves_EX, segments.ids.reshape(segments.rows, -1), segments.whole)
        return _attend(self._query(q_EHd, w_F2Hd, clips), keys, segments, scale)

    def _kernels_over_ranks(
        self, q_EHd: Array, k_SHd: Array, v_SHd: Array, w_F2Hd: Array, neighbours: Neighbours, longest: int
    ) -> Array:
        """The kernels have queries in the whole window, of which only this rank's see anything."""
        u_Hd, v_Hd = self._biases(q_EHd.dtype)
        content_SHd, position_SHd = neighbours.placed(q_EHd + u_Hd), neighbours.placed(q_EHd + v_Hd)
        lo_S, hi_S = map(neighbours.placed, neighbours.keys[:2])
        given = content_SHd, k_SHd, position_SHd, w_F2Hd, v_SHd, lo_S, hi_S
        return neighbours.own(self._kernels(*given, longest))

    def _kernels(
        self,
        content: Array,
        k: Array,
        position: Array,
        w_F2Hd: Array,
        v: Array,
        lo: Array,
        hi: Array,
        longest: int,
    ) -> Array:
        far_WHd = _far(w_F2Hd, longest, accumulation_dtype(content))
        scale = 1 / math.sqrt(content.shape[-1])
        return relative_attention(content, k, position, far_WHd, v, lo, hi, scale, longest)

    def _biases(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """u and v."""
        return self.content_bias[...].astype(dtype), self.position_bias[...].astype(dtype)

    def _query(self, q_EHd: Array, w_F2Hd: Array, clips: Clips) -> _Query:
        u_Hd, v_Hd = self._biases(q_EHd.dtype)
        position_HEd, w_Hd2F = (q_EHd + v_Hd).transpose(1, 0, 2), w_F2Hd.transpose(2, 3, 1, 0)
        halves_HE2F = jnp.einsum(
            "hed,hdtf->hetf", position_HEd, w_Hd2F, preferred_element_type=accumulation_dtype(q_EHd)
        )
        # (s, c) turned by a - 90 degrees, whose cosine is sin a, and whose sine is -cos a.
        turned_HE2F = turned(halves_HE2F, clips.sin[None], -clips.cos[None])
        position_EHX = turned_HE2F.transpose(1, 0, 2, 3).reshape(*q_EHd.shape[:2], -1)
        return _Query(q_EHd + u_Hd, position_EHX.astype(q_EHd.dtype))


def _far(w_F2Hd: Array, longest: int, acc: jnp.dtype) -> Float[Array, "W H d"]:
    """W phi(t) for all distances t of two frames in a clip."""
    angle_WF = distances(longest)[:, None].astype(acc) * frequencies(2 * len(w_F2Hd), acc)
    phi_WF2 = jnp.stack([jnp.sin(angle_WF), jnp.cos(angle_WF)], axis=-1).astype(w_F2Hd.dtype)
    return jnp.einsum("wft,fthd->whd", phi_WF2, w_F2Hd)


def frequencies(dim: int, acc: jnp.dtype) -> Float[Array, " F"]:
    """Frequencies of the position encoding of `dim` sines and cosines."""
    found: Array = 10000.0 ** (-jnp.arange(0, dim, 2, dtype=acc) / dim)
    return found
