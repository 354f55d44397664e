"""Decodes an answer to every prompt of a packed batch, in programs of fixed shape.

Prefill is the model's own forward pass over the packed buffer. The prompts' keys and values stay packed. Each
context rank then decodes its share of the documents. The stages of a pipeline run one after the other for
each token.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, n documents of this rank, m the most
new tokens of a document, D model dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.models.hybrid import Cache
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn, likeliest
from jaxthd.packing.batch import Batch
from jaxthd.packing.intervals import KeyIntervals
from jaxthd.packing.prompts import Now, PromptEnds, make_prompts
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import DECODER_FSDP
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import psum_live

Pick = Callable[[Array, Array | int], Drawn]
"""(the head's input [n, D], the number of each document's new token, from 0) -> a token for each document,
leaves [n]."""


class Decoding(NamedTuple):
    """The state of decoding a rank's documents.

    steps: the tokens that every document would have if it had begun with the first and not ended.
    start: the step at which each document began.
    active: the documents that have not ended.
    next: the next token of each document, leaves [n].
    drawn: the decoded tokens, including the one that ends an answer, leaves [n, m]; the rest is padding.
    keys: which of the prompts' keys new tokens attend to. order, adapted: see Now.
    fixed, state: what the layers of this rank's stages keep (see Prefilled), leaves [stages, layers, ...].
    """

    steps: Int32[Array, ""]
    start: Int32[Array, " n"]
    active: Bool[Array, " n"]
    next: Drawn
    drawn: Drawn
    keys: KeyIntervals
    order: Int32[Array, " n"] | None
    fixed: Cache
    state: Cache
    adapted: Bool[Array, " n"] | None = None


class Answered(NamedTuple):
    """The scores of a batch and the answers to its prompts.

    log_probs: the log-probability of every position's target, 0 where weights is 0.
    correct: whether no token was likelier than the target.
    tokens: the tokens decoded for each document, including the one that ends the answer; the rest is the
    first of the end tokens.
    """

    log_probs: Float[Array, "R T"]
    correct: Bool[Array, "R T"]
    tokens: Int32[Array, "n m"]


def answer(
    model: SpeechLM,
    batch: Batch,
    ends: PromptEnds,
    *,
    stop_ids: tuple[int, ...],
    new_tokens: int,
    axes: tuple[str, ...],
) -> Answered:
    """Scores the batch as it is, and decodes an answer to every prompt, always taking the likeliest token.

    ends: the prompts' ends in this rank's rows. stop_ids: the tokens that end an answer; the first one is
    padding. axes: as in SpeechLM.log_probs.
    """

    def pick(h_nD: Array, number: Array | int) -> Drawn:
        """The likeliest next token of each sequence."""
        return Drawn(likeliest(model.logits(h_nD), model.vocabulary_axes))

    h_ND, decoding = begin(model, batch, ends, pick, new_tokens=new_tokens, fill=stop_ids[0], axes=axes)
    log_probs_N, correct_N = model.scores(h_ND, batch)
    if new_tokens:
        decoding = advance(model, decoding, pick, stop_ids=stop_ids, until=new_tokens)
    shape = batch.tokens.shape
    return Answered(log_probs_N.reshape(shape), correct_N.reshape(shape), decoding.drawn.tokens)


def begin(
    model: SpeechLM,
    batch: Batch,
    ends: PromptEnds,
    pick: Pick,
    *,
    new_tokens: int,
    fill: int,
    axes: tuple[str, ...],
    places: Int32[Array, " n"] | None = None,
) -> tuple[Float[Array, "N D"], Decoding]:
    """Prefill. Returns the head's input at every position, and the state in which decoding begins.

    ends: the prompts' ends in this rank's rows. fill: the token that pads the drawn ones.
    axes: as in SpeechLM.log_probs. places: see Prompts.
    """
    stages = model.decoder.stages
    x_nD, _ = model.embed(batch, axes=axes, train=False)
    segments = model.segments(batch, axes)
    prompts = make_prompts(ends, segments, new_tokens, places)

    def prefill(pattern: str, chunk: Array | int, x_nD: Array, _: Any, __: Any) -> tuple[Array, Cache]:
        """Runs a chunk of layers over the prompts, and returns what it keeps for decoding."""
        return model.decoder.prefill(pattern, chunk, x_nD, segments, prompts)

    x_nD, caches = _through_all_stages(stages, prefill, x_nD)
    h_ND = model.hidden(x_nD)

    def at_ends(x_N: Array) -> Array:
        """The values at the ends of the prompts of this rank's documents."""
        is_here = (prompts.at >= 0).reshape(-1, *[1] * (x_N.ndim - 1))
        return prompts.share(jnp.where(is_here, x_N[prompts.at], 0), segments)

    first, adapted_N = pick(at_ends(h_ND), 0), segments.adapted
    return h_ND, Decoding(
        steps=jnp.int32(0),
        start=jnp.zeros(prompts.documents, jnp.int32),
        active=prompts.keys.hi > 0,
        next=first,
        drawn=_padding(first, new_tokens, fill),
        keys=prompts.keys,
        order=None,
        fixed={letter: fixed for letter, (fixed, _) in caches.items()},
        state={letter: state for letter, (_, state) in caches.items()},
        adapted=None if adapted_N is None else at_ends(adapted_N.astype(jnp.int32)) > 0,
    )


def _padding(first: Drawn, new_tokens: int, fill: int) -> Drawn:
    """[n] -> [n, m]."""

    def filled(x_n: Array) -> Array:
        """Room for new_tokens values of each sequence, filled with padding."""
        return jnp.full((len(x_n), new_tokens), fill if x_n.dtype == jnp.int32 else 0, x_n.dtype)

    return jax.tree.map(filled, first)


def advance(
    model: SpeechLM, decoding: Decoding, pick: Pick, *, stop_ids: tuple[int, ...], until: Array | int
) -> Decoding:
    """Decodes up to the step `until`; it stops early if all documents have ended.

    stop_ids: the tokens that end a document. One with m tokens has ended too.
    """
    most = decoding.drawn.tokens.shape[1]
    prompt_tokens_n = decoding.keys.hi - decoding.keys.lo
    if decoding.order is not None:
        prompt_tokens_n = prompt_tokens_n[jnp.argsort(decoding.order)]

    def any_active(active_n: Array) -> Array:
        """Whether any rank has an active document: ranks that share weights go on until all have finished."""
        return psum_live(active_n.sum(), DECODER_FSDP, model.mesh) > 0

    def step(carry: tuple[Array, Decoding]) -> tuple[Array, Decoding]:
        """Decodes one token of each sequence that is not done."""
        _, d = carry
        number_n = d.steps - d.start
        is_new_nm = d.active[:, None] & (jnp.arange(most, dtype=jnp.int32) == number_n[:, None])
        drawn = jax.tree.map(lambda x_n, x_nm: jnp.where(is_new_nm, x_n[:, None], x_nm), d.next, d.drawn)
        token_n = d.next.tokens
        active_n = d.active & (token_n[:, None] != jnp.array(stop_ids)).all(-1) & (number_n < most - 1)
        at_n = prompt_tokens_n + number_n
        now = Now(d.keys, model.compute.blocks.attention, number_n, at_n, active_n, d.order, d.adapted)

        def through(
            pattern: str, chunk: Array | int, x_nD: Array, fixed: Cache, state: Cache
        ) -> tuple[Array, Cache]:
            """Runs a chunk of layers over the newest tokens."""
            return model.decoder.step(pattern, chunk, x_nD, fixed, state, now)

        stages = model.decoder.stages
        x_nD, state = _through_all_stages(stages, through, model.embed_tokens(token_n), d.fixed, d.state)
        following = pick(model.decoder.norm(x_nD), number_n + 1)
        after = d._replace(steps=d.steps + 1, active=active_n, next=following, drawn=drawn, state=state)
        return any_active(active_n), after

    start = (any_active(decoding.active), decoding)
    return jax.lax.while_loop(lambda carry: carry[0] & (carry[1].steps < until), step, start)[1]


def _through_all_stages(
    stages: Stages,
    run: Callable[[str, Array | int, Array, Any, Any], tuple[Array, Cache]],
    x_nD: Array,
    fixed: Any = None,
    state: Any = None,
) -> tuple[Array, Cache]:
    """Calls run(pattern, chunk, x, fixed, state) -> (x, state) for one stage after the other.

    The last x is returned on all ranks.
    fixed, state: those of this rank's stages, leaves [stages, ...]; None in prefill, which makes them.
    """
    if len(stages.patterns) == 1:
        x_nD, state = run(stages.patterns[0], 0, x_nD, *jax.tree.map(lambda c: c[0], (fixed, state)))
        return x_nD, jax.tree.map(lambda c: c[None], state)
    rank, has_state = jax.lax.axis_index(PIPELINE), state is not None
    if not has_state:
        like = jax.eval_shape(lambda x: run(stages.patterns[0], 0, x, None, None)[1], x_nD)
        state = jax.tree.map(lambda c: jnp.zeros((stages.chunks, *c.shape), c.dtype), like)

    def one(carry: tuple[Array, Any], stage: Array) -> tuple[tuple[Array, Any], None]:
        """Runs a stage where its rank holds it, and passes the activations on."""
        x_nD, state = carry
        chunk, mine = stage // stages.ranks, rank == stage % stages.ranks
        held, own = jax.tree.map(lambda c: c[chunk], (fixed, state))

        def turn() -> tuple[Array, Cache]:
            """Runs the layers of this stage with its own cache."""
            taken = own if has_state else None
            return stages.switch(lambda pattern: run(pattern, chunk, x_nD, held, taken), chunk)

        y_nD, new = turn() if stages.are_equal else jax.lax.cond(mine, turn, lambda: (x_nD, own))
        new = jax.tree.map(lambda a, b: jnp.where(mine, a, b), new, own)
        state = jax.tree.map(lambda all_, c: all_.at[chunk].set(c), state, new)
        return (jax.lax.psum(jnp.where(mine, y_nD, 0), PIPELINE), state), None

    (x_nD, state), _ = jax.lax.scan(one, (x_nD, state), jnp.arange(len(stages.patterns)))
    return x_nD, state
