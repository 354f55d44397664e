"""Drafts tokens for decoding, with depth 0 of multi-token prediction.

Each drafted token comes from depth 0's output and the token before, at first from the decoder's output (as
EAGLE, Li et al., 2024, and vLLM apply it). Decoding then gives the decoder the newest token and these in one
pass, and draws a token after each (models/decoding.py). A drafted token is accepted if all before it are, and
if it is the one that was drawn there. So what is decoded does not depend on the drafts: at a temperature too,
because a draw is a function of the logits and of random numbers that belong to the token's number
(ops/sampling.py). Drafts take these random numbers too, and so are likely to be the same (Daliri et al.,
Coupling without Communication and Drafter-Invariant Speculative Decoding, 2024).

Legend: n documents of this rank, S drafted tokens, L = 1 + S tokens of a step, D model dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.models.hybrid import Cache
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import Now, PromptEnds, Prompts, make_prompts

Pick = Callable[[Array, Array], Drawn]
"""(the head's input [n * L, D], document after document; the numbers, from 0, of the tokens to draw) -> the
tokens, leaves [n * L]."""
StepOf = Callable[[Int32[Array, " n"], int, Int32[Array, " n"]], Now]
"""(the first token's number, the tokens of each document, Now.accepted) -> a step of depth 0."""


class Drafts(NamedTuple):
    """The state of drafting.

    tokens: the drafted ones, which follow Decoding.next. accepted: of the last step's L tokens, the number of
    the last that was accepted: the state after it holds. fixed, state: of depth 0, leaves [1, layers, ...].
    checked: on this rank so far, the tokens that were drafted for documents that go on, and how many of these
    were accepted.
    """

    tokens: Int32[Array, "n S"]
    accepted: Int32[Array, " n"]
    fixed: Cache
    state: Cache
    checked: Int32[Array, " 2"]


def require_drafts(model: SpeechLM, batch: Batch) -> int:
    """Returns S. Raises ValueError for drafts without multi-token prediction, or without future tokens."""
    drafted = model.compute.num_speculative_tokens
    if drafted and not (model.mtp is not None and batch.future_tokens.shape[1]):
        raise ValueError(
            f"compute.num_speculative_tokens is {drafted}; expected a model with multi-token prediction, and "
            "a batch with future tokens: pack with depths=1 (Config.depths_drafted_with)"
        )
    return drafted


def prefilled(
    model: SpeechLM,
    batch: Batch,
    ends: PromptEnds,
    prompts: Prompts,
    h_nD: Float[Array, "tokens D"],
    e_nD: Float[Array, "tokens D"],
    axes: tuple[str, ...],
) -> Drafts:
    """Drafts without tokens, after prompts. h: the decoder's output after its final norm. e: embeddings of
    the next tokens. ends, prompts: the decoder's.

    Depth 0 takes the prompts' tokens but the last, after which the first drawn token comes. So its own tokens
    begin one position before the decoder's.
    """
    assert model.mtp is not None
    drafted = prompts.step_tokens - 1
    segments = model.segments_ahead(batch, 0, axes)
    but_last = PromptEnds(ends.first, jnp.where(ends.last > ends.first, ends.last - 1, -1))
    room = prompts.new_tokens + drafted
    own = make_prompts(but_last, segments, room, prompts.places, prompts.step_tokens)
    cache = jax.tree.map(lambda x: x[None], model.mtp.prefill_first(h_nD, e_nD, segments, own))
    fixed, state = ({letter: of_kind[i] for letter, of_kind in cache.items()} for i in range(2))
    none_n = jnp.zeros(prompts.documents, jnp.int32)
    tokens_nS = jnp.zeros((prompts.documents, drafted), jnp.int32)
    return Drafts(tokens_nS, none_n, fixed, state, jnp.zeros(2, jnp.int32))


def drafted_after(
    model: SpeechLM,
    drafts: Drafts,
    step_of: StepOf,
    pick: Pick,
    h: Float[Array, "tokens D"],
    following: Int32[Array, " tokens"],
    number_n: Int32[Array, " n"],
    accepted_n: Int32[Array, " n"],
) -> Drafts:
    """Drafts the tokens after number `number`, which is the newest one.

    h: the head's inputs of the decoder's last step, of L tokens of each document; or at the prompts' ends.
    following: the tokens that were drawn there. accepted: the number of the last accepted one.
    """
    mtp = model.mtp
    assert mtp is not None
    documents, step_tokens = len(accepted_n), 1 + drafts.tokens.shape[1]
    # At the prompts' ends the others are made up, so that the states of all steps have one shape.
    h, following = (jnp.repeat(x, step_tokens * documents // len(x), axis=0) for x in (h, following))
    fixed, state = jax.tree.map(lambda c: c[0], (drafts.fixed, drafts.state))

    def through(h: Array, tokens: Array, state: Any, first_n: Array, before_n: Array) -> tuple[Array, Any]:
        """Depth 0 over tokens from number `first` on. before: `accepted` of the step before."""
        now = step_of(first_n, len(tokens) // documents, before_n)
        return mtp.step_first(h, model.embed_tokens(tokens), fixed, state, now)

    h, state = through(h, following, state, number_n - accepted_n, drafts.accepted)
    tokens, tried = [], state
    h_nD = jnp.take_along_axis(h.reshape(documents, step_tokens, -1), accepted_n[:, None, None], axis=1)[:, 0]
    for ahead in range(1, step_tokens):
        tokens.append(pick(h_nD, number_n + ahead).tokens)
        if ahead < step_tokens - 1:
            h_nD, tried = through(h_nD, tokens[-1], tried, number_n + ahead, accepted_n)
    state = jax.tree.map(lambda c: c[None], state)
    return drafts._replace(tokens=jnp.stack(tokens, axis=1), accepted=accepted_n, state=state)
