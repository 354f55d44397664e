"""The Mamba2 scan over packed tokens, and its state passing over the context axis.

Chunked state-space duality (Dao and Gu, 2024) with document resets: inside a chunk a masked quadratic form,
between chunks a recurrence of states. All decay is summed in float32 over terms of one sign, never as a
difference of two cumulative sums (which rounding can push above 0 before exp).

Over the context axis each stretch is scanned from a zero state; ranks exchange (total decay, final state) of
their stretches and each derives its true initial states: traffic does not depend on the number of tokens.

Legend: N tokens, H heads, P head dim, G groups, S state dim; Z stretches on this rank (rows * stretches of a
row), c chunks of a stretch, Q tokens of a chunk, h heads of a group (H = G * h); D tokens whose
state is asked for.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.segments import Segments

GATHER_UP_TO = 8
"""Largest context size whose states are all-gathered; beyond it they travel in log2(context) steps."""

Pair = tuple[Array, Array]
"""(decay, state) of consecutive tokens: how much of an incoming state is left, and what they add."""


def ssd(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    *,
    chunk: int,
) -> Float[Array, "N H P"]:
    """y_i = C_i . h_i with h_i = exp(dt_i a) h_{i-1} + dt_i x_i B_i^T, h = 0 before each document.

    dt_NH >= 0 and a_H < 0 in the accumulation dtype promote(float32, x's); x, B, C in the compute dtype.
    chunk: tokens of a chunk; speed and memory only. Returns the accumulation dtype.
    """
    nowhere = jnp.zeros(0, jnp.int32)
    return ssd_and_states(x_NHP, dt_NH, a_H, b_NGS, c_NGS, segments, nowhere, chunk=chunk)[0]


def ssd_and_states(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    at_D: Int32[Array, " D"],
    *,
    chunk: int,
) -> tuple[Float[Array, "N H P"], Float[Array, "D H P S"]]:
    """As ssd; and the state h after the tokens at_D of this rank (0 where at_D is -1), for decoding on.

    Both in the accumulation dtype.
    """
    acc = accumulation_dtype(x_NHP)
    n, groups = len(x_NHP), b_NGS.shape[1]
    length = n // (segments.rows * segments.stretches)
    chunk = min(chunk, length)
    padding = -length % chunk

    def chunked(x: Array) -> Array:
        """[N, ...] -> [Z, c, Q, ...]; a stretch is filled up to whole chunks."""
        x = x.reshape(-1, length, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])

    # Filling goes on with the last token's document at dt = 0: it leaves the state as it is.
    positions_ZL = segments.positions.reshape(-1, length)
    filling_Zp = positions_ZL[:, -1:] + jnp.arange(1, padding + 1, dtype=jnp.int32)
    positions_ZcQ = jnp.concatenate([positions_ZL, filling_Zp], axis=1).reshape(len(positions_ZL), -1, chunk)
    decay_ZcQH = chunked((dt_NH * a_H).astype(acc))
    xdt_ZcQGhP = chunked(
        (x_NHP * dt_NH[..., None].astype(x_NHP.dtype)).reshape(n, groups, -1, x_NHP.shape[-1])
    )
    b_ZcQGS, c_ZcQGS = chunked(b_NGS), chunked(c_NGS)

    def dot(spec: str, *operands: Array) -> Array:
        return jnp.einsum(spec, *operands, preferred_element_type=acc)

    def by_group(x_H: Array) -> Array:
        """[Z, c, H, ...] -> [Z, c, G, h, ...]."""
        return x_H.reshape(*x_H.shape[:2], groups, -1, *x_H.shape[3:])

    # Phase 1, in every chunk: decay between any two of its tokens, and the state it adds.
    between_ZcGhQQ = by_group(_decay_between(decay_ZcQH.swapaxes(2, 3), positions_ZcQ))
    to_end_ZcGhQ = between_ZcGhQQ[..., -1, :]
    xdt_end_ZcQGhP = xdt_ZcQGhP * jnp.moveaxis(to_end_ZcGhQ, -1, 2)[..., None].astype(xdt_ZcQGhP.dtype)
    added_ZcGhPS = dot("zcqghp,zcqgs->zcghps", xdt_end_ZcQGhP, b_ZcQGS)
    summed_ZcQH = jnp.cumsum(decay_ZcQH, axis=2)
    index_Q = jnp.arange(chunk)
    from_start_ZcQH = jnp.where(positions_ZcQ[..., None] > index_Q[:, None], jnp.exp(summed_ZcQH), 0)
    across_ZcGh = by_group(from_start_ZcQH[:, :, -1])

    # Between chunks, then between ranks.
    def next_chunk(before: Pair, chunk: Pair) -> tuple[Pair, Pair]:
        return _then(before, chunk), before

    start = (jnp.ones_like(across_ZcGh[:, 0]), jnp.zeros_like(added_ZcGhPS[:, 0]))
    chunks = (across_ZcGh.swapaxes(0, 1), added_ZcGhPS.swapaxes(0, 1))
    total, (decay_cZGh, state_cZGhPS) = jax.lax.scan(next_chunk, start, chunks)
    if segments.context > 1:
        state_cZGhPS = state_cZGhPS + decay_cZGh[..., None, None] * initial_states(*total, segments)

    # Phase 2, in every chunk: outputs.
    cb_ZcGQQ = dot("zcqgs,zckgs->zcgqk", c_ZcQGS, b_ZcQGS)
    scores_ZcGhQQ = (cb_ZcGQQ[:, :, :, None] * between_ZcGhQQ).astype(x_NHP.dtype)
    y_ZcQGhP = dot("zcghqk,zckghp->zcqghp", scores_ZcGhQQ, xdt_ZcQGhP)
    from_state_ZcQGhP = dot("zcqgs,czghps->zcqghp", c_ZcQGS, state_cZGhPS.astype(c_ZcQGS.dtype))
    from_start_ZcQGh = from_start_ZcQH.reshape(*from_start_ZcQH.shape[:3], groups, -1)
    y_ZcQGhP = y_ZcQGhP + from_state_ZcQGhP * from_start_ZcQGh[..., None]
    y_ZLHP = y_ZcQGhP.reshape(y_ZcQGhP.shape[0], -1, *x_NHP.shape[1:])

    # The state after a token: what its chunk added up to there, and what is left of the chunk's first state.
    z_D, (c_D, q_D) = at_D // length, jnp.divmod(at_D % length, chunk)
    to_at_DQGh = jnp.moveaxis(between_ZcGhQQ[z_D, c_D, :, :, q_D], -1, 1)
    xdt_at_DQGhP = xdt_ZcQGhP[z_D, c_D] * to_at_DQGh[..., None].astype(xdt_ZcQGhP.dtype)
    state_DGhPS = dot("dqghp,dqgs->dghps", xdt_at_DQGhP, b_ZcQGS[z_D, c_D])
    left_DGh = from_start_ZcQGh[z_D, c_D, q_D]
    state_DGhPS = state_DGhPS + left_DGh[..., None, None] * state_cZGhPS[c_D, z_D]
    state_DGhPS = jnp.where((at_D >= 0)[:, None, None, None, None], state_DGhPS, 0)
    state_DHPS = state_DGhPS.reshape(len(at_D), *x_NHP.shape[1:], b_NGS.shape[-1])
    return y_ZLHP[:, :length].reshape(x_NHP.shape), state_DHPS


def _decay_between(decay_ZcHQ: Array, positions_ZcQ: Array) -> Array:
    """exp(sum of decay over (j, i]) where j <= i are tokens of one document, else 0: [Z, c, H, i, j]."""
    index_Q = jnp.arange(decay_ZcHQ.shape[-1])
    back_QQ = index_Q[:, None] - index_Q
    terms_ZcHQQ = jnp.where(back_QQ > 0, decay_ZcHQ[..., :, None], 0)
    sums_ZcHQQ = jnp.cumsum(terms_ZcHQQ, axis=-2)
    same_ZcQQ = (back_QQ >= 0) & (back_QQ <= positions_ZcQ[..., :, None])
    return jnp.where(same_ZcQQ[:, :, None], jnp.exp(sums_ZcHQQ), 0)


def initial_states(
    decay_ZGh: Float[Array, "Z G h"], state_ZGhPS: Float[Array, "Z G h P S"], segments: Segments
) -> Float[Array, "Z G h P S"]:
    """The state that enters each of this rank's stretches, from every stretch's (total decay, final state).

    Stretches compose as (d1, s1) then (d2, s2) = (d1 d2, s1 d2 + s2): an exclusive prefix over the
    2 * context chunks of each row. All-gather up to GATHER_UP_TO ranks, else log2 steps.
    """
    decay, state = (x.reshape(segments.rows, 2, *x.shape[1:]) for x in (decay_ZGh, state_ZGhPS))
    prefix = _prefix_gathered if segments.context <= GATHER_UP_TO else _prefix_in_steps
    return prefix(decay, state, segments).reshape(state_ZGhPS.shape)


def _then(first: Pair, second: Pair) -> Pair:
    return first[0] * second[0], first[1] * second[0][..., None, None] + second[1]


def _prefix_gathered(decay_R2Gh: Array, state_R2GhPS: Array, segments: Segments) -> Array:
    context, rank = segments.context, jax.lax.axis_index(segments.axis)
    everything = (jax.lax.all_gather(x, segments.axis, axis=0) for x in (decay_R2Gh, state_R2GhPS))
    # Document order: first chunks of ranks 0, 1, ..., then second chunks of ranks ..., 1, 0.
    decay, state = (jnp.concatenate([x[:, :, 0], x[::-1, :, 1]]) for x in everything)

    def step(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        return state * x[0][..., None, None] + x[1], state

    _, before = jax.lax.scan(step, jnp.zeros_like(state_R2GhPS[:, 0]), (decay, state))
    return jnp.stack([before[rank], before[2 * context - 1 - rank]], axis=1)


def _prefix_in_steps(decay_R2Gh: Array, state_R2GhPS: Array, segments: Segments) -> Array:
    """Hillis-Steele prefixes, up the ranks for first chunks and down for second ones."""
    context, axis = segments.context, segments.axis
    rank = jax.lax.axis_index(axis)

    def shifted(pair: Pair, distance: int) -> Pair:
        """From `distance` ranks before (negative: after); the identity (1, 0) where there is none."""
        moves = [(r, r + distance) for r in range(context) if 0 <= r + distance < context]
        decay, state = (jax.lax.ppermute(x, axis, moves) for x in pair)
        arrived = (rank - distance >= 0) & (rank - distance < context)
        return jnp.where(arrived, decay, 1), state

    up, down = ((decay_R2Gh[:, i], state_R2GhPS[:, i]) for i in (0, 1))
    distance = 1
    while distance < context:
        up, down = _then(shifted(up, distance), up), _then(shifted(down, -distance), down)
        distance *= 2
    # `up` on the last rank covers all first chunks; every rank's second chunk comes after them.
    is_last = rank == context - 1
    first_half = tuple(jax.lax.psum(jnp.where(is_last, x, 0), axis) for x in up)
    return jnp.stack([shifted(up, 1)[1], _then(first_half, shifted(down, -1))[1]], axis=1)
