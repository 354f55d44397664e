"""Pallas kernels of the chunked scan, which pallas_launches.py launches: most have one program for each tile.

A chunk is always a scan chunk here. It is divided into tiles of q tokens. Between two tiles the decay is a
product of two vectors, exp(sum up to the later token) exp(sum from the earlier one), both <= 1. Inside a tile
it is the exp of masked sums, taken on the tensor cores. No [chunk, chunk] array of a head leaves the
registers.

Every kernel sees whole chunks of its operands and reads them by tiles (pl.ds), so a program's registers hold
only tiles.

Legend: Q tokens of a chunk, q of a tile, n = Q / q tiles; S state dim, P head dim, k heads of a group. A
token's offset is its number in the chunk. `first`: the offset of the first token of a token's document,
negative where an earlier chunk holds it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxthd.ops.pallas_launch import COLUMNS, ROWS_BY_ROWS, Ref, dot


def _bfloat16_terms(x: Array, count: int) -> list[Array]:
    """bfloat16 arrays whose sum is float32 x, to 8 bits each. They are truncated, not rounded: XLA may skip a
    rounding that is undone at once.
    """
    terms = []
    for _ in range(count):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        term = jax.lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return terms


def _tile_decays(la_q: Array, first_q: Array, base: Any, transposed: bool = False) -> Array:
    """exp(sum of la over j < k <= i), 0 where token i does not see j: [i, j], or [j, i] if transposed.

    base: the offset of the tile's first token. Sums are products with ones and zeros, of terms of one sign.
    """
    i = jnp.arange(len(la_q), dtype=jnp.int32)
    row, column = i[:, None], i[None, :]
    if transposed:
        counted, rest, i, j, first = column > row, row <= column, column, row, first_q[None, :]
    else:
        counted, rest, i, j, first = column <= row, row > column, row, column, first_q[:, None]
    sums = jnp.zeros((len(la_q), len(la_q)), jnp.float32)
    for term_q in _bfloat16_terms(la_q, 3):
        sums += dot(jnp.where(counted, term_q[None, :], 0).astype(jnp.bfloat16), rest.astype(jnp.bfloat16))
    return jnp.where((j <= i) & (first <= base + j), jnp.exp(sums), 0.0)


def _tile_decays_grad(w_qq: Array, terms: int) -> Array:
    """Gradient of the sums' terms: for each k the sum of w [i, j] over j < k <= i. terms: bfloat16 arrays
    that stand for w.
    """
    i = jnp.arange(len(w_qq), dtype=jnp.int32)
    row, column = i[:, None], i[None, :]
    before = (row < column).astype(jnp.bfloat16)
    up_to = jnp.zeros(w_qq.shape, jnp.float32)
    for term_qq in _bfloat16_terms(w_qq, terms):
        up_to += dot(term_qq, before)
    return jnp.where(column <= row, up_to, 0.0).sum(0)


def _first(positions_ref: Ref, tile: Any, q: int) -> Array:
    offset = tile * q + jnp.arange(q, dtype=jnp.int32)
    return offset - positions_ref[pl.ds(tile * q, q)]


def _offsets(tile: Any, q: int) -> Array:
    return tile * q + jnp.arange(q, dtype=jnp.int32)


def _state(state_ref: Ref, carried: tuple[Ref, ...], dtype: Any, at: Any = ...) -> Array:
    """A chunk's state; if carried: plus what is left here of the state that entered the context chunk."""
    if not carried:
        return state_ref[at]
    fade_ref, first_ref = carried
    return (state_ref[at].astype(jnp.float32) + fade_ref[at] * first_ref[at]).astype(dtype)


def states_kernel(
    k_ref: Ref, v_ref: Ref, weight_ref: Ref, total_ref: Ref, *refs: Ref, q: int, reverse: bool, read: int
) -> None:
    """s <- total s + k^T (weight v), over the chunks of a context chunk from s = 0; reverse: from the last
    one.

    k [tokens, S'], v [tokens, P'], weight [tokens], total [chunks], the decay over a chunk. read: how many of
    refs are read: none, others [chunks, S', P'], or these, fade [chunks] and first [S', P'].
    Writes s before each chunk (reverse: after it) [chunks, S', P'] and the last s; if any refs are read, also
    the inner products [chunks] of s and the states that they give.
    """
    others, (states_ref, last_ref, *products) = refs[:read], refs[read:]
    chunks = total_ref.shape[0]
    chunk = k_ref.shape[0] // chunks

    def step(number: Array, state: Array) -> Array:
        """Writes the state before a chunk, and takes it through the chunk."""
        c = chunks - 1 - number if reverse else number
        states_ref[c] = state.astype(states_ref.dtype)
        if others:
            other = others[0][c].astype(jnp.float32)
            if read > 1:
                other += others[1][c] * others[2][...]
            products[0][c] = (state * other).sum()
        state = total_ref[c] * state
        for tile in range(chunk // q):
            rows = pl.ds(c * chunk + tile * q, q)
            weighted = (v_ref[rows, :] * weight_ref[rows][:, None]).astype(k_ref.dtype)
            state += dot(k_ref[rows, :], weighted, COLUMNS)
        return state

    zero = jnp.zeros(last_ref.shape, jnp.float32)
    last_ref[...] = jax.lax.fori_loop(0, chunks, step, zero)


def outputs_kernel(
    c_ref: Ref,
    b_ref: Ref,
    x_ref: Ref,
    positions_ref: Ref,
    dt_ref: Ref,
    la_ref: Ref,
    within_ref: Ref,
    to_tile_ref: Ref,
    start_ref: Ref,
    state_ref: Ref,
    *refs: Ref,
    q: int,
) -> None:
    """Writes a tile's outputs [q, P] of one head."""
    *carried, y_ref = refs
    i = pl.program_id(0)
    rows = pl.ds(i * q, q)
    c, first = c_ref[rows, :], _first(positions_ref, i, q)
    y = start_ref[rows][:, None] * dot(c, _state(state_ref, tuple(carried), c.dtype))

    def earlier(j: Array, y: Array) -> Array:
        """Adds what the tokens of the earlier tile j give to y [q, P]."""
        columns = pl.ds(j * q, q)
        decay = within_ref[rows][:, None] * (to_tile_ref[i, columns] * dt_ref[columns])[None, :]
        scores = dot(c, b_ref[columns, :], ROWS_BY_ROWS) * decay
        scores = jnp.where(first[:, None] <= _offsets(j, q)[None, :], scores, 0.0)
        return y + dot(scores.astype(c.dtype), x_ref[columns, :])

    y = jax.lax.fori_loop(0, i, earlier, y)
    decay = _tile_decays(la_ref[rows], first, i * q) * dt_ref[rows][None, :]
    scores = dot(c, b_ref[rows, :], ROWS_BY_ROWS) * decay
    y_ref[...] = (y + dot(scores.astype(c.dtype), x_ref[rows, :])).astype(y_ref.dtype)


def inputs_grad_kernel(
    c_ref: Ref,
    b_ref: Ref,
    x_ref: Ref,
    dy_ref: Ref,
    positions_ref: Ref,
    dt_ref: Ref,
    la_ref: Ref,
    within_ref: Ref,
    to_tile_ref: Ref,
    end_ref: Ref,
    dstate_ref: Ref,
    *refs: Ref,
    q: int,
) -> None:
    """Writes, of one head, the gradients of a tile's x [q, P], of dt as x's factor [q], and of the logarithms
    of to_tile's rows [n, q]: row i for the tiles i after this one.
    """
    *carried, dx_ref, ddt_ref, dto_tile_ref = refs
    j, tiles = pl.program_id(0), c_ref.shape[0] // q
    columns = pl.ds(j * q, q)
    b, x, dt = b_ref[columns, :], x_ref[columns, :], dt_ref[columns]
    offset = _offsets(j, q)[:, None]
    dx = end_ref[columns][:, None] * dot(b, _state(dstate_ref, tuple(carried), b.dtype))

    def later(i: Array, dx: Array) -> Array:
        """Adds what the later tile i gives to dx [q, P], and writes its dto_tile."""
        rows = pl.ds(i * q, q)
        decay = to_tile_ref[i, columns][:, None] * within_ref[rows][None, :]
        scores = dot(b, c_ref[rows, :], ROWS_BY_ROWS) * decay
        scores = jnp.where(_first(positions_ref, i, q)[None, :] <= offset, scores, 0.0)
        part = dot(scores.astype(b.dtype), dy_ref[rows, :])
        dto_tile_ref[i, :] = dt * (x * part).sum(1)
        return dx + part

    dx = jax.lax.fori_loop(j + 1, tiles, later, dx)
    decay = _tile_decays(la_ref[columns], _first(positions_ref, j, q), j * q, transposed=True)
    scores = dot(b, c_ref[columns, :], ROWS_BY_ROWS) * decay
    dx += dot(scores.astype(b.dtype), dy_ref[columns, :])
    ddt_ref[...] = (x * dx).sum(1)
    dx_ref[...] = (dt[:, None] * dx).astype(dx_ref.dtype)


def scores_grad_kernel(
    c_ref: Ref,
    b_ref: Ref,
    x_ref: Ref,
    dy_ref: Ref,
    positions_ref: Ref,
    dt_ref: Ref,
    la_ref: Ref,
    within_ref: Ref,
    to_tile_ref: Ref,
    dcb_ref: Ref,
    dwithin_ref: Ref,
    dla_ref: Ref,
    *,
    q: int,
) -> None:
    """Writes the gradient of a pair of tiles' C B^T [q, q], summed over the heads of a group in their order.
    For two different tiles also that of the logarithm of `within` [k, q], for twice the same that of la [k,
    q].

    c, dy: the later tile's. b, x: the earlier one's. The rest: the whole chunk's. Nothing is written where
    the second tile is the later one.
    """
    tiles, heads = to_tile_ref.shape[1], x_ref.shape[1]
    i, j = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    rows, columns = pl.ds(i * q, q), pl.ds(j * q, q)

    def over_heads(one: Any) -> None:
        """one: (head, C B^T, gradient of the head's decayed scores) -> gradient of its C B^T."""
        cb = dot(c_ref[...], b_ref[...], ROWS_BY_ROWS)

        def head(h: Array, dcb: Array) -> Array:
            """Adds the gradient of head h."""
            d = dot(dy_ref[:, h, :], x_ref[:, h, :], ROWS_BY_ROWS) * dt_ref[h, columns][None, :]
            return dcb + one(h, cb, d)

        dcb = jax.lax.fori_loop(0, heads, head, jnp.zeros((q, q), jnp.float32))
        dcb_ref[...] = dcb.astype(dcb_ref.dtype)

    @pl.when(j < i)
    def of_two_tiles() -> None:
        """Writes the gradients of two different tiles."""
        seen = _first(positions_ref, i, q)[:, None] <= _offsets(j, q)[None, :]

        def one(h: Array, cb: Array, d: Array) -> Array:
            """Gradient of head h's C B^T; writes that of `within`."""
            decay = within_ref[h, rows][:, None] * to_tile_ref[h, i, columns][None, :]
            d = jnp.where(seen, d * decay, 0.0)
            dwithin_ref[h, :] = (d * cb).sum(1)
            return d

        over_heads(one)

    @pl.when(j == i)
    def of_one_tile() -> None:
        """Writes the gradients of pairs inside a tile."""
        first = _first(positions_ref, i, q)
        terms = 3 if c_ref.dtype == jnp.float32 else 2

        def one(h: Array, cb: Array, d: Array) -> Array:
            """Gradient of head h's C B^T; writes that of la."""
            d *= _tile_decays(la_ref[h, rows], first, i * q)
            dla_ref[h, :] = _tile_decays_grad(d * cb, terms)
            return d

        over_heads(one)


def shared_grad_kernel(
    own_ref: Ref,
    other_ref: Ref,
    v_ref: Ref,
    weight_ref: Ref,
    dcb_ref: Ref,
    state_ref: Ref,
    *refs: Ref,
    q: int,
    reverse: bool,
) -> None:
    """Writes the gradient of a tile of C (reverse: of B) [q, S], summed over the heads of a group in their
    order, and that of the logarithm of `weight` [k, q].

    In parentheses: with reverse. own: the tile's C (B) [q, S]. other: the chunk's B (C) [Q, S]. v: dy (x)
    [q, k, P]. weight: the decay from the chunk's start (to its end, times dt) [k, q]. dcb: rows of this tile
    [q, Q] (columns [Q, q]). state: the states (their gradients) [k, S, P].
    """
    *carried, out_ref, dweight_ref = refs
    tile, tiles = pl.program_id(0), other_ref.shape[0] // q
    own = own_ref[...]

    def head(h: Array, out: Array) -> Array:
        """Adds what head h gives by its state to the gradient [q, S]."""
        state = _state(state_ref, tuple(carried), own.dtype, h)
        part = weight_ref[h, :][:, None] * dot(v_ref[:, h, :], state, ROWS_BY_ROWS)
        dweight_ref[h, :] = (own * part).sum(1)
        return out + part

    def pair(t: Array, out: Array) -> Array:
        """Adds what tile t gives by dcb to the gradient [q, S]."""
        there = pl.ds(t * q, q)
        if reverse:
            return out + dot(dcb_ref[there, :], other_ref[there, :], COLUMNS)
        return out + dot(dcb_ref[:, there], other_ref[there, :])

    out = jax.lax.fori_loop(0, v_ref.shape[1], head, jnp.zeros(own.shape, jnp.float32))
    low, high = (tile, tiles) if reverse else (0, tile + 1)
    out_ref[...] = jax.lax.fori_loop(low, high, pair, out).astype(out_ref.dtype)
