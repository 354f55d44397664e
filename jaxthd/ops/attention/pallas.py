"""Attention over key intervals by Pallas kernels: the back-end "pallas".

It takes every call of the contract, windows and prefixes too, for a kernel sees no more than the intervals.
The kernels are in pallas_kernels.py. There is one launch for a forward call and two for a backward one, the
gradients of queries and those of keys and values: nothing is added in an order that could change. Tiles that
no interval reaches are not visited.

The lowering is Triton's, as in ops/scan/pallas.py, by jax's public Pallas alone. On a CPU the kernels are
interpreted.

Legend: N queries, S keys, H query heads, K key/value heads, G = H / K, D query/key dim, V value dim, W
distances of a bias.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int32

from jaxthd.ops.attention import pallas_kernels as kernels
from jaxthd.ops.attention.contract import AttentionBackend, AttentionShape, Call
from jaxthd.ops.backend import RAN_ON_GPU, Machine
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.pallas_launch import SMALLEST, below_ampere, launch
from jaxthd.packing.intervals import key_intervals

HEAD_DIMS = (16, 32, 64, 128, 256)


class Tiles(NamedTuple):
    """Queries and keys of a tile, and warps of a program."""

    queries: int
    keys: int
    warps: int


FORWARD, BACKWARD = Tiles(128, 64, 8), Tiles(64, 64, 4)


def seen_from(ranges_b2: Int32[Array, "b 2"], key_blocks: int) -> Int32[Array, "c 2"]:
    """For each key block the range of query blocks that holds all that touch it; 0, 0 where none does."""
    c, b = (jnp.arange(n, dtype=jnp.int32) for n in (key_blocks, len(ranges_b2)))
    touches_bc = (ranges_b2[:, :1] <= c) & (c < ranges_b2[:, 1:])
    first_c = jnp.where(touches_bc, b[:, None], len(b)).min(0)
    end_c = jnp.where(touches_bc, b[:, None] + 1, 0).max(0)
    return jnp.stack([jnp.minimum(first_c, end_c), end_c], axis=1)


def tiles_for(tiles: Tiles, queries: int, dim: int) -> Tiles:
    """For few queries, as in decoding, and for wide heads: smaller ones."""
    rows = min(tiles.queries, max(SMALLEST, pl.next_power_of_2(queries)))
    return tiles._replace(queries=rows if dim <= 128 else min(rows, 64), warps=8 if dim > 64 else 4)


class Tiled(NamedTuple):
    """Intervals, filled up to whole tiles, and which tiles meet: for each tile of queries the first tile of
    keys and the end, and the other way round."""

    lo: Int32[Array, " N"]
    hi: Int32[Array, " N"]
    of_queries: Int32[Array, "tiles 2"]
    of_keys: Int32[Array, "tiles 2"]

    @classmethod
    def of(cls, lo: Array, hi: Array, keys: int, tiles: Tiles) -> "Tiled":
        """Fills up the intervals [N] and finds the tiles that meet. keys: how many there are."""
        lo, hi = (filled(x, tiles.queries) for x in (lo, hi))
        found = key_intervals(lo, hi, 1, tiles.queries)
        end = found.first + found.blocks
        tiles_t2 = jnp.stack([found.first // tiles.keys, -(-end // tiles.keys)], axis=1)
        return cls(found.lo, found.hi, tiles_t2, seen_from(tiles_t2, -(-keys // tiles.keys)))


def filled(x: Array, size: int, axis: int = 0) -> Array:
    """x with zeros up to a multiple of `size`."""
    more = [(0, 0)] * x.ndim
    more[axis] = 0, -x.shape[axis] % size
    return jnp.pad(x, more) if more[axis][1] else x


class _QueryTile:
    """Blocks of a program for each (tile of queries, head). groups: query heads of a key/value head."""

    def __init__(self, tiles: Tiles, groups: int) -> None:
        self.queries, self.groups = tiles.queries, groups
        self.vector = pl.BlockSpec((tiles.queries,), lambda t, h: (t,))
        self.of_head = pl.BlockSpec((None, tiles.queries), lambda t, h: (h, t))
        self.range = pl.BlockSpec((None, 2), lambda t, h: (t, 0))

    def rows(self, dim: int) -> pl.BlockSpec:
        """Block [queries, dim] of an array [N, H, dim]."""
        return pl.BlockSpec((self.queries, None, dim), lambda t, h: (t, h, 0))

    def keys(self, x: Array) -> pl.BlockSpec:
        """Block [S, dim] of the head's keys or values."""
        groups = self.groups
        return pl.BlockSpec((len(x), None, x.shape[2]), lambda t, h: (0, h // groups, 0))


def forward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    lo_N: Int32[Array, " N"],
    hi_N: Int32[Array, " N"],
    scale: float,
    bias_NHW: Float[Array, "N H W"] | None = None,
    dtype: Any = None,
) -> tuple[Float[Array, "N H V"], Float[Array, "N H"]]:
    """Attention output and log-sum-exp, in promote(float32, q's dtype). dtype: another one of the output."""
    (n, heads, dim), acc = q_NHD.shape, accumulation_dtype(q_NHD)
    tiles = tiles_for(FORWARD, n, dim)
    k, v = (filled(x, tiles.keys) for x in (k_SKD, v_SKV))
    tiled, block = Tiled.of(lo_N, hi_N, len(k), tiles), _QueryTile(tiles, heads // k.shape[1])
    inputs = [
        (filled(q_NHD, tiles.queries), block.rows(dim)),
        (k, block.keys(k)),
        (v, block.keys(v)),
        (tiled.lo, block.vector),
        (tiled.hi, block.vector),
        (tiled.of_queries, block.range),
    ]
    if bias_NHW is not None:
        inputs.append((filled(bias_NHW, tiles.queries), block.rows(bias_NHW.shape[2])))
    rows = len(tiled.lo)
    outputs = [
        (jax.ShapeDtypeStruct((rows, heads, v.shape[2]), dtype or acc), block.rows(v.shape[2])),
        (jax.ShapeDtypeStruct((heads, rows), acc), block.of_head),
    ]
    kernel = partial(kernels.forward_kernel, scale=scale, keys=tiles.keys)
    grid = len(tiled.of_queries), heads
    out, lse = launch(kernel, grid, inputs, outputs, warps=tiles.warps)
    return out[:n], lse.T[:n]


class Cotangents(NamedTuple):
    """A backward call's arguments besides the forward call's. lse: over all keys that a query
    sees. product: sum of dout * out."""

    dout: Float[Array, "N H V"]
    lse: Float[Array, "H N"]
    product: Float[Array, "H N"]

    @classmethod
    def of(cls, out: Array, lse_NH: Array, dout: Array, size: int) -> "Cotangents":
        """Filled up to a multiple of `size` queries."""
        product_NH = (dout.astype(lse_NH.dtype) * out.astype(lse_NH.dtype)).sum(-1)
        finite_NH = jnp.where(jnp.isfinite(lse_NH), lse_NH, 0)
        return cls(filled(dout, size), *(filled(x.T, size, 1) for x in (finite_NH, product_NH)))


class _Backward(NamedTuple):
    """Arguments of both backward kernels: arrays filled up to whole tiles. dtype: of the gradients, but for
    that of the bias."""

    q: Float[Array, "N H D"]
    k: Float[Array, "S K D"]
    v: Float[Array, "S K V"]
    cotangents: Cotangents
    bias: Float[Array, "N H W"] | None
    tiled: Tiled
    tiles: Tiles
    scale: float
    dtype: Any


def backward(
    q_NHD: Float[Array, "N H D"],
    k_SKD: Float[Array, "S K D"],
    v_SKV: Float[Array, "S K V"],
    out_NHV: Float[Array, "N H V"],
    lse_NH: Float[Array, "N H"],
    dout_NHV: Float[Array, "N H V"],
    lo_N: Int32[Array, " N"],
    hi_N: Int32[Array, " N"],
    scale: float,
    bias_NHW: Float[Array, "N H W"] | None = None,
    dtype: Any = None,
) -> tuple[Array, ...]:
    """Gradients of q, k, v and, if there is one, of the bias (in its dtype). dtype: of the others; None:
    promote(float32, q's dtype)."""
    n, _, dim = q_NHD.shape
    tiles, dtype = tiles_for(BACKWARD, n, dim), dtype or accumulation_dtype(q_NHD)
    k, v = (filled(x, tiles.keys) for x in (k_SKD, v_SKV))
    given = _Backward(
        q=filled(q_NHD, tiles.queries),
        k=k,
        v=v,
        cotangents=Cotangents.of(out_NHV, lse_NH, dout_NHV.astype(q_NHD.dtype), tiles.queries),
        bias=None if bias_NHW is None else filled(bias_NHW, tiles.queries),
        tiled=Tiled.of(lo_N, hi_N, len(k), tiles),
        tiles=tiles,
        scale=scale,
        dtype=dtype,
    )
    dq, *dbias = _query_gradients(given)
    dk, dv = _key_gradients(given)
    return dq[:n], dk[: len(k_SKD)], dv[: len(v_SKV)], *(x[:n] for x in dbias)


def _query_gradients(given: _Backward) -> tuple[Array, ...]:
    q, k, v, cotangents, bias, tiled, tiles, scale, dtype = given
    _, heads, dim = q.shape
    block = _QueryTile(tiles, heads // k.shape[1])
    inputs = [
        (q, block.rows(dim)),
        (k, block.keys(k)),
        (v, block.keys(v)),
        (cotangents.dout, block.rows(v.shape[2])),
        (cotangents.lse, block.of_head),
        (cotangents.product, block.of_head),
        (tiled.lo, block.vector),
        (tiled.hi, block.vector),
        (tiled.of_queries, block.range),
    ]
    outputs = [(jax.ShapeDtypeStruct(q.shape, dtype), block.rows(dim))]
    if bias is not None:
        of_bias = block.rows(bias.shape[2])
        inputs.append((bias, of_bias))
        outputs.append((jax.ShapeDtypeStruct(bias.shape, bias.dtype), of_bias))
    kernel = partial(kernels.query_grad_kernel, scale=scale, keys=tiles.keys)
    return launch(kernel, (len(tiled.of_queries), heads), inputs, outputs, warps=tiles.warps)


def _key_gradients(given: _Backward) -> tuple[Array, ...]:
    q, k, v, cotangents, bias, tiled, tiles, scale, dtype = given
    n, kv_heads = len(q), k.shape[1]
    groups = q.shape[1] // kv_heads

    def of_heads(x: Array) -> pl.BlockSpec:
        """Block [N, G, dim] of the query heads of a key/value head."""
        return pl.BlockSpec((n, groups, x.shape[2]), lambda t, h: (0, h, 0))

    def tile(x: Array) -> pl.BlockSpec:
        """Block [keys, dim] of a tile of one key/value head."""
        return pl.BlockSpec((tiles.keys, None, x.shape[2]), lambda t, h: (t, h, 0))

    vector = pl.BlockSpec((n,), lambda t, h: (0,))
    of_head = pl.BlockSpec((groups, n), lambda t, h: (h, 0))
    inputs = [
        (q, of_heads(q)),
        (k, tile(k)),
        (v, tile(v)),
        (cotangents.dout, of_heads(cotangents.dout)),
        (cotangents.lse, of_head),
        (cotangents.product, of_head),
        (tiled.lo, vector),
        (tiled.hi, vector),
        (tiled.of_keys, pl.BlockSpec((None, 2), lambda t, h: (t, 0))),
    ]
    if bias is not None:
        inputs.append((bias, pl.BlockSpec((n, None, bias.shape[2]), lambda t, h: (0, h, 0))))
    outputs = [(jax.ShapeDtypeStruct(x.shape, dtype), tile(x)) for x in (k, v)]
    kernel = partial(kernels.key_grad_kernel, scale=scale, queries=tiles.queries)
    return launch(kernel, (len(tiled.of_keys), kv_heads), inputs, outputs, warps=tiles.warps)


def why_unfit(head_dim: int, dtype: str, machine: Machine) -> str | None:
    """Why the kernels cannot compute heads of this size on the machine; None if they can."""
    if (reason := below_ampere(machine)) is not None:
        return reason
    if head_dim not in HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, HEAD_DIMS))} dims, and they have {head_dim}"
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"it computes in bfloat16, float16 or float32, and compute.dtype is {dtype}"
    return None


def _unfit(shape: AttentionShape, machine: Machine) -> str | None:
    return why_unfit(shape.head_dim, shape.dtype, machine)


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    dtype = q.dtype if call.alone else None
    return forward(q, k, v, call.intervals.lo, call.intervals.hi, scale, dtype=dtype)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    intervals, dtype = call.intervals, q.dtype if call.alone else None
    dq, dk, dv = backward(q, k, v, out, lse, dout, intervals.lo, intervals.hi, scale, dtype=dtype)
    return dq, dk, dv


VERIFIED = f"{RAN_ON_GPU}; interpreted on a CPU, jax 0.10.2 and 0.12.0.1, 2026-11-23"
BACKEND = AttentionBackend(
    "pallas", _unfit, _forward, _backward, VERIFIED, takes_any_intervals=True, is_interpreted_on_cpu=True
)
