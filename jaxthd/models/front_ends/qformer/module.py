"""FastConformer with a Q-Former over packed chunks.

Legend: A mel frames on this rank, W numbers of a frame, E encoder frames (units), D model dim, K blocks whose
outputs are read, N chunks that this rank has room for, P queries, L frames of the longest chunk, H heads,
d head dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.fastconformer.module import FastConformerEncoder
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.models.front_ends.qformer.settings import QFormer
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Init, applied, gathered, scan_stack, stack

_EPS = 1e-12
_UNSEEN = -1e30


class _Chunks(NamedTuple):
    """The chunks on this rank.

    starts: of each chunk the first frame; the number of all frames where there is no further chunk. bias: of
    the frames from there on, what is added to their scores: the logarithm of the number of frames that one
    stands for, and _UNSEEN for frames of others.
    """

    starts: Int32[Array, " N"]
    bias: Float[Array, "N L"]


class _Attention(nnx.Module):
    """Attention of all queries to all keys."""

    def __init__(self, config: QFormer, init: Init) -> None:
        self.q, self.k, self.v, self.out = (Linear(config.dim, config.dim, init, bias=True) for _ in range(4))
        self.heads = config.query_heads

    def keys(self, x_KED: Float[Array, "K E D"]) -> Float[Array, "2 K E D"]:
        """Keys and values."""
        return jnp.stack(
            [f(x_KED.reshape(-1, x_KED.shape[-1])).reshape(x_KED.shape) for f in (self.k, self.v)]
        )

    def __call__(
        self, x_KPD: Float[Array, "K P D"], kv_2KLD: Float[Array, "2 K L D"], bias_L: Float[Array, " L"]
    ) -> Float[Array, "K P D"]:
        q_KPHd, k_KLHd, v_KLHd = (
            y.reshape(*y.shape[:2], self.heads, -1)
            for y in (self.q(x_KPD.reshape(-1, x_KPD.shape[-1])).reshape(x_KPD.shape), *kv_2KLD)
        )
        acc = accumulation_dtype(x_KPD)
        scores = jnp.einsum("kphd,klhd->khpl", q_KPHd, k_KLHd, preferred_element_type=acc)
        weights = jax.nn.softmax(scores * q_KPHd.shape[-1] ** -0.5 + bias_L.astype(acc)).astype(x_KPD.dtype)
        y_KPD = jnp.einsum("khpl,klhd->kphd", weights, v_KLHd).reshape(x_KPD.shape)
        return self.out(y_KPD.reshape(-1, x_KPD.shape[-1])).reshape(x_KPD.shape)


class _Layer(nnx.Module):
    """Attention among the queries, attention to frames, feed-forward; a LayerNorm behind each sum."""

    def __init__(self, config: QFormer, init: Init) -> None:
        self.self_attention, self.cross_attention = (_Attention(config, init) for _ in range(2))
        self.up = Linear(config.dim, config.query_ffn_dim, init, bias=True)
        self.down = Linear(config.query_ffn_dim, config.dim, init, bias=True)
        self.norm_self, self.norm_cross, self.norm_ffn = (LayerNorm(config.dim, init, _EPS) for _ in range(3))
        attentions = self.self_attention, self.cross_attention
        for linear in (self.up, self.down, *(f for x in attentions for f in (x.q, x.k, x.v, x.out))):
            linear.w.set_metadata(cast=False)  # its gradient is a sum over chunks

    def __call__(
        self, x_KPD: Float[Array, "K P D"], kv_2KLD: Float[Array, "2 K L D"], bias_L: Float[Array, " L"]
    ) -> Float[Array, "K P D"]:
        """The queries of one chunk. kv: cross_attention's keys and values of its frames."""
        own = self.self_attention.keys(x_KPD)
        zero_P = jnp.zeros(x_KPD.shape[1], bias_L.dtype)
        x_KPD = self.norm_self.of_heads(x_KPD + self.self_attention(x_KPD, own, zero_P))
        x_KPD = self.norm_cross.of_heads(x_KPD + self.cross_attention(x_KPD, kv_2KLD, bias_L))
        up_NF = jax.nn.gelu(self.up(x_KPD.reshape(-1, x_KPD.shape[-1])), approximate=False)
        return self.norm_ffn.of_heads(x_KPD + self.down(up_NF).reshape(x_KPD.shape))


class _QueryModel(nnx.Module):
    """The queries of each block, the layers that they share, and the blocks' weights."""

    def __init__(self, config: QFormer, init: Init, compute: ComputeConfig) -> None:
        blocks = max(len(config.output_layers), 1)
        self.prompts = init.normal((blocks, config.queries, config.dim), std=1.0)
        self.layer_weights = init.zeros((config.queries, blocks))
        self.layers = stack(lambda init: _Layer(config, init), init, config.query_layers)
        self.norm = LayerNorm(config.dim, init)
        self.queries = config.queries
        self.remat, self.unroll = compute.remat, compute.unroll_layers

    def __call__(
        self, each_KED: Float[Array, "K E D"], chunks: _Chunks, *, keeps_gathered: bool
    ) -> Float[Array, "N P D"]:
        """The tokens of every chunk. Chunks are computed one after the other: there are few as a rule, though
        there is room for many short ones."""
        frames, (count, window) = each_KED.shape[1], chunks.bias.shape
        prompts_KPD = gathered(self.prompts).astype(each_KED.dtype)
        x_NKPD = jnp.broadcast_to(prompts_KPD, (count, *prompts_KPD.shape))
        each_KED = jnp.pad(each_KED, [(0, 0), (0, window), (0, 0)])

        def body(layer: _Layer, x_NKPD: Array) -> tuple[Array, None]:
            """One layer."""
            kv_2KED = layer.cross_attention.keys(each_KED)

            def of_chunk(x_KPD: Array, start: Array, bias_L: Array) -> Array:
                """The layer for the queries of a chunk."""
                kv_2KLD = jax.lax.dynamic_slice_in_dim(kv_2KED, start, window, axis=2)
                return layer(x_KPD, kv_2KLD, bias_L)

            def step(_: None, given: tuple[Array, Array, Array]) -> tuple[None, Array]:
                """Passes over a chunk that is not there."""
                return None, jax.lax.cond(given[1] < frames, of_chunk, lambda x, *_: x, *given)

            return jax.lax.scan(step, None, (x_NKPD, *chunks))[1], None

        x_NKPD, _ = scan_stack(self.layers, body, x_NKPD, remat=self.remat, unroll=self.unroll)
        weights_PK = jax.nn.softmax(gathered(self.layer_weights))
        y_NPD = jnp.einsum("nkpd,pk->npd", x_NKPD, weights_PK.astype(x_NKPD.dtype))
        y_ND = applied(self.norm, y_NPD.reshape(-1, y_NPD.shape[-1]), keeps_gathered=keeps_gathered)
        return y_ND.reshape(y_NPD.shape)


class QFormerEncoder(FastConformerEncoder):
    """FastConformer, then the Q-Former, whose tokens stand at the first units of their chunk."""

    def __init__(
        self, config: QFormer, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        """Raises ValueError as FastConformerEncoder does."""
        init = Init.of(init, compute)
        super().__init__(config, init, compute)
        self.qformer = _QueryModel(config, init, compute)

    def __call__(
        self,
        mels_AM: Float[Array, "A W"],
        mel_mask_A: Bool[Array, " A"],
        segments: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder. Each piece lies on one rank."""
        stands_for_E = mels_AM[SUBSAMPLING - 1 :: SUBSAMPLING, -1].astype(accumulation_dtype(mels_AM))
        is_frame_E = segments.valid & mel_mask_A.reshape(-1, SUBSAMPLING).any(1)
        is_padding_E = segments.valid & ~is_frame_E & (stands_for_E > 0)
        outputs, buffers = self.outputs(
            mels_AM[:, :-1],
            mel_mask_A,
            _parts(segments, is_frame_E),
            _parts(segments, is_frame_E | is_padding_E),
            train=train,
            axes=axes,
        )
        weight_E = jnp.where(is_frame_E, 1, jnp.where(is_padding_E, stands_for_E, 0))
        chunks = self._chunks(segments, weight_E)
        each_KED = jnp.stack(outputs)
        y_NPD = self.qformer(each_KED, chunks, keeps_gathered=self.keeps_gathered)
        at_NP = chunks.starts[:, None] + jnp.arange(self.qformer.queries, dtype=jnp.int32)
        y_ED = jnp.zeros(each_KED.shape[1:], each_KED.dtype).at[at_NP].set(y_NPD, mode="drop")
        return y_ED, buffers

    def _chunks(self, pieces: Segments, weight_E: Float[Array, " E"]) -> _Chunks:
        """weight: frames that each frame stands for; 0 for those that no query sees."""
        frames, row = len(pieces.ids), pieces.row_length
        window = row if self.longest is None else min(self.longest, row)
        count = pieces.rows * max(row // self.qformer.queries, 1)
        is_first_E = pieces.valid & (pieces.positions == 0)
        (starts_N,) = jnp.nonzero(is_first_E, size=count, fill_value=frames)
        at_L = jnp.arange(window, dtype=jnp.int32)
        at_NL = starts_N[:, None] + at_L
        # The frames of another piece have smaller positions there.
        is_own_NL = pieces.positions.at[at_NL].get(mode="fill", fill_value=-1) == at_L
        weight_NL = jnp.where(is_own_NL, weight_E.at[at_NL].get(mode="fill", fill_value=0), 0)
        bias_NL = jnp.where(weight_NL > 0, jnp.log(jnp.maximum(weight_NL, 1)), _UNSEEN)
        return _Chunks(starts_N.astype(jnp.int32), bias_NL)


def _parts(pieces: Segments, is_part_E: Bool[Array, " E"]) -> Segments:
    """The pieces without the units that are no part of them."""
    ids_RE, positions_RE = (
        jnp.where(is_part_E, x, 0).reshape(pieces.rows, -1) for x in (pieces.ids, pieces.positions)
    )
    return make_segments(ids_RE, positions_RE, block=pieces.block, axis=None)
