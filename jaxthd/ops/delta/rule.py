"""The gated delta rule over packed tokens (Yang et al., Gated Delta Networks, 2024), as in Qwen3-Next.

The state S of a head, [key dim, value dim], is 0 before each document. A token with key k, value v, query q,
decay g <= 0 and rate b writes what the decayed state does not yet answer to its key, and is answered itself:

    S <- exp(g) S;   u = b (v - S^T k);   S <- S + k u^T;   y = S^T q

A decay is one number a head, or one for each feature of its keys (Kimi Team, Kimi Linear, 2025).

In chunks: inside a scan chunk the u depend on one another by a unit triangular system (the WY form; Yang et
al., DeltaNet, 2024), solved for all tokens at once. Between scan chunks runs a recurrence of states. Only
ops/delta/decays.py knows which kind the decays are of. What context ranks exchange is as in Mamba2's scan
(ops/scan/state_passing.py): what a context chunk does to the state that enters it is an affine map, here
with a matrix a head.

A document that continues a prefix (packing/prefixes.py) starts from the state at the prefix's end. So the
rule runs twice: as if all documents stood alone, which gives these states, and again from them.

Legend: N tokens, H value heads, G key heads, h value heads of a key head (H = G * h), K key dim, V value dim;
Z context chunks on this rank, L tokens of one, C scan chunks, Q tokens of one, c scan chunks of a context
chunk; D tokens whose state is asked for; E states that documents start from.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.delta.decays import ChannelDecays, DeltaDecays, HeadDecays, SinceStart
from jaxthd.ops.delta.unit_triangular import inverse_of_unit_lower
from jaxthd.ops.numerics import accumulation_dtype, exact_product
from jaxthd.ops.scan.prefixes import numbers_by_scan_chunk
from jaxthd.ops.scan.ssd import by_scan_chunk, in_scan_chunk, positions_by_scan_chunk
from jaxthd.ops.scan.state_passing import MatrixMap, initial_states
from jaxthd.packing.segments import Segments


class DeltaInputs(NamedTuple):
    """Inputs of the rule. q, k, v in the compute dtype, decay (a logarithm, at most 0; of a head, or of each
    feature of its keys) and rate in the accumulation dtype promote(float32, q's). Value head i has the key
    head i // (H / G).
    """

    q: Float[Array, "N G K"]
    k: Float[Array, "N G K"]
    v: Float[Array, "N H V"]
    decay: Float[Array, "N H *K"]
    rate: Float[Array, "N H"]


class Given(NamedTuple):
    """States that documents start from, in place of 0. of_token: the number of its document's state; -1 for
    none.
    """

    state: Float[Array, "E H K V"]
    of_token: Int32[Array, " N"]


def gated_delta_rule(
    inputs: DeltaInputs,
    segments: Segments,
    at_D: Int32[Array, " D"] | None = None,
    *,
    chunk: int,
    given: Given | None = None,
) -> tuple[Float[Array, "N H V"], Float[Array, "D H K V"]]:
    """y of every token; and the state S after each of this rank's tokens at_D, 0 where at_D is -1, to decode
    on from there. Both are in the accumulation dtype, and differentiable.

    chunk: tokens of a scan chunk; it changes speed and memory only. given: in place of segments.prefixes.
    No document is split; for such: ops/delta/split_documents.py.
    """
    at_D = jnp.zeros(0, jnp.int32) if at_D is None else at_D
    length = len(inputs.v) // (segments.rows * segments.context_chunks)
    chunk = min(chunk, length)
    chunks = _in_scan_chunks(inputs, segments, chunk)
    decays = _decays(chunks)
    kk_CGhQQ, qk_CGhQQ = decays.scores((chunks.k_CGQK, chunks.q_CGQK), chunks.k_CGQK)
    system = _system(chunks, decays, kk_CGhQQ)

    def run(entering: _Entering | None, at_D: Array) -> tuple[Array, Array]:
        """y [C, G, h, Q, V], and the states [D, H, K, V] after the tokens `at_D`."""
        written_CGhQV = _written_from_zero(chunks, system, entering)
        state_CGhKV = _states_before(chunks, decays, system, written_CGhQV, entering, segments)
        read = _product("cghqk,cghkv->cghqv", system.reads_CGhQK, state_CGhKV, inputs.k.dtype)
        written_CGhQV = written_CGhQV - read
        y_CGhQV = _product("cghqj,cghjv->cghqv", qk_CGhQQ, written_CGhQV, inputs.q.dtype)
        y_CGhQV = y_CGhQV + decays.answers(chunks.q_CGQK, state_CGhKV)
        y_CGhQV = y_CGhQV if entering is None else y_CGhQV + entering.of_queries_CGhQV
        place = in_scan_chunk(at_D, length, chunk)
        state_DGhKV = _states_after(chunks, decays, written_CGhQV, state_CGhKV, entering, *place)
        state_DGhKV = jnp.where((at_D >= 0)[:, None, None, None, None], state_DGhKV, 0)
        return y_CGhQV, jax.lax.collapse(state_DGhKV, 1, 3)

    if given is None and segments.prefixes is not None:
        _, state_EHKV = run(None, segments.local_index(segments.prefixes.last))
        if segments.context > 1:
            state_EHKV = jax.lax.psum(state_EHKV, segments.axis)
        given = Given(state_EHKV, segments.prefixes.of_token)
    entering = None
    if given is not None:
        number_CQ = numbers_by_scan_chunk(given.of_token, segments, chunk)
        entering = _entering(chunks, decays, given.state, number_CQ)
    y_CGhQV, state_DHKV = run(entering, at_D)
    y_ZLHV = jnp.moveaxis(y_CGhQV, 3, 1).reshape(len(inputs.v) // length, -1, *inputs.v.shape[1:])
    return y_ZLHV[:, :length].reshape(inputs.v.shape), state_DHKV


class _Chunks(NamedTuple):
    """The inputs by scan chunk."""

    q_CGQK: Array
    k_CGQK: Array
    v_CGhQV: Array
    decay: Array
    rate_CGhQ: Array
    positions_CQ: Array


class _System(NamedTuple):
    """(1 + lower) u = rate (what a token would write by itself), of each scan chunk.

    lower: what a token's u takes from those of earlier tokens of its document, strictly lower triangular.
    inverse: of 1 + lower. reads: the solution for what tokens take from the state before the scan chunk.
    Both in the accumulation dtype.
    """

    inverse_CGhQQ: Array
    reads_CGhQK: Array

    def solved(self, right_CGhQX: Array) -> Array:
        """u [C, G, h, Q, X] of this right side, at full precision."""
        return exact_product(self.inverse_CGhQQ, right_CGhQX)


class _Entering(NamedTuple):
    """For tokens whose document began in their scan chunk, from a given state: what this state, decayed up to
    the token, answers to their keys and queries; and that state decayed to the scan chunk's end, if the last
    document is such a one. Else 0.
    """

    of_keys_CGhQV: Array
    of_queries_CGhQV: Array
    since: SinceStart
    state_EGhKV: Array
    number_CQ: Array

    def states(self, c_D: Array, q_D: Array) -> Array:
        """States decayed up to the tokens q of scan chunks c, [D, G, h, K, V]."""
        number_D = jnp.maximum(self.number_CQ[c_D, q_D] - 1, 0)
        return self.since.at(c_D, q_D) * self.state_EGhKV[number_D]


def _in_scan_chunks(inputs: DeltaInputs, segments: Segments, chunk: int) -> _Chunks:
    """The filling has decay 0 and rate 0, which leaves the state as it is."""
    context_chunks, groups = segments.rows * segments.context_chunks, inputs.k.shape[1]

    def by_value_head(x_NH: Array) -> Array:
        """[N, H, ...] -> [C, G, h, Q, ...]."""
        grouped = x_NH.reshape(len(x_NH), groups, -1, *x_NH.shape[2:])
        return by_scan_chunk(grouped, context_chunks, chunk).swapaxes(2, 3)

    return _Chunks(
        q_CGQK=by_scan_chunk(inputs.q, context_chunks, chunk),
        k_CGQK=by_scan_chunk(inputs.k, context_chunks, chunk),
        v_CGhQV=by_value_head(inputs.v),
        decay=by_value_head(inputs.decay),
        rate_CGhQ=by_value_head(inputs.rate),
        positions_CQ=positions_by_scan_chunk(segments, chunk),
    )


def _decays(chunks: _Chunks) -> DeltaDecays:
    if chunks.decay.ndim == chunks.rate_CGhQ.ndim:
        return HeadDecays.of(chunks.decay, chunks.positions_CQ)
    return ChannelDecays.of(chunks.decay, chunks.positions_CQ)


def _system(chunks: _Chunks, decays: DeltaDecays, kk_CGhQQ: Array) -> _System:
    """kk: the decayed products of keys."""
    inverse_CGhQQ = inverse_of_unit_lower(chunks.rate_CGhQ[..., None] * kk_CGhQQ)
    reads_CGhQK = chunks.rate_CGhQ[..., None] * decays.from_start(chunks.k_CGQK)
    return _System(inverse_CGhQQ, exact_product(inverse_CGhQQ, reads_CGhQK))


def _entering(chunks: _Chunks, decays: DeltaDecays, state_EHKV: Array, number_CQ: Array) -> _Entering:
    """number: of each token's state, from 1; 0 for none."""
    since = decays.since_start(number_CQ)
    of_keys, of_queries = (since.answers(x_CGQK, state_EHKV) for x_CGQK in (chunks.k_CGQK, chunks.q_CGQK))
    groups = chunks.k_CGQK.shape[1]
    state_EGhKV = state_EHKV.reshape(len(state_EHKV), groups, -1, *state_EHKV.shape[2:])
    return _Entering(of_keys, of_queries, since, state_EGhKV, number_CQ)


def _written_from_zero(chunks: _Chunks, system: _System, entering: _Entering | None) -> Array:
    """u where the state before the scan chunk is 0, [C, G, h, Q, V]."""
    own_CGhQV = chunks.v_CGhQV.astype(chunks.rate_CGhQ.dtype)
    if entering is not None:
        own_CGhQV = own_CGhQV - entering.of_keys_CGhQV
    return system.solved(chunks.rate_CGhQ[..., None] * own_CGhQV)


class _Step(NamedTuple):
    """A scan chunk's map of the state: decay state + keys^T (written - reads state) + entering."""

    decay_ZGhK1: Array
    keys_ZGhQK: Array
    reads_ZGhQK: Array
    written_ZGhQV: Array
    entering_ZGhKV: Array | None

    def on(self, state_ZGhKW: Array) -> Array:
        """The state after the scan chunk. W: V, or V + K (_states_before)."""
        more = state_ZGhKW.shape[-1] - self.written_ZGhQV.shape[-1]
        read = _product("zghqk,zghkw->zghqw", self.reads_ZGhQK, state_ZGhKW, self.keys_ZGhQK.dtype)
        written = _widened(self.written_ZGhQV, more) - read
        added = _product("zghqk,zghqw->zghkw", self.keys_ZGhQK, written, self.keys_ZGhQK.dtype)
        added = self.decay_ZGhK1 * state_ZGhKW + added
        return added if self.entering_ZGhKV is None else added + _widened(self.entering_ZGhKV, more)


def _widened(x: Array, columns: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)]) if columns else x


def _states_before(
    chunks: _Chunks,
    decays: DeltaDecays,
    system: _System,
    written_CGhQV: Array,
    entering: _Entering | None,
    segments: Segments,
) -> Array:
    """The state before each scan chunk, [C, G, h, K, V]: over the scan chunks of a context chunk, then over
    ranks.

    With several ranks the map of the scan chunks so far is carried along: K more columns beside the state,
    which begin as the identity and to which nothing is written.
    """
    scan_chunks, tokens = chunks.positions_CQ.shape
    everywhere, last = jnp.arange(scan_chunks), jnp.full(scan_chunks, tokens - 1)
    of_chunk = _Step(
        decays.over_chunk,
        decays.to_end(chunks.k_CGQK).astype(chunks.k_CGQK.dtype),
        system.reads_CGhQK,
        written_CGhQV,
        None if entering is None else entering.states(everywhere, last),
    )

    def by_context_chunk(x: Array) -> Array:
        """[C, ...] -> [c, Z, ...]."""
        return x.reshape(segments.rows * segments.context_chunks, -1, *x.shape[1:]).swapaxes(0, 1)

    def next_chunk(state: Array, step: _Step) -> tuple[Array, Array]:
        """(the state after a scan chunk, the one before it)."""
        return step.on(state), state

    steps = jax.tree.map(by_context_chunk, of_chunk)
    _, context_chunks, *heads, _, value_dim = steps.written_ZGhQV.shape
    key_dim = chunks.k_CGQK.shape[-1]
    zero = jnp.zeros((context_chunks, *heads, key_dim, value_dim), written_CGhQV.dtype)
    if segments.context == 1:
        before_cZGhKV = jax.lax.scan(next_chunk, zero, steps)[1]
    else:
        identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=zero.dtype), (*zero.shape[:-1], key_dim))
        total, before = jax.lax.scan(next_chunk, jnp.concatenate([zero, identity], axis=-1), steps)
        first = initial_states(MatrixMap(total[..., value_dim:], total[..., :value_dim]), segments)
        before_cZGhKV = MatrixMap(before[..., value_dim:], before[..., :value_dim]).on(first)
    return before_cZGhKV.swapaxes(0, 1).reshape(scan_chunks, *before_cZGhKV.shape[2:])


def _states_after(
    chunks: _Chunks,
    decays: DeltaDecays,
    written_CGhQV: Array,
    state_CGhKV: Array,
    entering: _Entering | None,
    c_D: Array,
    q_D: Array,
) -> Array:
    """[D, G, h, K, V], after the tokens q of scan chunks c."""
    keys_DGhQK, factor_DGhK1 = decays.at(chunks.k_CGQK, c_D, q_D)
    state_DGhKV = _product("dghqk,dghqv->dghkv", keys_DGhQK, written_CGhQV[c_D], chunks.k_CGQK.dtype)
    state_DGhKV += factor_DGhK1 * state_CGhKV[c_D]
    return state_DGhKV if entering is None else state_DGhKV + entering.states(c_D, q_D)


def _product(spec: str, a: Array, b: Array, dtype: Any) -> Array:
    """einsum of both in `dtype`, the compute dtype; in the accumulation dtype."""
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(spec, a, b, preferred_element_type=accumulation_dtype(a))
