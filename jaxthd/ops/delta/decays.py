"""Decays of the gated delta rule inside scan chunks, 0 across documents: one number for all keys' features of
a head, or one for each of them (Kimi Team, Kimi Linear, 2025).

A decay for each feature stands between the two factors of every product of a token with an earlier one,

    scores_ij = sum over features c of x_ic k_jc exp(sum of decay_c from j + 1 to i),

and no split of it into a factor of i and one of j is safe for all pairs: from the scan chunk's start one of
the two would grow as exp of the decays passed. So pairs are taken by blocks of 1, 2, 4, ... tokens: those of
a block with the one before it have their border between them, and the decays from there to i and from j to
there are both at most 1. Each pair is in one such product, so all of them cost one product of all pairs.
Decays are summed over terms of one sign alone, from each level's sums those of the next, never as
differences.

Legend: as rule.py; S kinds of rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.decays import decays_of, decays_since_start_here, exact_einsum
from jaxthd.ops.scan.prefixes import of_states


class HeadDecays(NamedTuple):
    """One decay for all features of a head. Keys and queries x are [C, G, Q, K]."""

    decay_CGhQ: Array
    positions_CQ: Array
    between_CGhQQ: Array
    to_end_CGhQ: Array
    from_start_CGhQ: Array

    @classmethod
    def of(cls, decay_CGhQ: Float[Array, "C G h Q"], positions_CQ: Int32[Array, "C Q"]) -> "HeadDecays":
        """decay: its logarithm, at most 0. positions: of the tokens in their documents."""
        return cls(decay_CGhQ, positions_CQ, *decays_of(decay_CGhQ, positions_CQ))

    def scores(self, rows: tuple[Array, ...], k_CGQK: Array) -> tuple[Array, ...]:
        """The products of each of `rows` with the same token's and earlier tokens' keys, decayed in between:
        [C, G, h, Q, Q]; 0 across documents, and behind the token."""
        found = (_product("cgqk,cgjk->cgqj", x, k_CGQK) for x in rows)
        return tuple(x_CGQQ[:, :, None] * self.between_CGhQQ for x_CGQQ in found)

    def from_start(self, x_CGQK: Array) -> Array:
        """x decayed from the scan chunk's start, [C, G, h, Q, K]; 0 where the document began in it."""
        return self.from_start_CGhQ[..., None] * x_CGQK[:, :, None]

    def to_end(self, k_CGQK: Array) -> Array:
        """Keys decayed to the scan chunk's end, [C, G, h, Q, K]; 0 where the document ends in it."""
        return k_CGQK[:, :, None] * self.to_end_CGhQ[..., None]

    def answers(self, x_CGQK: Array, state_CGhKV: Array) -> Array:
        """Answers [C, G, h, Q, V] to x of the states before the scan chunks, decayed up to the token."""
        return self.from_start_CGhQ[..., None] * _product("cgqk,cghkv->cghqv", x_CGQK, state_CGhKV)

    @property
    def over_chunk(self) -> Array:
        """Factors of the state over whole scan chunks, [C, G, h, K or 1, 1]."""
        return self.from_start_CGhQ[..., -1, None, None]

    def at(self, k_CGQK: Array, c_D: Array, q_D: Array) -> tuple[Array, Array]:
        """Keys decayed up to the tokens q of scan chunks c, [D, G, h, Q, K]; and the factors of the state
        before the scan chunk up to there, [D, G, h, K or 1, 1]."""
        keys_DGhQK = k_CGQK[c_D][:, :, None] * self.between_CGhQQ[c_D, :, :, q_D][..., None]
        return keys_DGhQK, self.from_start_CGhQ[c_D, :, :, q_D][..., None, None]

    def since_start(self, number_CQ: Int32[Array, "C Q"]) -> "HeadSinceStart":
        """The decays of given states. number: of each token's state, from 1; 0 for none."""
        since_CGhQ = decays_since_start_here(self.decay_CGhQ, self.positions_CQ)
        began_CQ = _began_from_given(number_CQ, self.positions_CQ)
        return HeadSinceStart(jnp.where(began_CQ[:, None, None], since_CGhQ, 0), number_CQ)


class HeadSinceStart(NamedTuple):
    """Decays from before the first token of the document, for tokens whose document began in their scan chunk
    from a given state; else 0. Of HeadDecays."""

    since_CGhQ: Array
    number_CQ: Array

    def answers(self, x_CGQK: Array, state_EHKV: Array) -> Array:
        """Answers [C, G, h, Q, V] to x of the states, decayed up to the token."""
        answers_CGQhV = of_states(x_CGQK, state_EHKV.mT, self.number_CQ)
        return answers_CGQhV.swapaxes(2, 3) * self.since_CGhQ[..., None]

    def at(self, c_D: Array, q_D: Array) -> Array:
        """The factors of the state up to the tokens q of scan chunks c, [D, G, h, K or 1, 1]."""
        return self.since_CGhQ[c_D, :, :, q_D][..., None, None]


class ChannelDecays(NamedTuple):
    """A decay for each feature of a head's keys."""

    decay_CGhQK: Array
    positions_CQ: Array
    to_end_CGhQK: Array
    from_start_CGhQK: Array

    @classmethod
    def of(cls, decay_CGhQK: Float[Array, "C G h Q K"], positions_CQ: Int32[Array, "C Q"]) -> "ChannelDecays":
        """decay: its logarithm, at most 0. positions: of the tokens in their documents."""
        tokens = positions_CQ.shape[1]
        *_, (before, behind) = _sums_by_level(_filled(decay_CGhQK))
        i = jnp.arange(tokens)
        began_before_CQ = positions_CQ > i
        goes_on_CQ = tokens - 1 - i <= positions_CQ[:, -1:]

        def decays(sums_CGhQK: Array, seen_CQ: Array) -> Array:
            """exp of the sums, 0 where the token is not seen."""
            sums_CGhQK = sums_CGhQK[..., :tokens, :]
            return jnp.exp(jnp.where(seen_CQ[:, None, None, :, None], sums_CGhQK, -jnp.inf))

        return cls(decay_CGhQK, positions_CQ, decays(behind, goes_on_CQ), decays(before, began_before_CQ))

    def scores(self, rows: tuple[Array, ...], k_CGQK: Array) -> tuple[Array, ...]:
        """As HeadDecays.scores."""
        i = jnp.arange(self.positions_CQ.shape[1])
        same_CQQ = (i[:, None] >= i) & (i[:, None] - i <= self.positions_CQ[..., None])
        scores_SCGhQQ = _decayed_scores(jnp.stack(rows), k_CGQK, self.decay_CGhQK)
        return tuple(jnp.where(same_CQQ[:, None, None], x_CGhQQ, 0) for x_CGhQQ in scores_SCGhQQ)

    def from_start(self, x_CGQK: Array) -> Array:
        """As HeadDecays.from_start."""
        return self.from_start_CGhQK * x_CGQK[:, :, None]

    def to_end(self, k_CGQK: Array) -> Array:
        """As HeadDecays.to_end."""
        return self.to_end_CGhQK * k_CGQK[:, :, None]

    def answers(self, x_CGQK: Array, state_CGhKV: Array) -> Array:
        """As HeadDecays.answers."""
        own_CGhQK = self.from_start(x_CGQK).astype(x_CGQK.dtype)
        return _product("cghqk,cghkv->cghqv", own_CGhQK, state_CGhKV)

    @property
    def over_chunk(self) -> Array:
        """As HeadDecays.over_chunk."""
        return self.from_start_CGhQK[..., -1, :, None]

    def at(self, k_CGQK: Array, c_D: Array, q_D: Array) -> tuple[Array, Array]:
        """As HeadDecays.at."""
        i, decay_DGhQK = jnp.arange(self.positions_CQ.shape[1]), self.decay_CGhQK[c_D]
        is_past_DQQ = (i > i[:, None]) & (i <= q_D[:, None, None])
        sums_DGhQK = exact_einsum("dghtk,djt->dghjk", decay_DGhQK, is_past_DQQ.astype(decay_DGhQK.dtype))
        ago_DQ = q_D[:, None] - i
        seen_DQ = (ago_DQ >= 0) & (ago_DQ <= self.positions_CQ[c_D, q_D][:, None])
        between = jnp.exp(jnp.where(seen_DQ[:, None, None, :, None], sums_DGhQK, -jnp.inf))
        return k_CGQK[c_D][:, :, None] * between, self.from_start_CGhQK[c_D, :, :, q_D][..., None]

    def since_start(self, number_CQ: Int32[Array, "C Q"]) -> "ChannelSinceStart":
        """As HeadDecays.since_start."""
        i = jnp.arange(self.positions_CQ.shape[1])
        counted_CQQ = (i[:, None] >= i) & (i[:, None] - i <= self.positions_CQ[..., None])
        counted_CQQ = counted_CQQ.astype(self.decay_CGhQK.dtype)
        since_CGhQK = jnp.exp(exact_einsum("cghtk,cqt->cghqk", self.decay_CGhQK, counted_CQQ))
        began_CQ = _began_from_given(number_CQ, self.positions_CQ)
        return ChannelSinceStart(jnp.where(began_CQ[:, None, None, :, None], since_CGhQK, 0), number_CQ)


class ChannelSinceStart(NamedTuple):
    """Decays as HeadSinceStart has them, of each feature (ChannelDecays.since_start)."""

    since_CGhQK: Array
    number_CQ: Array

    def answers(self, x_CGQK: Array, state_EHKV: Array) -> Array:
        """As HeadSinceStart.answers. Each value head has keys of its own here."""
        own_CGhQK = (self.since_CGhQK * x_CGQK[:, :, None]).astype(x_CGQK.dtype)
        answers_CHQ1V = of_states(jax.lax.collapse(own_CGhQK, 1, 3), state_EHKV.mT, self.number_CQ)
        return answers_CHQ1V[..., 0, :].reshape(*own_CGhQK.shape[:-1], -1)

    def at(self, c_D: Array, q_D: Array) -> Array:
        """As HeadSinceStart.at."""
        return self.since_CGhQK[c_D, :, :, q_D][..., None]


DeltaDecays = HeadDecays | ChannelDecays
SinceStart = HeadSinceStart | ChannelSinceStart


def _began_from_given(number_CQ: Array, positions_CQ: Array) -> Array:
    """Whether the token's document began in its scan chunk, from a given state, [C, Q]."""
    return (positions_CQ <= jnp.arange(positions_CQ.shape[1])) & (number_CQ > 0)


def _filled(x: Array) -> Array:
    """x [..., Q, K] with zeros behind its tokens up to a power of two of them."""
    tokens = x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, (1 << (tokens - 1).bit_length()) - tokens), (0, 0)])


def _halves(x: Array, rows: int) -> tuple[Array, Array]:
    """The first and the second halves [..., runs, rows, K] of runs of 2 * rows tokens of x [..., Q, K]."""
    pairs = x.reshape(*x.shape[:-2], -1, 2, rows, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _sums_by_level(decay: Array) -> Iterator[tuple[Array, Array]]:
    """For blocks of 1, 2, 4, ... of the tokens: the sums of decay from the block's start to each token, the
    token included; and behind the token to the block's end, without it. Both [..., Q, K]."""
    before, behind, rows = decay, jnp.zeros_like(decay), 1
    yield before, behind
    while rows < decay.shape[-2]:
        (first, second), (first_behind, second_behind) = _halves(before, rows), _halves(behind, rows)
        first_behind = first_behind + second[..., -1:, :]
        second = second + first[..., -1:, :]
        before = jnp.stack([first, second], axis=-3).reshape(decay.shape)
        behind = jnp.stack([first_behind, second_behind], axis=-3).reshape(decay.shape)
        rows *= 2
        yield before, behind


# What it computes on the way is twice as much as all else that a layer keeps.
@jax.checkpoint
def _decayed_scores(x_SCGQK: Array, k_CGQK: Array, decay_CGhQK: Array) -> Array:
    """[S, C, G, h, Q, Q], of pairs of a token and itself or an earlier one; 0 for others."""
    tokens, dtype, heads = k_CGQK.shape[-2], k_CGQK.dtype, decay_CGhQK.shape[:3]

    def merged(x: Array, first: int, *between: int) -> Array:
        """C and G as one dim, from dim `first` on: on a CPU jaxlib 0.10.2 crashes in sums over arrays of
        seven dims (YNNPACK's)."""
        return _filled(x.reshape(*x.shape[:first], -1, *between, *x.shape[-2:]))

    decay = merged(decay_CGhQK, 0, heads[2])
    x, k = merged(x_SCGQK, 1, 1), merged(k_CGQK, 0, 1)
    own = (x.astype(decay.dtype) * k.astype(decay.dtype)).sum(-1)
    found = jnp.broadcast_to(own, (len(x), *decay.shape[:-1]))[..., None, None]
    rows = 1
    for before, behind in _sums_by_level(decay):
        if rows == decay.shape[-2]:
            break
        later = (_halves(x, rows)[1] * jnp.exp(_halves(before, rows)[1])).astype(dtype)
        earlier = (_halves(k, rows)[0] * jnp.exp(_halves(behind, rows)[0])).astype(dtype)
        joining = _product("s...qk,...jk->s...qj", later, earlier)
        first, second = found[..., ::2, :, :], found[..., 1::2, :, :]
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found = jnp.concatenate([above, jnp.concatenate([joining, second], axis=-1)], axis=-2)
        rows *= 2
    return found[..., 0, :tokens, :tokens].reshape(len(x), *heads, tokens, tokens)


def _product(spec: str, a: Array, b: Array) -> Array:
    """einsum of both in a's dtype, the compute dtype; in the accumulation dtype."""
    return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=accumulation_dtype(a))
