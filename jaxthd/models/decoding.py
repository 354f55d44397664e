"""Greedy decoding after the prompts of a packed batch, in one program of fixed shape.

Prefill is the model's own forward pass over the packed buffer; prompts' keys and values stay in it. Each
context rank then decodes its share of the documents by itself: no collective is in the loop.

Legend: R rows on this rank, T tokens of a row on this rank, n documents of this rank, m most new tokens,
D model dim, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.cross_entropy import supervised_scores
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import Now, PromptEnds, make_prompts


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
    config = model.config
    x_ND, segments, _ = model.embed(batch, axes=axes, train=False)
    prompts = make_prompts(ends, segments, new_tokens)
    h_ND, caches = model.decoder.prefill(x_ND, segments, prompts)
    head_VD = model.head[...].astype(h_ND.dtype)
    log_probs_N, correct_N = supervised_scores(
        h_ND,
        head_VD,
        batch.targets.reshape(-1),
        batch.weights.reshape(-1) > 0,
        config.loss_block,
        config.vocab_block,
    )

    shape = batch.tokens.shape
    tokens_nm = jnp.full((prompts.documents, new_tokens), end_id, jnp.int32)
    if not new_tokens:
        return Answered(log_probs_N.reshape(shape), correct_N.reshape(shape), tokens_nm)

    def likeliest(h_nD: Array) -> Array:
        logits_nV = jnp.einsum("nd,vd->nv", h_nD, head_VD, preferred_element_type=accumulation_dtype(h_nD))
        return jnp.argmax(logits_nV, axis=-1).astype(jnp.int32)

    last_nD = prompts.share(jnp.where((prompts.at >= 0)[:, None], h_ND[prompts.at], 0), segments)
    active_n = prompts.keys.hi > 0

    def go_on(carry: tuple) -> Array:
        number, active_n, *_ = carry
        return (number < new_tokens) & active_n.any()

    def step(carry: tuple) -> tuple:
        number, active_n, token_n, tokens_nm, caches = carry
        tokens_nm = tokens_nm.at[:, number].set(jnp.where(active_n, token_n, end_id))
        active_n &= token_n != end_id
        x_nD = jnp.take(model.embedding[...], token_n, axis=0).astype(config.dtype)
        h_nD, caches = model.decoder.step(x_nD, caches, Now(prompts, number, active_n))
        return number + 1, active_n, likeliest(h_nD), tokens_nm, caches

    *_, tokens_nm, _ = jax.lax.while_loop(
        go_on, step, (jnp.int32(0), active_n, likeliest(last_nD), tokens_nm, caches)
    )
    return Answered(log_probs_N.reshape(shape), correct_N.reshape(shape), tokens_nm)
