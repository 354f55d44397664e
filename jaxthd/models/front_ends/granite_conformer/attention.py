"""Attention in blocks of a recording's frames, with a learnt vector for each distance (Shaw et al., 2018).

Legend: A frames on this rank, R rows, n = A / R frames of a row, Q frames of a block, t tiles of Q frames
that cover a row, S frames of the window around this rank's (ops/neighbours.py), D model dim, H heads, d head
dim, C = 2 Q - 1 distances of two frames in a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.models.front_ends.granite_conformer.settings import GraniteConformer
from jaxthd.models.layers import LayerNorm, Linear
from jaxthd.ops.neighbours import Neighbours
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.product import narrowed
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init


class BlockAttention(nnx.Module):
    """LayerNorm, then attention of frames to those of their block: the scores of i and j are
    q_i . (k_j + e[i - j]) / sqrt(d).

    A tile of queries sees the tiles before and behind it, since blocks begin anywhere in a row; the products
    with e are computed for all C distances and shifted by the query's number.
    """

    def __init__(self, config: GraniteConformer, init: Init) -> None:
        inner = config.heads * config.head_dim
        self.norm = LayerNorm(config.model_dim, init)
        self.q, self.k, self.v = (Linear(config.model_dim, inner, init) for _ in range(3))
        self.out = Linear(inner, config.model_dim, init, bias=True)
        self.distances = init.normal((2 * config.distances + 1, config.head_dim), std=1.0)
        self.head_dim, self.block, self.farthest = config.head_dim, config.block, config.distances

    def __call__(
        self, x_AD: Float[Array, "A D"], frames: Segments, neighbours: Neighbours | None
    ) -> Float[Array, "A D"]:
        x_AD, rows = self.norm(x_AD), frames.rows
        q, k, v = (f(x_AD).reshape(len(x_AD), -1, self.head_dim) for f in (self.q, self.k, self.v))
        blocks_An = _block_numbers(frames.ids, frames.positions, self.block)
        q_RnHd, own_RnB = q.reshape(rows, -1, *q.shape[1:]), blocks_An.reshape(rows, -1, 2)
        kv_AKHd = jnp.stack([k, v], axis=1)
        e_Cd = self.distances[...][self.farthest - self.block + 1 : self.farthest + self.block]

        def own(q_RnHd: Array, kv_AKHd: Array, e_Cd: Array) -> Array:
            """Attends within the rank's own frames."""
            kv_RnKHd = kv_AKHd.reshape(rows, -1, *kv_AKHd.shape[1:])
            return self._attend(q_RnHd, own_RnB, kv_RnKHd, own_RnB, e_Cd, 0)

        def over_ranks(neighbours: Neighbours, q_RnHd: Array, kv_AKHd: Array, e_Cd: Array) -> Array:
            """Attends to the rank's own frames and to those of its neighbours."""
            kv_RSKHd = neighbours.window(kv_AKHd).reshape(rows, -1, *kv_AKHd.shape[1:])
            all_RSB = _block_numbers(neighbours.ids, neighbours.positions, self.block)
            return self._attend(q_RnHd, own_RnB, kv_RSKHd, all_RSB, e_Cd, neighbours.reach)

        if neighbours is None:
            o_RnI = own(q_RnHd, kv_AKHd, e_Cd)
        else:
            with_window = partial(over_ranks, neighbours)
            o_RnI = jax.lax.cond(neighbours.is_split, with_window, own, q_RnHd, kv_AKHd, e_Cd)
        return self.out(o_RnI.reshape(len(x_AD), -1))

    def _attend(
        self, q_RnHd: Array, own_RnB: Array, kv_RS: Array, all_RSB: Array, e_Cd: Array, reach: int
    ) -> Array:
        """Attention to the window's frames. own, all: recording and block of queries, of keys. reach: frames
        of the window before this rank's."""
        size, frames = self.block, q_RnHd.shape[1]
        tiles, acc = -(-frames // size), accumulation_dtype(q_RnHd)
        behind = tiles * size - frames
        q_RtQHd, own_RtQB = (_tiled(_padded(x, 0, behind), size) for x in (q_RnHd, own_RnB))
        # Tiles of keys begin a tile before those of queries, and end a tile behind them.
        before, after = size - reach, size + behind - reach
        kv_RtK, all_RtKB = (
            jnp.concatenate([y[:, :-2], y[:, 1:-1], y[:, 2:]], axis=2)
            for y in (_tiled(_padded(x, before, after), size) for x in (kv_RS, all_RSB))
        )
        k_RtKHd, v_RtKHd = kv_RtK[:, :, :, 0], kv_RtK[:, :, :, 1]
        e_Cd = narrowed(e_Cd, q_RnHd.dtype)
        scores = jnp.einsum("rtqhd,rtkhd->rthqk", q_RtQHd, k_RtKHd, preferred_element_type=acc)
        far = jnp.einsum("rtqhd,cd->rthqc", q_RtQHd, e_Cd, preferred_element_type=acc)
        scores = (scores + _shifted(far[..., ::-1], 3 * size)) * self.head_dim**-0.5
        is_seen = (own_RtQB[:, :, :, None] == all_RtKB[:, :, None]).all(-1)
        weights = jax.nn.softmax(jnp.where(is_seen[:, :, None], scores, -jnp.inf)).astype(q_RnHd.dtype)
        o_RtQHd = jnp.einsum("rthqk,rtkhd->rtqhd", weights, v_RtKHd)
        return o_RtQHd.reshape(len(q_RnHd), tiles * size, -1)[:, :frames]


def _block_numbers(
    ids: Int32[Array, "*frames"], positions: Int32[Array, "*frames"], block: int
) -> Int32[Array, "*frames 2"]:
    """The recording and the block of each frame."""
    return jnp.stack([ids, positions // block], axis=-1)


def _padded(x: Array, before: int, after: int) -> Array:
    """x [R, n, ...] with more frames, of a block that no other frame has."""
    fill = -1 if x.dtype == jnp.int32 else 0
    return jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)


def _tiled(x: Array, size: int) -> Array:
    """[R, t Q, ...] -> [R, t, Q, ...]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _shifted(x: Float[Array, "... Q C"], width: int) -> Float[Array, "... Q K"]:
    """y[q, k] = x[q, k - q - 1]; 0 where x has no such column. width: K, at least C + Q."""
    *more, rows, columns = x.shape
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width + 1 - columns)])
    flat = jnp.pad(padded.reshape(*more, -1), [(0, 0)] * len(more) + [(1, 0)])
    return flat[..., : rows * width].reshape(*more, rows, width)
