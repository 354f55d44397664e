"""A diarizer's memory of a recording from chunk to chunk: a queue of the latest outputs of its
embedding, and a cache of earlier ones, the clearest of each speaker.

Sizes change from chunk to chunk, so arrays have room for the most, and their counts go along.

Legend: C outputs of the cache, Q of the queue, P of all that may be in the cache at once, L of a chunk, W of
a window: cache, queue, outputs before the chunk, the chunk, outputs after it. D model dim, S speakers.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.models.front_ends.transcribe.largest import largest
from jaxthd.models.front_ends.transcribe.settings import SpeakerCache


class Memory(NamedTuple):
    """The state between two chunks. What lies behind the counts may be anything.

    cached, queued: how many outputs there are. is_full: whether the cache has been full, so that its outputs
    are out of order, and their probabilities are those that they had then.
    """

    cache: Float[Array, "C D"]
    probabilities: Float[Array, "C S"]
    cached: Int32[Array, ""]
    queue: Float[Array, "Q D"]
    queued: Int32[Array, ""]
    is_full: Bool[Array, ""]

    @classmethod
    def empty(cls, sizes: SpeakerCache, dim: int, speakers: int, dtype: jnp.dtype) -> "Memory":
        """The state before the first chunk."""
        none = jnp.zeros((), jnp.int32)
        cache, probabilities = jnp.zeros((sizes.size, dim), dtype), jnp.zeros((sizes.size, speakers), dtype)
        return cls(cache, probabilities, none, jnp.zeros((sizes.queue, dim), dtype), none, none > 0)

    def at(self, slot_W: Int32[Array, " W"], others_WD: Float[Array, "W D"]) -> Float[Array, "W D"]:
        """The cache, then the queue, at these slots; behind them the others."""
        of_cache = jnp.take(self.cache, slot_W, axis=0, mode="clip")
        of_queue = jnp.take(self.queue, slot_W - self.cached, axis=0, mode="clip")
        is_remembered = (slot_W < self.cached + self.queued)[:, None]
        remembered_WD = jnp.where((slot_W < self.cached)[:, None], of_cache, of_queue)
        return jnp.where(is_remembered, remembered_WD, others_WD)

    def after(
        self,
        chunk_LD: Float[Array, "L D"],
        probabilities_WS: Float[Array, "W S"],
        before: Int32[Array, ""],
        silence_D: Float[Array, " D"],
        sizes: SpeakerCache,
    ) -> "Memory":
        """The state after a whole chunk, of whose window these are the probabilities.

        before: outputs of the window between the queue and the chunk.
        """
        length, size = len(chunk_LD), self.cached + self.queued
        queued = self.queued + length
        moved = jnp.where(
            queued > sizes.queue, jnp.minimum(jnp.maximum(sizes.moved, queued - sizes.queue), queued), 0
        )
        # The queue with the chunk behind it, and their probabilities.
        slot_N = jnp.arange(sizes.queue + length)
        is_old_N1 = (slot_N < self.queued)[:, None]
        queue_ND = jnp.where(
            is_old_N1,
            jnp.take(self.queue, slot_N, axis=0, mode="clip"),
            jnp.take(chunk_LD, slot_N - self.queued, axis=0, mode="clip"),
        )
        where_N = jnp.where(is_old_N1[:, 0], self.cached + slot_N, size + before + slot_N - self.queued)
        queue_NS = jnp.take(probabilities_WS, where_N, axis=0, mode="clip")
        # The cache with what has left the queue behind it.
        slot_P = jnp.arange(sizes.size + len(slot_N))
        is_cached_P1, from_queue_P = (slot_P < self.cached)[:, None], slot_P - self.cached
        stored_CS = jnp.where(self.is_full, self.probabilities, probabilities_WS[: sizes.size])
        cache_PD, cache_PS = (
            jnp.where(
                is_cached_P1,
                jnp.take(own, slot_P, axis=0, mode="clip"),
                jnp.take(moved_in, from_queue_P, axis=0, mode="clip"),
            )
            for own, moved_in in ((self.cache, queue_ND), (stored_CS, queue_NS))
        )
        cached = self.cached + moved
        overflows = cached > sizes.size
        chosen_C = jax.lax.cond(
            overflows, lambda: _kept(cache_PS, cached, sizes), lambda: jnp.arange(sizes.size)
        )
        is_silence_C1 = (chosen_C >= len(slot_P))[:, None]
        taken_CD, taken_CS = (jnp.take(x, chosen_C, axis=0, mode="clip") for x in (cache_PD, cache_PS))
        queue_QD = jnp.take(queue_ND, moved + jnp.arange(sizes.queue), axis=0, mode="clip")
        return Memory(
            cache=jnp.where(is_silence_C1, silence_D, taken_CD),
            probabilities=jnp.where(is_silence_C1, 0, taken_CS),
            cached=jnp.minimum(cached, sizes.size).astype(jnp.int32),
            queue=queue_QD,
            queued=(queued - moved).astype(jnp.int32),
            is_full=self.is_full | overflows,
        )


def _kept(probabilities_PS: Array, count: Array, sizes: SpeakerCache) -> Array:
    """The outputs that stay of so many, [C]: speaker by speaker, each in their order; P for silence.

    An output's score for a speaker is higher the surer it is that this one speaks, and no other. The best of
    each speaker are raised so far that some of them stay, whatever the others' scores are.
    Source: the speaker cache of transformers' Nemotron3Diarization.
    """
    places, speakers = probabilities_PS.shape
    share = sizes.share(speakers)
    is_there_P1 = (jnp.arange(places) < count)[:, None]
    scores_PS = _scores(probabilities_PS, is_there_P1, math.floor(share * sizes.positive_share), sizes)
    is_latest_P1 = (jnp.arange(places) >= sizes.size)[:, None]
    scores_PS = scores_PS + jnp.where(is_latest_P1, sizes.latest_boost, 0)
    for raised, by in ((sizes.strong_share, 2 * math.log(2)), (sizes.weak_share, math.log(2))):
        k = math.floor(share * raised)
        best_SP = jax.vmap(lambda x_P, k=k: largest(x_P, count, k))(scores_PS.T)
        scores_PS = scores_PS + jnp.where(best_SP.T, by, 0)
    # Speaker by speaker, and behind the outputs of each its places for silence.
    width = count + sizes.silence
    slot_F = jnp.arange(speakers * (places + sizes.silence))
    speaker_F, place_F = slot_F // width, slot_F % width
    is_silence_F = place_F >= count
    score_F = jnp.where(
        is_silence_F, jnp.inf, scores_PS.at[place_F, speaker_F].get(mode="fill", fill_value=-jnp.inf)
    )
    is_kept_F = largest(score_F, speakers * width, sizes.size) & (score_F > -jnp.inf)
    (at_C,) = jnp.nonzero(is_kept_F, size=sizes.size, fill_value=len(slot_F))
    return jnp.where(is_silence_F, places, place_F).at[at_C].get(mode="fill", fill_value=places)


def _scores(probabilities_PS: Array, is_there_P1: Array, positive: int, sizes: SpeakerCache) -> Array:
    """Scores of each output and speaker; -inf where it does not speak, or where there is no output. positive:
    with so many positive scores of a speaker, the others are -inf too."""
    least = sizes.least_probability
    log_PS = jnp.log(jnp.maximum(probabilities_PS, least))
    others_PS = jnp.log(jnp.maximum(1 - probabilities_PS, least))
    scores_PS = log_PS - others_PS + others_PS.sum(-1, keepdims=True) - math.log(0.5)
    scores_PS = jnp.where((probabilities_PS > 0.5) & is_there_P1, scores_PS, -jnp.inf)
    is_positive_PS = scores_PS > 0
    has_enough_S = is_positive_PS.sum(0) >= positive
    return jnp.where(~is_positive_PS & has_enough_S, -jnp.inf, scores_PS)
