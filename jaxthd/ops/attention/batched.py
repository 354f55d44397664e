"""Blockwise attention of many blocks at once: the back-end "batched", for devices that want large kernels.

Blockwise attention (blockwise.py) takes one pair of a query block and a key block at a time. Here one matrix
product takes a group of pairs: the n-th key block of many query blocks, which are ordered by how many they
touch, so that no block is computed that could be skipped, but for what fills up the last group of each n. A
row of 8,192 tokens of recordings takes a dozen turns of the loop, where the other takes hundreds. The
gradients of keys and values go the other way: the n-th query block of many key blocks. So no two pairs of a
group add to the same block, and nothing is added in an order that could change.

Legend: as in blockwise.py; b query blocks, c key blocks, x pairs of a group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.attention.blockwise import head_blocks, tokens_of
from jaxthd.ops.attention.contract import AttentionBackend, Call
from jaxthd.ops.backend import not_nvidia
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.intervals import KeyIntervals, blocked

PAIRS = 256
"""Pairs of blocks in a group, times query heads: enough tiles of a matrix product for any GPU."""


class _Groups(NamedTuple):
    """Pairs of an own block and the n-th other block of its range, for every n in groups of own blocks.

    ranges: of other blocks, for each own block. order: the own blocks, those with the longest range first.
    blocks: of them, how many have an n-th. groups: of these, for each n. ends: groups up to and with n.
    """

    ranges: Int32[Array, "own 2"]
    order: Int32[Array, " own"]
    blocks: Int32[Array, " n"]
    groups: Int32[Array, " n"]
    ends: Int32[Array, " n"]

    @classmethod
    def of(cls, ranges: Int32[Array, "own 2"], others: int, size: int) -> "_Groups":
        """others: the number of other blocks. size: of a group."""
        length = ranges[:, 1] - ranges[:, 0]
        blocks = (length > jnp.arange(others, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
        groups = -(-blocks // size)
        ends = jnp.cumsum(groups, dtype=jnp.int32)
        return cls(ranges, jnp.argsort(-length).astype(jnp.int32), blocks, groups, ends)

    @property
    def turns(self) -> Int32[Array, ""]:
        return self.ends[-1]

    def pairs(self, i: Array, size: int) -> tuple[Array, Array]:
        """(own blocks, other blocks) of group i, int32 [size]; where it is not full, the number of own blocks
        and 0."""
        n = (self.ends <= i).sum(dtype=jnp.int32)  # searchsorted would be a loop
        place = (i - self.ends[n] + self.groups[n]) * size + jnp.arange(size, dtype=jnp.int32)
        own = jnp.where(place < self.blocks[n], self.order.at[place].get(mode="clip"), len(self.order))
        other = self.ranges[:, 0].at[own].get(mode="clip") + n
        return own, jnp.where(place < self.blocks[n], other, 0)


def turns(ranges: Int32[Array, "own 2"], others: int, heads: int) -> Int32[Array, ""]:
    """How often the loop turns for blocks with these ranges of other blocks. heads: of queries."""
    return _Groups.of(ranges, others, _size(len(ranges), heads)).turns


def _size(blocks: int, heads: int) -> int:
    return max(1, min(blocks, PAIRS // heads))


def _taken(x: Array, blocks: Array) -> Array:
    """x[blocks]; 0 where there is no such block."""
    return x.at[blocks].get(mode="fill", fill_value=0)


def seen_from(ranges_b2: Int32[Array, "b 2"], key_blocks: int) -> Int32[Array, "c 2"]:
    """For each key block the range of query blocks that holds all that touch it; 0, 0 where none does."""
    c, b = (jnp.arange(n, dtype=jnp.int32) for n in (key_blocks, len(ranges_b2)))
    touches_bc = (ranges_b2[:, :1] <= c) & (c < ranges_b2[:, 1:])
    first_c = jnp.where(touches_bc, b[:, None], len(b)).min(0)
    end_c = jnp.where(touches_bc, b[:, None] + 1, 0).max(0)
    return jnp.stack([jnp.minimum(first_c, end_c), end_c], axis=1)


def _scores(q: Array, k: Array, lo_xQ: Array, hi_xQ: Array, keys: Array, scale: float) -> Array:
    """Scaled scores [x, K, G, Q, B] of pairs of blocks, -inf outside the intervals. keys: the number of each
    pair's key block, [x]."""
    dot = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q))
    j_xB = keys[:, None] * k.shape[-2] + jnp.arange(k.shape[-2])
    seen = (j_xB[:, None] >= lo_xQ[..., None]) & (j_xB[:, None] < hi_xQ[..., None])
    return jnp.where(seen[:, None, None], scale * dot("xkgqd,xkbd->xkgqb", q, k), -jnp.inf)


def batched_forward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """As blockwise.attention_forward."""
    n, kv_heads, acc = len(q_NHD), k_SKD.shape[1], accumulation_dtype(q_NHD)
    k_cKBD, v_cKBV = (blocked(x, block, 0).swapaxes(1, 2) for x in (k_SKD, v_SKV))
    q_bKGQD = head_blocks(q_NHD, kv_heads, block)
    lo_bQ, hi_bQ = (blocked(x, block, 0) for x in (intervals.lo, intervals.hi))

    size = _size(len(q_bKGQD), q_NHD.shape[1])
    groups = _Groups.of(intervals.blocks, len(k_cKBD), size)

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        own, keys = groups.pairs(i, size)
        out, most, total, q, lo, hi = (_taken(x, own) for x in (*carry, q_bKGQD, lo_bQ, hi_bQ))
        s = _scores(q, k_cKBD[keys], lo, hi, keys, scale)
        new_most = jnp.maximum(most, s.max(-1))
        finite = jnp.where(jnp.isfinite(new_most), new_most, 0)
        p, shrink = jnp.exp(s - finite[..., None]), jnp.exp(most - finite)
        v = v_cKBV[keys]
        pv = jnp.einsum("xkgqb,xkbv->xkgqv", p.astype(v.dtype), v, preferred_element_type=acc)
        new = out * shrink[..., None] + pv, new_most, total * shrink + p.sum(-1)
        return tuple(old.at[own].set(x, mode="drop") for old, x in zip(carry, new, strict=True))

    empty = jnp.zeros(q_bKGQD.shape[:-1], acc)
    start = jnp.zeros((*empty.shape, v_SKV.shape[-1]), acc), empty - jnp.inf, empty
    out, most, total = jax.lax.fori_loop(0, groups.turns, step, start)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = jnp.where(total > 0, most + jnp.log(total), -jnp.inf)
    return tokens_of(out, n), tokens_of(lse[..., None], n)[..., 0]


def batched_backward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    lse_NH: Float[Array, "N H"],
    dot_NH: Float[Array, "N H"],
    dout_NHV: Float[Array, "N H V"],
    intervals: KeyIntervals,
    scale: float,
    block: int,
) -> tuple[Float[Array, "N H D"], Float[Array, "S K D"], Float[Array, "S K V"]]:
    """As blockwise.attention_backward."""
    (n, s), kv_heads, acc = (len(q_NHD), len(k_SKD)), k_SKD.shape[1], accumulation_dtype(q_NHD)
    dot = partial(jnp.einsum, preferred_element_type=acc)
    k_cKBD, v_cKBV = (blocked(x, block, 0).swapaxes(1, 2) for x in (k_SKD, v_SKV))
    finite_lse_NH = jnp.where(jnp.isfinite(lse_NH), lse_NH, 0)
    arrays = q_NHD, dout_NHV, finite_lse_NH[..., None], dot_NH[..., None]
    of_heads = [head_blocks(x, kv_heads, block) for x in arrays]
    of_blocks = (*of_heads, *(blocked(x, block, 0) for x in (intervals.lo, intervals.hi)))

    def scores(queries: list[Array], k: Array, v: Array, keys: Array) -> tuple[Array, Array]:
        """(weights, gradient of the scores), [x, K, G, Q, B]."""
        q, dout, lse, product, lo, hi = queries
        p = jnp.exp(_scores(q, k, lo, hi, keys, scale) - lse)
        ds = p * (dot("xkgqv,xkbv->xkgqb", dout, v) - product) * scale
        return p.astype(dout.dtype), ds.astype(q.dtype)

    size = _size(len(of_heads[0]), q_NHD.shape[1])
    groups = _Groups.of(intervals.blocks, len(k_cKBD), size)

    def of_queries(i: Array, dq: Array) -> Array:
        own, keys = groups.pairs(i, size)
        k = k_cKBD[keys]
        _, ds = scores([_taken(x, own) for x in of_blocks], k, v_cKBV[keys], keys)
        return dq.at[own].add(dot("xkgqb,xkbd->xkgqd", ds, k), mode="drop")

    dq = jax.lax.fori_loop(0, groups.turns, of_queries, jnp.zeros(of_heads[0].shape, acc))
    key_size = _size(len(k_cKBD), q_NHD.shape[1])
    ranges = seen_from(intervals.blocks, len(k_cKBD))
    key_groups = _Groups.of(ranges, len(of_heads[0]), key_size)

    def of_keys(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        own, of_query = key_groups.pairs(i, key_size)
        queries = [x[of_query] for x in of_blocks]
        p, ds = scores(queries, _taken(k_cKBD, own), _taken(v_cKBV, own), own)
        dk = carry[0].at[own].add(dot("xkgqb,xkgqd->xkbd", ds, queries[0]), mode="drop")
        return dk, carry[1].at[own].add(dot("xkgqb,xkgqv->xkbv", p, queries[1]), mode="drop")

    zeros = jnp.zeros(k_cKBD.shape, acc), jnp.zeros(v_cKBV.shape, acc)
    dk, dv = jax.lax.fori_loop(0, key_groups.turns, of_keys, zeros)
    dk_SKD, dv_SKV = (x.swapaxes(1, 2).reshape(-1, kv_heads, x.shape[-1])[:s] for x in (dk, dv))
    return tokens_of(dq, n), dk_SKD, dv_SKV


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    return batched_forward(q, k, v, call.intervals, scale, call.block)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    dot_NH = (dout.astype(out.dtype) * out).sum(-1)
    return batched_backward(q, k, v, lse, dot_NH, dout, call.intervals, scale, call.block)


BACKEND = AttentionBackend(
    "batched",
    lambda shape, device: not_nvidia(device.platform),
    _forward,
    _backward,
    takes_any_intervals=True,
)
