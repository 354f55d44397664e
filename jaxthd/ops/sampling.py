"""Tokens drawn from logits whose vocabulary may be sharded; the draws are the same on any mesh.

A draw is the highest of logit / temperature plus Gumbel noise, which is distributed as the softmax (Gumbel,
1954). The noise of a vocabulary entry is a function of (document, token number, entry), so each rank makes
the noise of its own shard. top-k and top-p keep all logits from some threshold up. It is found bit by bit, by
halving, from counts and sums over the ranks: a few numbers for each document, whatever k and p are.

Noise and order are float32. Probabilities are of the logits' own dtype.

Legend: n documents, V vocabulary entries of this rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32


class Sampling(NamedTuple):
    """temperature: of the softmax; 0 takes the likeliest token, without a draw.
    top_k: keeps the k likeliest tokens, and those as likely as the last of these; 0 keeps all.
    top_p: of these keeps the likeliest that together have a share p of the probability, and those as likely
        as the last of these; 1 keeps all.
    """

    temperature: Float[Any, ""]
    top_k: Int32[Any, ""]
    top_p: Float[Any, ""]


def make_sampling(temperature: float, top_k: int, top_p: float, dtype: str) -> Sampling:
    """For a model that computes in `dtype`: exact in float64, else float32."""
    real: Any = np.float64 if dtype == "float64" else np.float32
    return Sampling(real(temperature), np.int32(top_k), real(top_p))


class Drawn(NamedTuple):
    """Drawn tokens, and how probable they were; None where only tokens were asked for.

    log_probs: under the softmax at the temperature, over the whole vocabulary.
    drawn_log_probs: under what drew the token: temperature, top_k and top_p; 1 over all entries kept.
    entropies: of the softmax at the temperature, in nats.
    At temperature 0 log_probs and entropies are those of temperature 1, and drawn_log_probs is 0.
    """

    tokens: Int32[Any, "*tokens"]
    log_probs: Float[Any, "*tokens"] | None = None
    drawn_log_probs: Float[Any, "*tokens"] | None = None
    entropies: Float[Any, "*tokens"] | None = None


def likeliest(scores_nV: Float[Array, "n V"], axes: tuple[str, ...]) -> Int32[Array, " n"]:
    """The entry with the highest score; the first of equals. axes: over which the vocabulary is sharded."""
    best_n = jnp.argmax(scores_nV, axis=-1).astype(jnp.int32)
    if not axes:
        return best_n
    best_rn = jax.lax.all_gather(best_n + jax.lax.axis_index(axes) * scores_nV.shape[1], axes)
    winner_n = jnp.argmax(jax.lax.all_gather(scores_nV.max(-1), axes), axis=0)
    return jnp.take_along_axis(best_rn, winner_n[None], axis=0)[0]


def draw(
    logits_nV: Float[Array, "n V"],
    keys_n2: UInt32[Array, "n 2"],
    number: Int32[Array, " n"] | Array | int,
    sampling: Sampling,
    axes: tuple[str, ...],
) -> Drawn:
    """A token for each document, with its log-probabilities and the entropies, in the logits' dtype.

    keys_n2: 64 random bits for each document. number: the token's, from 0; one for all documents, or one for
    each. The order is that of transformers: temperature, then top-k, then top-p.
    """

    def drawn() -> Drawn:
        """Draws from the softmax at the temperature, restricted by top_k and top_p."""
        scaled_nV = _scaled(logits_nV, sampling.temperature, axes)
        kept_nV, noise_nV = kept(scaled_nV, sampling, axes), _noise(keys_n2, number, scaled_nV.shape[1], axes)
        noisy_nV = jnp.where(kept_nV, scaled_nV.astype(jnp.float32) + noise_nV, -jnp.inf)
        tokens_n = likeliest(noisy_nV, axes)
        score_n, lse_n = _entry(scaled_nV, tokens_n, axes), _log_sum(scaled_nV, axes)
        drawn_n = score_n - _log_sum(jnp.where(kept_nV, scaled_nV, -jnp.inf), axes)
        return Drawn(tokens_n, score_n - lse_n, drawn_n, _entropy(scaled_nV, lse_n, axes))

    def likeliest_ones() -> Drawn:
        """Takes the likeliest tokens, with the log-probabilities of temperature 1."""
        below_nV = _scaled(logits_nV, 1, axes)
        lse_n = _log_sum(below_nV, axes)
        return Drawn(
            likeliest(logits_nV, axes), -lse_n, jnp.zeros_like(lse_n), _entropy(below_nV, lse_n, axes)
        )

    return jax.lax.cond(sampling.temperature > 0, drawn, likeliest_ones)


def kept(scaled_nV: Float[Array, "n V"], sampling: Sampling, axes: tuple[str, ...]) -> Bool[Array, "n V"]:
    """Mask of entries that top_k and top_p keep. scaled_nV: logits / temperature, where the highest is 0."""
    order_nV = _order(scaled_nV.astype(jnp.float32))
    none_n = jnp.zeros(len(order_nV), jnp.uint32)

    def total(x_nV: Array) -> Array:
        """Sums over the whole vocabulary, [n]."""
        return jax.lax.psum(x_nV.sum(-1), axes)

    def likeliest_k() -> Array:
        """Orders [n] of the least likely of the top_k likeliest entries."""
        return _highest(lambda from_n: total(order_nV >= from_n[:, None]) >= sampling.top_k, none_n)

    least_n = jax.lax.cond(sampling.top_k > 0, likeliest_k, lambda: none_n)

    def share_p() -> Array:
        """Orders [n] from which on the entries have the share top_p."""
        p_nV = jnp.where(order_nV >= least_n[:, None], jnp.exp(scaled_nV), 0)
        wanted_n = sampling.top_p * total(p_nV)
        return _highest(
            lambda from_n: total(jnp.where(order_nV >= from_n[:, None], p_nV, 0)) >= wanted_n, none_n
        )

    threshold_n = jnp.maximum(least_n, jax.lax.cond(sampling.top_p < 1, share_p, lambda: none_n))
    return order_nV >= threshold_n[:, None]


def _scaled(logits_nV: Array, temperature: Any, axes: tuple[str, ...]) -> Array:
    """logits / temperature, where the highest is 0, in the logits' dtype."""
    # The highest is subtracted first, so that a small temperature makes no infinity.
    below_nV = logits_nV - jax.lax.pmax(logits_nV.max(-1), axes)[:, None]
    return below_nV / jnp.asarray(temperature, below_nV.dtype)


def _entry(x_nV: Array, tokens_n: Array, axes: tuple[str, ...]) -> Array:
    """The tokens' entries, on all ranks."""
    local_n1 = tokens_n[:, None] - jax.lax.axis_index(axes) * x_nV.shape[1]
    is_here_n1 = (local_n1 >= 0) & (local_n1 < x_nV.shape[1])
    found_n1 = jnp.take_along_axis(x_nV, jnp.clip(local_n1, 0, x_nV.shape[1] - 1), axis=1)
    return jax.lax.psum(jnp.where(is_here_n1, found_n1, 0)[:, 0], axes)


def _log_sum(scaled_nV: Array, axes: tuple[str, ...]) -> Array:
    """The log-sum-exp of entries whose highest is 0."""
    return jnp.log(jax.lax.psum(jnp.exp(scaled_nV).sum(-1), axes))


def _entropy(scaled_nV: Array, lse_n: Array, axes: tuple[str, ...]) -> Array:
    log_p_nV = scaled_nV - lse_n[:, None]
    p_nV = jnp.exp(log_p_nV)
    return jax.lax.psum(jnp.where(p_nV > 0, -p_nV * log_p_nV, 0).sum(-1), axes)


def _order(x: Array) -> Array:
    """float32 -> uint32 in the same order; equal values stay equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _highest(holds: Callable[[Array], Array], none_n: Array) -> Array:
    """The highest uint32 [n] for which `holds` is True. It must be True for 0, and for all below one for
    which it is."""

    def one(step: Array, found_n: Array) -> Array:
        """Sets the next lower bit where the condition still holds with it."""
        tried_n = found_n | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(holds(tried_n), tried_n, found_n)

    return jax.lax.fori_loop(0, 32, one, none_n)


def _noise(keys_n2: Array, number: Array | int, size: int, axes: tuple[str, ...]) -> Array:
    """Gumbel noise for this rank's entries, [n, size]."""
    ranks = jax.lax.axis_size(axes)

    def of_document(key: Array, number: Array) -> Array:
        """Noise of the whole vocabulary, the same on every mesh."""
        own = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), number)
        return jax.random.gumbel(own, (ranks * size,), jnp.float32, mode="high")

    numbers_n = jnp.broadcast_to(jnp.asarray(number, jnp.int32), len(keys_n2))
    noise_nW = jax.vmap(of_document)(keys_n2, numbers_n)
    first = jax.lax.axis_index(axes) * size
    return jax.lax.dynamic_slice_in_dim(noise_nW, first, size, axis=1)
