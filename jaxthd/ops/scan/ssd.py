"""The Mamba2 scan over packed tokens.

Chunked state-space duality (Dao and Gu, 2024) with document resets: inside a scan chunk a masked quadratic
form, between scan chunks a recurrence of states. All decay is summed in float32 over terms of one sign, never
as a difference of two cumulative sums, which rounding can push above 0 before exp.

Over the context axis each rank scans its context chunks from a zero state, and gets its true initial states
by state passing (state_passing.py).

Legend: N tokens, H heads, P head dim, G groups, S state dim, h heads of a group (H = G * h); Z context chunks
on this rank (R rows * context chunks of a row), L tokens of one, c scan chunks of one; C = Z * c scan chunks,
Q tokens of a scan chunk; D tokens whose state is asked for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.backend import RAN_ON_CPU, RAN_ON_GPU
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.contract import ScanBackend, ScanInputs
from jaxthd.ops.scan.decays import Decays, decays_of
from jaxthd.ops.scan.split_documents import (
    Edges,
    Ends,
    entered,
    find_edges,
    put,
    since_start,
    taken,
    through_head,
    through_scan_chunks,
)
from jaxthd.ops.scan.state_passing import DecayMap, faded, initial_states
from jaxthd.packing.segments import Segments


def ssd(inputs: ScanInputs, segments: Segments, *, chunk: int) -> Float[Array, "N H P"]:
    """y_i = C_i . h_i with h_i = exp(dt_i a) h_{i-1} + dt_i x_i B_i^T, h = 0 before each document.

    chunk: tokens of a scan chunk; it changes speed and memory only. Returns the accumulation dtype
    promote(float32, x's).
    """
    return ssd_and_states(inputs, segments, jnp.zeros(0, jnp.int32), chunk=chunk)[0]


BACKEND = ScanBackend("xla", lambda shape, machine: None, ssd, f"{RAN_ON_CPU}; {RAN_ON_GPU}")


def ssd_and_states(
    inputs: ScanInputs, segments: Segments, at_D: Int32[Array, " D"], *, chunk: int
) -> tuple[Float[Array, "N H P"], Float[Array, "D H P S"]]:
    """As ssd; and the state h after each of this rank's tokens at_D, 0 where at_D is -1, to decode on from
    there.

    Both are in the accumulation dtype.
    """
    segments = segments.for_mixers
    own = segments if segments.splits is None else segments.splits.on_rank
    x_NHP, state = inputs.x, inputs.b.shape[-1]
    length = len(x_NHP) // (own.rows * own.context_chunks)
    chunk = min(chunk, length)
    chunks = in_scan_chunks(inputs, own, chunk)
    decays = decays_of(chunks.decay_CGhQ, chunks.positions_CQ)
    state_CGShP = _states_before(chunks, decays, own)
    entered = None
    if segments.splits is not None:
        entered = _Entered.of(inputs, chunks, state_CGShP, segments)
        state_CGShP = entered.states(state_CGShP)
    y_CGQhP = _outputs(chunks, decays, state_CGShP)
    y_ZLHP = y_CGQhP.swapaxes(1, 2).reshape(len(x_NHP) // length, -1, *x_NHP.shape[1:])
    y_NHP = y_ZLHP[:, :length].reshape(x_NHP.shape)
    state_DGShP = _states_after(chunks, decays, state_CGShP, at_D, length)
    state_DHPS = jnp.moveaxis(state_DGShP, 2, -1).reshape(len(at_D), *x_NHP.shape[1:], state)
    return (y_NHP, state_DHPS) if entered is None else entered.added(y_NHP, state_DHPS, at_D, segments)


class ScanChunks(NamedTuple):
    """The scan's inputs by scan chunk. decay: its logarithm, dt a. xdt: x times dt."""

    decay_CGhQ: Array
    xdt_CGQhP: Array
    b_CGQS: Array
    c_CGQS: Array
    positions_CQ: Array


def in_scan_chunks(inputs: ScanInputs, segments: Segments, chunk: int) -> ScanChunks:
    """Each context chunk is filled up to whole scan chunks."""
    x_NHP, dt_NH, a_H, b_NGS, c_NGS = inputs
    n, groups = len(x_NHP), b_NGS.shape[1]
    context_chunks = segments.rows * segments.context_chunks

    def chunked(x: Array) -> Array:
        """[N, G, ...] -> [C, G, Q, ...]."""
        return by_scan_chunk(x, context_chunks, chunk)

    def by_group(x_NH: Array) -> Array:
        """[N, H, ...] -> [N, G, h, ...]."""
        return x_NH.reshape(n, groups, -1, *x_NH.shape[2:])

    positions_CQ = positions_by_scan_chunk(segments, chunk)
    decay_CGhQ = chunked(by_group((dt_NH * a_H).astype(accumulation_dtype(x_NHP)))).swapaxes(2, 3)
    xdt_CGQhP = chunked(by_group(x_NHP * dt_NH[..., None].astype(x_NHP.dtype)))
    return ScanChunks(decay_CGhQ, xdt_CGQhP, chunked(b_NGS), chunked(c_NGS), positions_CQ)


def positions_by_scan_chunk(segments: Segments, chunk: int) -> Int32[Array, "C Q"]:
    """The filling continues the last token's document; with dt = 0 it leaves the state as it is."""
    positions_ZL = segments.positions.reshape(segments.rows * segments.context_chunks, -1)
    padding = -positions_ZL.shape[1] % chunk
    filling_Zp = positions_ZL[:, -1:] + jnp.arange(1, padding + 1, dtype=jnp.int32)
    return jnp.concatenate([positions_ZL, filling_Zp], axis=1).reshape(-1, chunk)


def in_scan_chunk(at_D: Array, length: int, chunk: int) -> tuple[Array, Array]:
    """(scan chunk, place in it) of this rank's tokens at_D. length: tokens of a context chunk."""
    c_D, q_D = jnp.divmod(at_D % length, chunk)
    return c_D + at_D // length * -(-length // chunk), q_D


def by_scan_chunk(x: Array, context_chunks: int, chunk: int) -> Array:
    """[N, G, ...] -> [C, G, Q, ...]; each context chunk is filled up with zeros."""
    x = in_whole_chunks(x, context_chunks, chunk)
    return x.reshape(-1, chunk, *x.shape[1:]).swapaxes(1, 2)


def in_whole_chunks(x: Array, context_chunks: int, chunk: int) -> Array:
    """x [N, ...] with zeros behind each context chunk, up to whole scan chunks; else x itself.

    The backward pass would keep a reshaped x beside x: 2.4 GiB in a step of hybrid-4b on H100s.
    """
    if len(x) // context_chunks % chunk == 0:
        return x
    x = x.reshape(context_chunks, len(x) // context_chunks, *x.shape[1:])
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, *x.shape[2:])


def _states_before(chunks: ScanChunks, decays: Decays, segments: Segments) -> Array:
    """The state before each scan chunk, [C, G, S, h, P]."""
    added_CGShP = _state(chunks.b_CGQS, chunks.xdt_CGQhP, decays.to_end_CGhQ)
    return states_between(DecayMap(decays.from_start_CGhQ[..., -1], added_CGShP), segments)


def states_between(maps: DecayMap, segments: Segments) -> Float[Array, "C G S h P"]:
    """The state before each scan chunk: over the scan chunks of a context chunk, then over ranks.

    maps: what each scan chunk does to the state, leaves [C, ...].
    """

    def next_chunk(before: DecayMap, of_chunk: DecayMap) -> tuple[DecayMap, DecayMap]:
        """(the map up to a scan chunk's end, the one up to its start)."""
        return before.then(of_chunk), before

    def by_context_chunk(x: Array) -> Array:
        """[C, ...] -> [c, Z, ...]."""
        return x.reshape(segments.rows * segments.context_chunks, -1, *x.shape[1:]).swapaxes(0, 1)

    by_chunk = DecayMap(*map(by_context_chunk, maps))
    identity = DecayMap(jnp.ones_like(by_chunk.decay[0]), jnp.zeros_like(by_chunk.added[0]))
    total, (decay_cZGh, state_cZGShP) = jax.lax.scan(next_chunk, identity, by_chunk)
    if segments.context > 1:
        state_cZGShP = state_cZGShP + faded(initial_states(total, segments), decay_cZGh)
    return state_cZGShP.swapaxes(0, 1).reshape(maps.added.shape)


class _Entered(NamedTuple):
    """States that enter context chunks of split documents (split_documents.py), and what they add.

    faded: what is left of such a state before each scan chunk, [C, H].
    """

    edges: Edges
    ends: Ends
    faded: Array
    state_EHSP: Array
    more_EWHP: Array

    @classmethod
    def of(cls, inputs: ScanInputs, chunks: ScanChunks, state_CGShP: Array, segments: Segments) -> "_Entered":
        """state: before each scan chunk, on this rank from zero."""
        x_NHP, dt_NH, a_H, b_NGS, c_NGS = inputs
        chunk, heads = chunks.positions_CQ.shape[1], x_NHP.shape[1:]
        edges = find_edges(segments, chunk, segments.row_length)
        log_decay_NH = (dt_NH * a_H).astype(accumulation_dtype(x_NHP))
        before_EGShP = state_CGShP[edges.last]
        ends = Ends(
            x=taken(x_NHP, edges.tail),
            dt=taken(dt_NH, edges.tail),
            b=taken(b_NGS, edges.tail),
            to_end=taken(log_decay_NH, edges.tail),
            c=taken(c_NGS, edges.head),
            from_start=taken(log_decay_NH, edges.head),
            before=jnp.moveaxis(before_EGShP, 2, 3).reshape(len(before_EGShP), heads[0], -1, heads[1]),
            of_scan_chunks=chunks.decay_CGhQ.sum(-1).reshape(len(state_CGShP), -1),
        )
        state_EHSP, more_EWHP = entered(ends, edges, segments)
        through_EH = through_head(ends, edges)
        faded_CH = through_scan_chunks(ends.of_scan_chunks, edges) * through_EH[edges.reaching]
        return cls(edges, ends, faded_CH, state_EHSP, more_EWHP)

    def states(self, state_CGShP: Array) -> Array:
        """The states before scan chunks, with what is left of those that enter."""
        groups, heads = state_CGShP.shape[1], state_CGShP.shape[3]
        state_EGhSP = self.state_EHSP.reshape(-1, groups, heads, *self.state_EHSP.shape[2:])
        state_EGShP = jnp.moveaxis(state_EGhSP, 2, 3)[self.edges.reaching]
        return state_CGShP + faded(state_EGShP, self.faded.reshape(-1, groups, heads))

    def added(self, y_NHP: Array, state_DHPS: Array, at_D: Array, segments: Segments) -> tuple[Array, Array]:
        """Outputs and states after tokens, with what entering states add to these in the scan chunk where
        their context chunk begins."""
        assert segments.splits is not None
        y_NHP = put(y_NHP, self.edges.head, self.more_EWHP)
        if not len(at_D):
            return y_NHP, state_DHPS
        number_D = segments.splits.chunk_of_token[at_D]
        place_D = at_D - self.edges.head[number_D, 0]
        is_in_head_D = (at_D >= 0) & (number_D >= 0) & (place_D < self.edges.head.shape[1])
        is_in_head_D &= self.edges.head[number_D, jnp.minimum(place_D, self.edges.head.shape[1] - 1)] == at_D
        decay_DH = since_start(self.ends)[number_D, jnp.clip(place_D, 0, self.edges.head.shape[1] - 1)]
        more_DHPS = decay_DH[..., None, None] * self.state_EHSP[number_D].swapaxes(2, 3)
        return y_NHP, state_DHPS + jnp.where(is_in_head_D[:, None, None, None], more_DHPS, 0)


def _outputs(chunks: ScanChunks, decays: Decays, state_CGShP: Array) -> Array:
    """[C, G, Q, h, P]: from the tokens of the scan chunk, and from the state before it."""
    cb_CGQQ = matmul(chunks.c_CGQS, chunks.b_CGQS.swapaxes(2, 3))
    scores_CGhQQ = (cb_CGQQ[:, :, None] * decays.between_CGhQQ).astype(chunks.xdt_CGQhP.dtype)
    y_CGhQP = matmul(scores_CGhQQ, chunks.xdt_CGQhP.swapaxes(2, 3))
    from_state = matmul(chunks.c_CGQS, jax.lax.collapse(state_CGShP.astype(chunks.c_CGQS.dtype), 3))
    from_state_CGQhP = from_state.reshape(chunks.xdt_CGQhP.shape) * _per_token(decays.from_start_CGhQ)
    return y_CGhQP.swapaxes(2, 3) + from_state_CGQhP


def _states_after(chunks: ScanChunks, decays: Decays, state_CGShP: Array, at_D: Array, length: int) -> Array:
    """[D, G, S, h, P]: what a token's scan chunk added up to the token, and what is left of the state before
    it.

    at_D: of this rank's tokens; -1 gives 0. length: tokens of a context chunk.
    """
    c_D, q_D = in_scan_chunk(at_D, length, chunks.positions_CQ.shape[1])
    state_DGShP = _state(chunks.b_CGQS[c_D], chunks.xdt_CGQhP[c_D], decays.between_CGhQQ[c_D, :, :, q_D])
    state_DGShP = state_DGShP + faded(state_CGShP[c_D], decays.from_start_CGhQ[c_D, :, :, q_D])
    return jnp.where((at_D >= 0)[:, None, None, None, None], state_DGShP, 0)


def _per_token(x_CGhQ: Array) -> Array:
    """A factor for [C, G, Q, h, P]."""
    return x_CGhQ.swapaxes(2, 3)[..., None]


def _state(b_CGQS: Array, xdt_CGQhP: Array, decay_CGhQ: Array) -> Array:
    """sum over Q of B_q (decay_q dt_q x_q)^T: [C, G, S, h, P]."""
    decayed_CGQhP = xdt_CGQhP * _per_token(decay_CGhQ).astype(xdt_CGQhP.dtype)
    state = matmul(b_CGQS.swapaxes(2, 3), jax.lax.collapse(decayed_CGQhP, 3))
    return state.reshape(*state.shape[:3], *xdt_CGQhP.shape[3:])


@jax.custom_vjp
def matmul(a: Array, b: Array) -> Array:
    """a @ b over leading dims, in the accumulation dtype.

    Its gradients are products that need no transposed copy of the larger operand; autodiff's would.
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


matmul.defvjp(_matmul_forward, _matmul_backward)
