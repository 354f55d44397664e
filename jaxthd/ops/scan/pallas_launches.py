"""Launches of the scan kernels: their grids, and which block of each array a program sees.

Legend: as ops/scan/ssd.py; N tokens in whole scan chunks; n tiles of a scan chunk, q tokens of a tile.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jaxthd.ops.pallas_launch import Inputs, launch
from jaxthd.ops.scan import pallas_kernels as kernels

STATE_PART, HEAD_PART = 64, 32
"""The part of a head's state [S, P] that one program carries over the scan chunks."""


class Sizes(NamedTuple):
    """context_chunks: of all rows on this rank. scan_chunks: of a context chunk. chunk, tile: tokens of a
    scan chunk, of a tile.
    """

    context_chunks: int
    scan_chunks: int
    chunk: int
    tile: int

    @property
    def tiles(self) -> int:
        """Tiles of a scan chunk."""
        return self.chunk // self.tile


class Tokens(NamedTuple):
    """For each token: its position in its document [N], time step dt and log decay la [H, N]; the decays from
    its tile's start [H, N], and to the starts of the later tiles n of its scan chunk [H, n, N].
    """

    positions: Array
    dt: Array
    la: Array
    within: Array
    to_tile: Array


class Carried(NamedTuple):
    """State that enters each context chunk from other ranks: state [Z, H, S, P], float32. fade: how much of
    it is left before each scan chunk (backward: after it) [H, C].
    """

    fade: Array
    state: Array


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def states(
    sizes: Sizes,
    k_NGS: Array,
    v_NHP: Array,
    weight_HN: Array,
    total_HC: Array,
    other: tuple[Array, Carried | None] | None = None,
) -> tuple[Array, ...]:
    """The recurrence s <- total s + k^T (weight v) over the scan chunks of a context chunk, from s = 0.

    Returns s before each scan chunk [C, H, S, P] in v's dtype, and the last s [Z, H, S, P] in float32.
    other: states of the scan chunks. Then the recurrence runs from the last scan chunk to the first, s is the
        one after each scan chunk, and a third result is the inner products [H, C] of s and the chunk's state
        in other.
    """
    (tokens, heads, p), (_, groups, s) = v_NHP.shape, k_NGS.shape
    length, per, c = tokens // sizes.context_chunks, heads // groups, sizes.scan_chunks
    s_part, p_part = min(s, STATE_PART), min(p, HEAD_PART)
    p_parts = p // p_part
    parts = s // s_part * p_parts

    def of_state(i: Any, h: Any, z: Any) -> Any:
        """Index of the block of states that a program carries."""
        return z, h, i // p_parts, i % p_parts

    chunks = pl.BlockSpec((None, c), lambda i, h, z: (h, z))
    all_states = pl.BlockSpec((c, None, s_part, p_part), of_state)
    one_state = pl.BlockSpec((None, None, s_part, p_part), of_state)
    inputs = [
        (k_NGS, pl.BlockSpec((length, None, s_part), lambda i, h, z: (z, h // per, i // p_parts))),
        (v_NHP, pl.BlockSpec((length, None, p_part), lambda i, h, z: (z, h, i % p_parts))),
        (weight_HN, pl.BlockSpec((None, length), lambda i, h, z: (h, z))),
        (total_HC, chunks),
    ]
    outputs = [
        (jax.ShapeDtypeStruct((total_HC.shape[1], heads, s, p), v_NHP.dtype), all_states),
        (_float32(sizes.context_chunks, heads, s, p), one_state),
    ]
    given = len(inputs)
    if other is not None:
        states_CHSP, carried = other
        inputs.append((states_CHSP, all_states))
        if carried is not None:
            inputs += [(carried.fade, chunks), (carried.state, one_state)]
        product = pl.BlockSpec((None, None, c), lambda i, h, z: (i, h, z))
        outputs.append((_float32(parts, *total_HC.shape), product))
    kernel = partial(kernels.states_kernel, q=sizes.tile, reverse=other is not None, read=len(inputs) - given)
    found = launch(kernel, (parts, heads, sizes.context_chunks), inputs, outputs)
    return found if other is None else (*found[:2], found[2].sum(0))


class _Head:
    """Blocks of the kernels that have a program for each (tile, head, scan chunk)."""

    def __init__(self, sizes: Sizes, x_NHP: Array, b_NGS: Array) -> None:
        (n, heads, p), (_, groups, s) = x_NHP.shape, b_NGS.shape
        q, chunk, tiles, per = sizes.tile, sizes.chunk, sizes.tiles, heads // groups
        self.grid = (tiles, heads, n // chunk)
        self.group = pl.BlockSpec((chunk, None, s), lambda i, h, c: (c, h // per, 0))
        self.head = pl.BlockSpec((chunk, None, p), lambda i, h, c: (c, h, 0))
        self.tile = pl.BlockSpec((q, None, p), lambda i, h, c: (c * tiles + i, h, 0))
        self.vector = pl.BlockSpec((None, chunk), lambda i, h, c: (h, c))
        self.vector_tile = pl.BlockSpec((None, q), lambda i, h, c: (h, c * tiles + i))
        self.to_tile_tile = pl.BlockSpec((None, tiles, q), lambda i, h, c: (h, 0, c * tiles + i))
        positions = pl.BlockSpec((chunk,), lambda i, h, c: (c,))
        to_tile = pl.BlockSpec((None, tiles, chunk), lambda i, h, c: (h, 0, c))
        self._tokens = (positions, self.vector, self.vector, self.vector, to_tile)
        self._state = pl.BlockSpec((None, None, s, p), lambda i, h, c: (c, h, 0, 0))
        self._fade = pl.BlockSpec((None, None), lambda i, h, c: (h, c))
        self._first = pl.BlockSpec((None, None, s, p), lambda i, h, c: (c // sizes.scan_chunks, h, 0, 0))

    def tokens(self, tokens: Tokens) -> Inputs:
        """The tokens' arrays, each with its block."""
        return list(zip(tokens, self._tokens, strict=True))

    def state(self, states_CHSP: Array, carried: Carried | None) -> Inputs:
        """The states and, if any are carried, these, each with its block."""
        return [(states_CHSP, self._state), *zip(carried or (), (self._fade, self._first), strict=False)]


def outputs(
    sizes: Sizes,
    c_NGS: Array,
    b_NGS: Array,
    x_NHP: Array,
    tokens: Tokens,
    start_HN: Array,
    states_CHSP: Array,
    carried: Carried | None,
) -> Array:
    """y [N, H, P] in x's dtype. start: the decay from the scan chunk's start. states: without what `carried`
    adds."""
    block = _Head(sizes, x_NHP, b_NGS)
    inputs = [
        (c_NGS, block.group),
        (b_NGS, block.group),
        (x_NHP, block.head),
        *block.tokens(tokens),
        (start_HN, block.vector),
        *block.state(states_CHSP, carried),
    ]
    kernel = partial(kernels.outputs_kernel, q=sizes.tile)
    return launch(kernel, block.grid, inputs, [(jax.ShapeDtypeStruct(x_NHP.shape, x_NHP.dtype), block.tile)])[
        0
    ]


def inputs_grad(
    sizes: Sizes,
    c_NGS: Array,
    b_NGS: Array,
    x_NHP: Array,
    dy_NHP: Array,
    tokens: Tokens,
    end_HN: Array,
    dstates_CHSP: Array,
    carried: Carried | None,
) -> tuple[Array, ...]:
    """Gradients of x, of dt as x's factor [H, N], and of log to_tile [H, n, N], written for tiles n after a
    token's own. end: the decay to the scan chunk's end. dstates: gradients of the states after scan chunks.
    """
    block = _Head(sizes, x_NHP, b_NGS)
    inputs = [
        (c_NGS, block.group),
        (b_NGS, block.group),
        (x_NHP, block.head),
        (dy_NHP, block.head),
        *block.tokens(tokens),
        (end_HN, block.vector),
        *block.state(dstates_CHSP, carried),
    ]
    outputs = [
        (jax.ShapeDtypeStruct(x_NHP.shape, x_NHP.dtype), block.tile),
        (_float32(*end_HN.shape), block.vector_tile),
        (_float32(*tokens.to_tile.shape), block.to_tile_tile),
    ]
    kernel = partial(kernels.inputs_grad_kernel, q=sizes.tile)
    return launch(kernel, block.grid, inputs, outputs)


def scores_grad(
    sizes: Sizes, c_NGS: Array, b_NGS: Array, x_NHP: Array, dy_NHP: Array, tokens: Tokens
) -> tuple[Array, ...]:
    """Three gradients: of C B^T [C, G, Q, Q] in x's dtype, written where the row's tile is not before the
    column's; of log within [H, n, N], a part for each earlier tile n, and written only for these; of la [H,
    N] inside tiles.
    """
    (n, heads, p), (_, groups, s) = x_NHP.shape, b_NGS.shape
    q, chunk, tiles, per = sizes.tile, sizes.chunk, sizes.tiles, heads // groups

    def later(i: Any, g: Any, c: Any) -> Any:
        """Index of the pair's first tile."""
        return c * tiles + i // tiles, g, 0

    def earlier(i: Any, g: Any, c: Any) -> Any:
        """Index of the pair's second tile."""
        return c * tiles + i % tiles, g, 0

    vector = pl.BlockSpec((per, chunk), lambda i, g, c: (g, c))
    inputs = [
        (c_NGS, pl.BlockSpec((q, None, s), later)),
        (b_NGS, pl.BlockSpec((q, None, s), earlier)),
        (x_NHP, pl.BlockSpec((q, per, p), earlier)),
        (dy_NHP, pl.BlockSpec((q, per, p), later)),
        (tokens.positions, pl.BlockSpec((chunk,), lambda i, g, c: (c,))),
        (tokens.dt, vector),
        (tokens.la, vector),
        (tokens.within, vector),
        (tokens.to_tile, pl.BlockSpec((per, tiles, chunk), lambda i, g, c: (g, 0, c))),
    ]
    pair = pl.BlockSpec((None, None, q, q), lambda i, g, c: (c, g, i // tiles, i % tiles))
    part = pl.BlockSpec((per, None, q), lambda i, g, c: (g, i % tiles, c * tiles + i // tiles))
    outputs = [
        (jax.ShapeDtypeStruct((n // chunk, groups, chunk, chunk), x_NHP.dtype), pair),
        (_float32(heads, tiles, n), part),
        (_float32(heads, n), pl.BlockSpec((per, q), lambda i, g, c: (g, c * tiles + i // tiles))),
    ]
    kernel = partial(kernels.scores_grad_kernel, q=q)
    return launch(kernel, (tiles * tiles, groups, n // chunk), inputs, outputs)


def shared_grad(
    sizes: Sizes,
    own_NGS: Array,
    other_NGS: Array,
    v_NHP: Array,
    weight_HN: Array,
    dcb_CGQQ: Array,
    states_CHSP: Array,
    carried: Carried | None,
    *,
    reverse: bool,
) -> tuple[Array, ...]:
    """The gradient of C from B, dy, the decays from the scan chunk's start, and the states. With reverse:
    that of B from C, x, the decays to the scan chunk's end times dt, and the states' gradients. And that of
    log weight [H, N].
    """
    (n, heads, p), (_, groups, s) = v_NHP.shape, own_NGS.shape
    q, chunk, tiles, per = sizes.tile, sizes.chunk, sizes.tiles, heads // groups
    own = pl.BlockSpec((q, None, s), lambda i, g, c: (c * tiles + i, g, 0))
    vector = pl.BlockSpec((per, q), lambda i, g, c: (g, c * tiles + i))
    columns = pl.BlockSpec((None, None, chunk, q), lambda i, g, c: (c, g, 0, i))
    rows = pl.BlockSpec((None, None, q, chunk), lambda i, g, c: (c, g, i, 0))
    fade = pl.BlockSpec((per, None), lambda i, g, c: (g, c))
    first = pl.BlockSpec((None, per, s, p), lambda i, g, c: (c // sizes.scan_chunks, g, 0, 0))
    inputs = [
        (own_NGS, own),
        (other_NGS, pl.BlockSpec((chunk, None, s), lambda i, g, c: (c, g, 0))),
        (v_NHP, pl.BlockSpec((q, per, p), lambda i, g, c: (c * tiles + i, g, 0))),
        (weight_HN, vector),
        (dcb_CGQQ, columns if reverse else rows),
        (states_CHSP, pl.BlockSpec((None, per, s, p), lambda i, g, c: (c, g, 0, 0))),
        *zip(carried or (), (fade, first), strict=False),
    ]
    outputs = [
        (jax.ShapeDtypeStruct(own_NGS.shape, own_NGS.dtype), own),
        (_float32(*weight_HN.shape), vector),
    ]
    kernel = partial(kernels.shared_grad_kernel, q=q, reverse=reverse)
    return launch(kernel, (tiles, groups, n // chunk), inputs, outputs)
