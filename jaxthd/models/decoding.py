"""Decodes an answer to every prompt of a packed batch, in programs of fixed shape.

Prefill is the model's own forward pass over the packed buffer. The prompts' keys and values stay packed. Each
context rank then decodes its share of the documents. The stages of a pipeline run one after the other for
each token.

With compute.num_speculative_tokens, a step takes the newest token of every document and some that are drafted
(models/drafting.py), and keeps those that hold.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, n documents of this rank, m the most
new tokens of a document, D model dim, L tokens of a step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.models.drafting import Drafts, Pick, StepOf, drafted_after, prefilled, require_drafts
from jaxthd.models.hybrid import Cache
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn, likeliest
from jaxthd.packing.batch import Batch
from jaxthd.packing.intervals import KeyIntervals
from jaxthd.packing.prompts import Now, PromptEnds, make_prompts, queries_of
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import DECODER_FSDP
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import psum_live


class Decoding(NamedTuple):
    """The state of decoding a rank's documents.

    steps: passes of the decoder so far.
    number: of each document's next token, from 0.
    active: the documents that have not ended.
    next: the next token of each document, leaves [n].
    drawn: the decoded tokens, including the one that ends an answer, leaves [n, m]; the rest is padding.
    keys: which of the prompts' keys new tokens attend to. order, adapted: see Now.
    fixed, state: what the layers of this rank's stages keep (see Prefilled), leaves [stages, layers, ...].
    drafts: None where no tokens are drafted.
    """

    steps: Int32[Array, ""]
    number: Int32[Array, " n"]
    active: Bool[Array, " n"]
    next: Drawn
    drawn: Drawn
    keys: KeyIntervals
    order: Int32[Array, " n"] | None
    fixed: Cache
    state: Cache
    adapted: Bool[Array, " n"] | None = None
    drafts: Drafts | None = None

    @property
    def prompt_tokens(self) -> Int32[Array, " n"]:
        """Tokens of the documents' prompts."""
        tokens_n = self.keys.hi - self.keys.lo
        return tokens_n if self.order is None else tokens_n[jnp.argsort(self.order)]


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

    def pick(h_nD: Array, number: Array) -> Drawn:
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
    stages, drafted = model.decoder.stages, require_drafts(model, batch)
    (x_nD, *future), _ = model.embed_with_future(batch, axes=axes, train=False, depths=min(drafted, 1))
    segments = model.segments(batch, axes)
    prompts = make_prompts(ends, segments, new_tokens, places, 1 + drafted)

    def prefill(pattern: str, chunk: Array | int, x_nD: Array, _: Any, __: Any) -> tuple[Array, Cache]:
        """Runs a chunk of layers over the prompts, and returns what it keeps for decoding."""
        return model.decoder.prefill(pattern, chunk, x_nD, segments, prompts)

    x_nD, caches = _through_all_stages(stages, prefill, x_nD)
    h_nD = model.decoder.norm(x_nD)
    h_ND = model.residual.whole(h_nD)

    def at_ends(x_N: Array) -> Array:
        """The values at the ends of the prompts of this rank's documents."""
        is_here = (prompts.at >= 0).reshape(-1, *[1] * (x_N.ndim - 1))
        return prompts.share(jnp.where(is_here, x_N[prompts.at], 0), segments)

    last_nD, adapted_N = at_ends(h_ND), segments.adapted
    none_n = jnp.zeros(prompts.documents, jnp.int32)
    first = pick(last_nD, none_n)
    decoding = Decoding(
        steps=jnp.int32(0),
        number=none_n,
        active=prompts.keys.hi > 0,
        next=first,
        drawn=_padding(first, new_tokens, fill),
        keys=prompts.keys,
        order=None,
        fixed={letter: fixed for letter, (fixed, _) in caches.items()},
        state={letter: state for letter, (_, state) in caches.items()},
        adapted=None if adapted_N is None else at_ends(adapted_N.astype(jnp.int32)) > 0,
    )
    if drafted:
        drafts = prefilled(model, batch, ends, prompts, h_nD, future[0], axes)
        at_first = (last_nD, first.tokens, none_n, none_n)
        drafts = drafted_after(model, drafts, _depth_step(model, decoding), pick, *at_first)
        decoding = decoding._replace(drafts=drafts)
    return h_ND, decoding


def _step(
    model: SpeechLM,
    d: Decoding,
    keys: KeyIntervals,
    first_n: Array,
    step_tokens: int,
    *,
    active_n: Array,
    behind: int = 0,
    accepted_n: Array | None = None,
) -> Now:
    """A step of so many tokens of each document, from number `first` on. behind: positions by which number 0
    is not the first one after the prompt."""

    def each(x_n: Array) -> Array:
        """[n] -> [N]."""
        return jnp.repeat(x_n, step_tokens) if step_tokens > 1 else x_n

    token_N = (first_n[:, None] + jnp.arange(step_tokens, dtype=jnp.int32)).reshape(-1)
    return Now(
        keys=queries_of(keys, step_tokens),
        token=token_N,
        positions=each(d.prompt_tokens - behind) + token_N,
        active=each(active_n),
        order=d.order,
        adapted=None if d.adapted is None else each(d.adapted),
        documents=len(first_n),
        accepted=accepted_n,
    )


def _depth_step(model: SpeechLM, d: Decoding) -> StepOf:
    """Steps of depth 0, which is one position behind the decoder, for documents that are active in `d`."""
    keys = d.keys._replace(hi=jnp.maximum(d.keys.hi - 1, d.keys.lo))

    def step_of(first_n: Array, step_tokens: int, accepted_n: Array) -> Now:
        """See StepOf."""
        more: dict[str, Any] = {"active_n": d.active, "behind": 1, "accepted_n": accepted_n}
        return _step(model, d, keys, first_n, step_tokens, **more)

    return step_of


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

    stop_ids: the tokens that end a document. One with m tokens has ended too. A step decodes a token of each
    document, and those drafted after it that hold.
    """
    most, step_tokens = decoding.drawn.tokens.shape[1], 1 + model.compute.num_speculative_tokens

    def any_active(active_n: Array) -> Array:
        """Whether any rank has an active document: ranks that share weights go on until all have finished."""
        return psum_live(active_n.sum(), DECODER_FSDP, model.mesh) > 0

    def step(carry: tuple[Array, Decoding]) -> tuple[Array, Decoding]:
        """Decodes one token of each sequence that is not done, and those drafted after it that hold."""
        _, d = carry
        drafts, token_nL = d.drafts, d.next.tokens[:, None]
        if drafts is not None:
            token_nL = jnp.concatenate([token_nL, drafts.tokens], axis=1)
        number_nL = d.number[:, None] + jnp.arange(step_tokens, dtype=jnp.int32)
        is_end_nL = (token_nL[..., None] == jnp.array(stop_ids)).any(-1) | (number_nL >= most - 1)
        # Experts are sent only the tokens of documents that go on.
        goes_on_n = d.active & ~is_end_nL[:, 0]
        accepted_n = None if drafts is None else drafts.accepted
        now = _step(model, d, d.keys, d.number, step_tokens, active_n=goes_on_n, accepted_n=accepted_n)

        def through(
            pattern: str, chunk: Array | int, x_nD: Array, fixed: Cache, state: Cache
        ) -> tuple[Array, Cache]:
            """Runs a chunk of layers over the newest tokens."""
            return model.decoder.step(pattern, chunk, x_nD, fixed, state, now)

        stages, x_ND = model.decoder.stages, model.embed_tokens(token_nL.reshape(-1))
        x_ND, state = _through_all_stages(stages, through, x_ND, d.fixed, d.state)
        h_ND = model.decoder.norm(x_ND)
        picked = pick(h_ND, number_nL.reshape(-1) + 1)
        following = jax.tree.map(lambda x: x.reshape(token_nL.shape), picked)
        after = _taken(d._replace(steps=d.steps + 1, state=state), token_nL, is_end_nL, following)
        if drafts is not None:
            last_n = jnp.maximum(after.number - d.number - 1, 0)
            checked = jnp.stack([goes_on_n.sum() * (step_tokens - 1), last_n.sum()]).astype(jnp.int32)
            drafts = drafts._replace(checked=drafts.checked + checked)
            at = (h_ND, picked.tokens, after.number, last_n)
            drafts = drafted_after(model, drafts, _depth_step(model, after), pick, *at)
            after = after._replace(drafts=drafts)
        return any_active(after.active), after

    start = (any_active(decoding.active), decoding)
    return jax.lax.while_loop(lambda carry: carry[0] & (carry[1].steps < until), step, start)[1]


def _taken(
    d: Decoding, token_nL: Int32[Array, "n L"], is_end_nL: Bool[Array, "n L"], following: Drawn
) -> Decoding:
    """The documents with the tokens of a step that hold: up to an end, or to the first drafted one that is
    not what was drawn in its place.

    token: the newest and the drafted ones. is_end: whether a document ends with the token. following: what
    was drawn after each, leaves [n, L].
    """
    holds_nL = ~is_end_nL[:, :-1] & (token_nL[:, 1:] == following.tokens[:, :-1])
    holds_nL = jnp.concatenate([d.active[:, None], holds_nL], axis=1)
    count_n = jnp.cumprod(holds_nL.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    last_n1 = jnp.maximum(count_n - 1, 0)[:, None]
    at_m = jnp.arange(d.drawn.tokens.shape[1], dtype=jnp.int32)

    def at_last(x_nL: Array) -> Array:
        """The values of the last tokens that hold."""
        return jnp.take_along_axis(x_nL, last_n1, axis=1)[:, 0]

    def written(next_n: Array, following_nL: Array, x_nm: Array) -> Array:
        """The drawn tokens' values, with those of the tokens that hold."""
        new_nL = jnp.concatenate([next_n[:, None], following_nL[:, :-1]], axis=1)
        for i in range(new_nL.shape[1]):
            is_it_nm = (i < count_n)[:, None] & (at_m == (d.number + i)[:, None])
            x_nm = jnp.where(is_it_nm, new_nL[:, i, None], x_nm)
        return x_nm

    return d._replace(
        number=d.number + count_n,
        active=d.active & ~at_last(is_end_nL),
        next=jax.tree.map(at_last, following),
        drawn=jax.tree.map(written, d.next, following, d.drawn),
    )


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
