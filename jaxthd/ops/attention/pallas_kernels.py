"""Pallas kernels of attention over key intervals, which pallas.py launches.

As FlashAttention (Dao et al., 2022; Dao, 2023): a program holds a tile of queries (or of keys) and visits the
tiles on the other side that its intervals reach. Scores stay in registers. Nothing is added in an order that
could change.

With a bias, query i and key j have one more score, bias[i, j - i + W // 2]: inside a document that is a
distance of positions (relative.py).

Legend: N queries, S keys, q queries of a tile, b keys of a tile; D query/key dim, V value dim; G query heads
of a key/value head; W distances of the bias.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxthd.ops.pallas_launch import COLUMNS, ROWS_BY_ROWS, Ref, dot

DISTANCES = 64
"""The number of distances of a bias is a multiple of this."""


class _Pairs(NamedTuple):
    """Pairs of a tile of queries and a tile of keys. first, first_key: their numbers. lo, hi: the intervals
    [q]. row: of the bias, the first query's."""

    first: Any
    first_key: Any
    lo: Array
    hi: Array
    row: Any = 0

    def seen(self, keys: int) -> Array:
        """[q, b]."""
        key = (self.first_key + jnp.arange(keys, dtype=jnp.int32))[None, :]
        return (key >= self.lo[:, None]) & (key < self.hi[:, None])

    def bias_at(self, seen: Array, width: int) -> tuple[Array, Array]:
        """Where the bias of each pair is [q, b]: (row, distance); distance 0 where the query does not see the
        key."""
        query, key = (jax.lax.broadcasted_iota(jnp.int32, seen.shape, dim) for dim in (0, 1))
        distance = self.first_key + key - self.first - query + width // 2
        return self.row + query, jnp.where(seen, distance, 0)


def _scores(q: Array, k: Array, bias_ref: Ref | None, pairs: _Pairs, scale: float) -> Array:
    """Scaled scores [q, b]; -inf where the query does not see the key. bias: [.., W]."""
    seen, scores = pairs.seen(k.shape[0]), dot(q, k, ROWS_BY_ROWS)
    if bias_ref is not None:
        at = bias_ref.at[pairs.bias_at(seen, bias_ref.shape[1])]
        scores += pltriton.load(at, mask=seen, other=0.0).astype(scores.dtype)
    return jnp.where(seen, scale * scores, -jnp.inf)


def _gradients(
    scores: Array, dout: Array, v: Array, lse: Array, product: Array, scale: float
) -> tuple[Array, Array]:
    """Probabilities, and gradients of the scores before their scale, [q, b]. lse, product: see
    query_grad_kernel.
    """
    p = jnp.exp(scores - lse[:, None])
    return p, p * (dot(dout, v, ROWS_BY_ROWS) - product[:, None]) * scale


def forward_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    lo_ref: Ref,
    hi_ref: Ref,
    tiles_ref: Ref,
    *refs: Ref,
    scale: float,
    keys: int,
) -> None:
    """Writes the outputs [q, V] of a tile of queries of one head, and the log-sum-exp of their scores [q].

    q [q, D], lo, hi [q]: of the tile. k [S, D], v [S, V]: all of the head. tiles [2]: the first tile of
    `keys` keys and the end. refs: the bias [q, W] if there is one, then the results.
    """
    *bias, out_ref, lse_ref = refs
    q, acc = q_ref[...], lse_ref.dtype
    first = pl.program_id(0) * q.shape[0]
    lo, hi = lo_ref[...], hi_ref[...]

    def tile(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """One step of the online softmax, with tile t of the keys."""
        out, most, total = carry
        there = pl.ds(t * keys, keys)
        scores = _scores(
            q, k_ref[there, :], bias[0] if bias else None, _Pairs(first, t * keys, lo, hi), scale
        )
        new_most = jnp.maximum(most, scores.max(1))
        finite = jnp.where(new_most == -jnp.inf, 0.0, new_most)
        p, shrink = jnp.exp(scores - finite[:, None]), jnp.exp(most - finite)
        v = v_ref[there, :]
        return out * shrink[:, None] + dot(p.astype(v.dtype), v), new_most, total * shrink + p.sum(1)

    zeros = jnp.zeros(q.shape[:1], acc)
    start = jnp.zeros(out_ref.shape, acc), zeros - jnp.inf, zeros
    out, most, total = jax.lax.fori_loop(tiles_ref[0], tiles_ref[1], tile, start)
    some = jnp.where(total > 0, total, 1.0)
    out_ref[...] = (out / some[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(total > 0, most + jnp.log(some), -jnp.inf)


def query_grad_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    lse_ref: Ref,
    product_ref: Ref,
    lo_ref: Ref,
    hi_ref: Ref,
    tiles_ref: Ref,
    *refs: Ref,
    scale: float,
    keys: int,
) -> None:
    """Writes the gradients of a tile of queries of one head [q, D]; with a bias that of the bias too [q, W],
    0 where a query does not see a key.

    lse: finite, product: sum of dout * out, [q]. refs: with a bias, the bias [q, W]; then the results. The
    rest as in forward_kernel.
    """
    bias = refs[0] if len(refs) > 1 else None
    dq_ref = refs[-2] if bias is not None else refs[-1]
    q, dout, lse, product = q_ref[...], dout_ref[...], lse_ref[...], product_ref[...]
    first = pl.program_id(0) * q.shape[0]
    lo, hi = lo_ref[...], hi_ref[...]

    def tile(t: Array, dq: Array) -> Array:
        """Adds what the keys of tile t give to dq [q, D]."""
        there, pairs = pl.ds(t * keys, keys), _Pairs(first, t * keys, lo, hi)
        k = k_ref[there, :]
        scores = _scores(q, k, bias, pairs, scale)
        ds = _gradients(scores, dout, v_ref[there, :], lse, product, scale)[1].astype(k.dtype)
        if bias is not None:
            seen = pairs.seen(keys)
            pltriton.store(refs[-1].at[pairs.bias_at(seen, bias.shape[1])], ds, mask=seen)
        return dq + dot(ds, k)

    dq = jax.lax.fori_loop(tiles_ref[0], tiles_ref[1], tile, jnp.zeros(q.shape, lse.dtype))
    dq_ref[...] = dq.astype(dq_ref.dtype)
    if bias is not None:
        _zero_unseen(refs[-1], _Pairs(first, 0, lo, hi))


def _zero_unseen(dbias_ref: Ref, pairs: _Pairs) -> None:
    """Writes 0 for all distances at which a query sees no key: never where its gradient is written."""
    rows, width = dbias_ref.shape
    query = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def part(n: Array, _: None) -> None:
        """Writes the zeros of DISTANCES distances."""
        there = pl.ds(n * DISTANCES, DISTANCES)
        distance = n * DISTANCES + jnp.arange(DISTANCES, dtype=jnp.int32)[None, :]
        key = pairs.first + query + distance - width // 2
        unseen = (key < pairs.lo[:, None]) | (key >= pairs.hi[:, None])
        zeros = jnp.zeros((rows, DISTANCES), dbias_ref.dtype)
        pltriton.store(dbias_ref.at[:, there], zeros, mask=unseen)

    jax.lax.fori_loop(0, width // DISTANCES, part, None)


def key_grad_kernel(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dout_ref: Ref,
    lse_ref: Ref,
    product_ref: Ref,
    lo_ref: Ref,
    hi_ref: Ref,
    tiles_ref: Ref,
    *refs: Ref,
    scale: float,
    queries: int,
) -> None:
    """Writes the gradients of a tile of keys [b, D] and values [b, V] of one key/value head, summed over its
    query heads in their order.

    k [b, D], v [b, V]: of the tile. q [N, G, D], dout [N, G, V], lse, product [G, N], lo, hi [N], bias
    [N, W] (only with G = 1): all of the head. tiles [2]: the first tile of `queries` queries and the end.
    """
    *bias, dk_ref, dv_ref = refs
    k, v = k_ref[...], v_ref[...]
    first_key, acc = pl.program_id(0) * k.shape[0], lse_ref.dtype

    def head(g: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds what query head g gives to dk and dv."""

        def tile(t: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            """Adds what the queries of tile t give to dk and dv."""
            there = pl.ds(t * queries, queries)
            q, dout = q_ref[there, g, :], dout_ref[there, g, :]
            pairs = _Pairs(t * queries, first_key, lo_ref[there], hi_ref[there], row=t * queries)
            scores = _scores(q, k, bias[0] if bias else None, pairs, scale)
            p, ds = _gradients(scores, dout, v, lse_ref[g, there], product_ref[g, there], scale)
            dk, dv = sums
            return dk + dot(ds.astype(q.dtype), q, COLUMNS), dv + dot(p.astype(dout.dtype), dout, COLUMNS)

        return jax.lax.fori_loop(tiles_ref[0], tiles_ref[1], tile, sums)

    zeros = jnp.zeros(k.shape, acc), jnp.zeros(v.shape, acc)
    dk, dv = jax.lax.fori_loop(0, lse_ref.shape[0], head, zeros)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
