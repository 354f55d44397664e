"""Greedy decoding after the prompts of a packed batch, in one program of fixed shape.

Prefill is the model's own forward pass over the packed buffer; prompts' keys and values stay in it. Each
context rank then decodes its share of the documents. A pipeline's stages take turns, token by token.

Legend: R rows on this rank, T tokens of a row on this rank, n documents of this rank, m most new tokens,
D model dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.mesh import PIPELINE
from jaxthd.models.hybrid import Cache
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import Now, PromptEnds, make_prompts
from jaxthd.parallel.params import DECODER_SPREAD
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import psum_live


class Answered(NamedTuple):
    """log_probs: of every position's target, 0 where weights is 0. correct: no token was likelier.

    tokens: what was decoded for each document, its end mark included, filled up with the end mark.
    """

    log_probs: Float[Array, "R T"]
    correct: Bool[Array, "R T"]
    tokens: Int32[Array, "n m"]


def answer(
    model: SpeechLM, batch: Batch, ends: PromptEnds, *, end_id: int, new_tokens: int, axes: tuple[str, ...]
) -> Answered:
    """Scores the batch as it is, and decodes an answer to every prompt: the likeliest token, one by one.

    ends: rows of this rank. end_id: the token that ends an answer. axes: as SpeechLM.log_probs.
    """
    stages = model.decoder.stages
    x_nD, _ = model.enter(batch, axes=axes, train=False)
    segments = model.segments(batch, axes, lockstep=stages.are_equal)
    prompts = make_prompts(ends, segments, new_tokens)

    def prefill(pattern: str, chunk: Array | int, x_nD: Array, _: None) -> tuple[Array, Cache]:
        return model.decoder.prefill(pattern, chunk, x_nD, segments, prompts)

    x_nD, caches = _through_all_stages(stages, prefill, x_nD, None)
    h_ND = model.hidden(x_nD)
    log_probs_N, correct_N = model.scores(h_ND, batch)

    shape = batch.tokens.shape
    tokens_nm = jnp.full((prompts.documents, new_tokens), end_id, jnp.int32)
    if not new_tokens:
        return Answered(log_probs_N.reshape(shape), correct_N.reshape(shape), tokens_nm)

    last_nD = prompts.share(jnp.where((prompts.at >= 0)[:, None], h_ND[prompts.at], 0), segments)
    active_n = prompts.keys.hi > 0

    def any_active(active_n: Array) -> Array:
        """Layers and experts that lie over ranks are used by all of these as long as one has use for them."""
        return psum_live(active_n.sum(), DECODER_SPREAD, model.mesh) > 0

    def step(carry: tuple) -> tuple:
        number, _, active_n, token_n, tokens_nm, caches = carry
        tokens_nm = tokens_nm.at[:, number].set(jnp.where(active_n, token_n, end_id))
        active_n &= token_n != end_id
        now = Now(prompts, number, active_n)

        def through(pattern: str, chunk: Array | int, x_nD: Array, cache: Cache) -> tuple[Array, Cache]:
            return model.decoder.step(pattern, chunk, x_nD, cache, now)

        x_nD, caches = _through_all_stages(stages, through, model.embed_tokens(token_n), caches)
        next_n = model.likeliest(model.decoder.norm(x_nD))
        return number + 1, any_active(active_n), active_n, next_n, tokens_nm, caches

    start = (jnp.int32(0), any_active(active_n), active_n, model.likeliest(last_nD), tokens_nm, caches)
    *_, tokens_nm, _ = jax.lax.while_loop(lambda carry: (carry[0] < new_tokens) & carry[1], step, start)
    return Answered(log_probs_N.reshape(shape), correct_N.reshape(shape), tokens_nm)


def _through_all_stages(
    stages: Stages,
    run: Callable[[str, Array | int, Array, Any], tuple[Array, Cache]],
    x_nD: Array,
    caches: Any,
) -> tuple[Array, Any]:
    """run(pattern, chunk, x, cache) -> (x, cache) for one stage after the other; x ends on all ranks.

    caches: of this rank's stages, leaves [chunks, ...]; None before there are any.
    """
    if len(stages.patterns) == 1:
        cache = None if caches is None else jax.tree.map(lambda c: c[0], caches)
        x_nD, cache = run(stages.patterns[0], 0, x_nD, cache)
        return x_nD, jax.tree.map(lambda c: c[None], cache)
    rank, has_caches = jax.lax.axis_index(PIPELINE), caches is not None
    if not has_caches:
        like = jax.eval_shape(lambda x: run(stages.patterns[0], 0, x, None)[1], x_nD)
        caches = jax.tree.map(lambda c: jnp.zeros((stages.chunks, *c.shape), c.dtype), like)

    def one(carry: tuple[Array, Any], stage: Array) -> tuple[tuple[Array, Any], None]:
        x_nD, caches = carry
        chunk, mine = stage // stages.ranks, rank == stage % stages.ranks
        cache = jax.tree.map(lambda c: c[chunk], caches)

        def turn() -> tuple[Array, Cache]:
            taken = cache if has_caches else None
            return stages.switch(lambda pattern: run(pattern, chunk, x_nD, taken), chunk)

        y_nD, new = turn() if stages.are_equal else jax.lax.cond(mine, turn, lambda: (x_nD, cache))
        new = jax.tree.map(lambda a, b: jnp.where(mine, a, b), new, cache)
        caches = jax.tree.map(lambda all_, c: all_.at[chunk].set(c), caches, new)
        return (jax.lax.psum(jnp.where(mine, y_nD, 0), PIPELINE), caches), None

    (x_nD, caches), _ = jax.lax.scan(one, (x_nD, caches), jnp.arange(len(stages.patterns)))
    return x_nD, caches
