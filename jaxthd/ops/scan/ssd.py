"""The Mamba2 scan over packed tokens, and its state passing over the context axis.

Chunked state-space duality (Dao and Gu, 2024) with document resets: inside a chunk a masked quadratic form,
between chunks a recurrence of states. All decay is summed in float32 over terms of one sign, never as a
difference of two cumulative sums (which rounding can push above 0 before exp).

Over the context axis each stretch is scanned from a zero state; ranks exchange (total decay, final state) of
their stretches and each derives its true initial states: traffic does not depend on the number of tokens.

Legend: N tokens, H heads, P head dim, G groups, S state dim; Z stretches on this rank (rows * stretches of a
row), c chunks of a stretch, C = Z * c, Q tokens of a chunk, h heads of a group (H = G * h);
D tokens whose state is asked for.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.contract import ScanBackend
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


BACKEND = ScanBackend("xla", lambda shape, device: None, ssd)


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
    stretches = segments.rows * segments.stretches
    length = n // stretches
    chunk = min(chunk, length)
    padding = -length % chunk

    def chunked(x: Array) -> Array:
        """[N, G, ...] -> [C, G, Q, ...]; a stretch is filled up to whole chunks."""
        x = x.reshape(stretches, length, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(-1, chunk, *x.shape[2:]).swapaxes(1, 2)

    def by_group(x_NH: Array) -> Array:
        return x_NH.reshape(n, groups, -1, *x_NH.shape[2:])

    # Filling goes on with the last token's document at dt = 0: it leaves the state as it is.
    positions_ZL = segments.positions.reshape(stretches, length)
    filling_Zp = positions_ZL[:, -1:] + jnp.arange(1, padding + 1, dtype=jnp.int32)
    positions_CQ = jnp.concatenate([positions_ZL, filling_Zp], axis=1).reshape(-1, chunk)
    decay_CGhQ = chunked(by_group((dt_NH * a_H).astype(acc))).swapaxes(2, 3)
    xdt_CGQhP = chunked(by_group(x_NHP * dt_NH[..., None].astype(x_NHP.dtype)))
    b_CGQS, c_CGQS = chunked(b_NGS), chunked(c_NGS)

    # Phase 1, in every chunk: decay between any two of its tokens, and the state it adds.
    i = jnp.arange(chunk)
    same_CQQ = (i[:, None] >= i) & (i[:, None] - i <= positions_CQ[..., None])
    between_CGhQQ = _decay_over((i[:, None] < i) & (i <= i[:, None, None]), decay_CGhQ, same_CQQ)
    to_end_CGhQ = _decay_over(i[:, None] < i, decay_CGhQ, same_CQQ[:, -1])
    from_start_CGhQ = _decay_over(i <= i[:, None], decay_CGhQ, positions_CQ > i)
    added_CGShP = _state(b_CGQS, xdt_CGQhP, to_end_CGhQ)

    # Between chunks, then between ranks.
    def next_chunk(before: Pair, chunk: Pair) -> tuple[Pair, Pair]:
        return _then(before, chunk), before

    def by_stretch(x: Array) -> Array:
        """[C, ...] -> [chunks of a stretch, Z, ...]."""
        return x.reshape(stretches, -1, *x.shape[1:]).swapaxes(0, 1)

    chunks = by_stretch(from_start_CGhQ[..., -1]), by_stretch(added_CGShP)
    start = jnp.ones_like(chunks[0][0]), jnp.zeros_like(chunks[1][0])
    total, (decay_cZGh, state_cZGShP) = jax.lax.scan(next_chunk, start, chunks)
    if segments.context > 1:
        state_cZGShP = state_cZGShP + _faded(initial_states(*total, segments), decay_cZGh)
    state_CGShP = state_cZGShP.swapaxes(0, 1).reshape(added_CGShP.shape)

    # Phase 2, in every chunk: outputs.
    cb_CGQQ = _matmul(c_CGQS, b_CGQS.swapaxes(2, 3))
    scores_CGhQQ = (cb_CGQQ[:, :, None] * between_CGhQQ).astype(x_NHP.dtype)
    y_CGhQP = _matmul(scores_CGhQQ, xdt_CGQhP.swapaxes(2, 3))
    from_state = _matmul(c_CGQS, jax.lax.collapse(state_CGShP.astype(c_CGQS.dtype), 3))
    from_state_CGQhP = from_state.reshape(xdt_CGQhP.shape) * _per_token(from_start_CGhQ)
    y_CGQhP = y_CGhQP.swapaxes(2, 3) + from_state_CGQhP
    y_ZLHP = y_CGQhP.swapaxes(1, 2).reshape(stretches, -1, *x_NHP.shape[1:])

    # The state after a token: what its chunk added up to there, and what is left of the chunk's first state.
    c_D, q_D = jnp.divmod(at_D % length, chunk)
    c_D = c_D + at_D // length * (len(positions_CQ) // stretches)
    state_DGShP = _state(b_CGQS[c_D], xdt_CGQhP[c_D], between_CGhQQ[c_D, :, :, q_D])
    state_DGShP = state_DGShP + _faded(state_CGShP[c_D], from_start_CGhQ[c_D, :, :, q_D])
    state_DGShP = jnp.where((at_D >= 0)[:, None, None, None, None], state_DGShP, 0)
    state_DHPS = jnp.moveaxis(state_DGShP, 2, -1).reshape(len(at_D), *x_NHP.shape[1:], b_NGS.shape[-1])
    return y_ZLHP[:, :length].reshape(x_NHP.shape), state_DHPS


def _decay_over(counted: Array, decay_CGhQ: Array, seen: Array) -> Array:
    """exp(sum of decay over the tokens of a chunk that `counted` [..., Q] names), 0 where `seen` [C, ...] is
    False: [C, G, h, ...].

    A matrix product with ones and zeros: the sums are of terms of one sign, and cumulative sums are slow.
    """
    sums = jnp.einsum(
        "cghk,...k->cgh...", decay_CGhQ, counted.astype(decay_CGhQ.dtype), precision=jax.lax.Precision.HIGHEST
    )
    return jnp.exp(jnp.where(seen[:, None, None], sums, -jnp.inf))


def _per_token(x_CGhQ: Array) -> Array:
    """To multiply [C, G, Q, h, P] with."""
    return x_CGhQ.swapaxes(2, 3)[..., None]


def _state(b_CGQS: Array, xdt_CGQhP: Array, decay_CGhQ: Array) -> Array:
    """sum over Q of B_q (decay_q dt_q x_q)^T: [C, G, S, h, P]."""
    decayed_CGQhP = xdt_CGQhP * _per_token(decay_CGhQ).astype(xdt_CGQhP.dtype)
    state = _matmul(b_CGQS.swapaxes(2, 3), jax.lax.collapse(decayed_CGQhP, 3))
    return state.reshape(*state.shape[:3], *xdt_CGQhP.shape[3:])


def _faded(state: Array, decay: Array) -> Array:
    """[..., S, h, P] times [..., h]."""
    return state * decay[..., None, :, None]


@jax.custom_vjp
def _matmul(a: Array, b: Array) -> Array:
    """a @ b over leading dims, in the accumulation dtype.

    Gradients are taken in the forms that need no transposed copy of the larger operand, unlike autodiff's.
    """
    return _product(a, b)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=accumulation_dtype(a))


def _matmul_forward(a, b):
    return _product(a, b), (a, b)


def _matmul_backward(residuals, dy):
    a, b = residuals
    dy = dy.astype(a.dtype)
    da, db = _product(dy, b.swapaxes(-1, -2)), _product(a.swapaxes(-1, -2), dy)
    return da.astype(a.dtype), db.astype(b.dtype)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def initial_states(
    decay_ZGh: Float[Array, "Z G h"], state_ZGShP: Float[Array, "Z G S h P"], segments: Segments
) -> Float[Array, "Z G S h P"]:
    """The state that enters each of this rank's stretches, from every stretch's (total decay, final state).

    Stretches compose as (d1, s1) then (d2, s2) = (d1 d2, s1 d2 + s2): an exclusive prefix over the
    2 * context chunks of each row. All-gather up to GATHER_UP_TO ranks (or where ranks are not in lockstep),
    else log2 steps.
    """
    decay, state = (x.reshape(segments.rows, 2, *x.shape[1:]) for x in (decay_ZGh, state_ZGShP))
    gathers = segments.context <= GATHER_UP_TO or not segments.uniform_program
    prefix = _prefix_gathered if gathers else _prefix_in_steps
    return prefix(decay, state, segments).reshape(state_ZGShP.shape)


def _then(first: Pair, second: Pair) -> Pair:
    return first[0] * second[0], _faded(first[1], second[0]) + second[1]


def _prefix_gathered(decay_R2Gh: Array, state_R2GShP: Array, segments: Segments) -> Array:
    context, rank = segments.context, jax.lax.axis_index(segments.axis)
    everything = (jax.lax.all_gather(x, segments.axis, axis=0) for x in (decay_R2Gh, state_R2GShP))
    # Document order: first chunks of ranks 0, 1, ..., then second chunks of ranks ..., 1, 0.
    decay, state = (jnp.concatenate([x[:, :, 0], x[::-1, :, 1]]) for x in everything)

    def step(state: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        return _faded(state, x[0]) + x[1], state

    _, before = jax.lax.scan(step, jnp.zeros_like(state_R2GShP[:, 0]), (decay, state))
    return jnp.stack([before[rank], before[2 * context - 1 - rank]], axis=1)


def _prefix_in_steps(decay_R2Gh: Array, state_R2GShP: Array, segments: Segments) -> Array:
    """Hillis-Steele prefixes, up the ranks for first chunks and down for second ones."""
    context, axis = segments.context, segments.axis
    rank = jax.lax.axis_index(axis)

    def shifted(pair: Pair, distance: int) -> Pair:
        """From `distance` ranks before (negative: after); the identity (1, 0) where there is none."""
        moves = [(r, r + distance) for r in range(context) if 0 <= r + distance < context]
        decay, state = (jax.lax.ppermute(x, axis, moves) for x in pair)
        arrived = (rank - distance >= 0) & (rank - distance < context)
        return jnp.where(arrived, decay, 1), state

    up, down = ((decay_R2Gh[:, i], state_R2GShP[:, i]) for i in (0, 1))
    distance = 1
    while distance < context:
        up, down = _then(shifted(up, distance), up), _then(shifted(down, -distance), down)
        distance *= 2
    # `up` on the last rank covers all first chunks; every rank's second chunk comes after them.
    is_last = rank == context - 1
    first_half = tuple(jax.lax.psum(jnp.where(is_last, x, 0), axis) for x in up)
    return jnp.stack([shifted(up, 1)[1], _then(first_half, shifted(down, -1))[1]], axis=1)
