"""Places for answers, which take the next prompts as answers end: the programs of drawing, and their state.

A prompt and all answers to it are held apart. Packed prompts lie in pages: the keys and values of a page's
token slots, for every layer that keeps any. An answer has a place: its own keys and values, the scan's state,
and which interval of the pages' keys is its prompt. Several places may name one prompt, which is encoded and
prefilled once. A page is free when no active place names a prompt in it.

Three programs of fixed shape serve prompts and answers of all lengths: one makes places without answers, so
that these take memory only while answers are drawn; one prefills a page of prompts, which take places; one
decodes some tokens in every place.

Legend: n places of this rank, D prompts of a row of a page.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int32, UInt32

from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.decoding import Decoding, advance, begin
from jaxthd.models.drafting import Pick
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn, Sampling, draw
from jaxthd.packing.batch import Batch
from jaxthd.packing.intervals import key_intervals
from jaxthd.packing.prompts import DOCUMENTS_BLOCK, KEYS_BLOCK, PromptEnds
from jaxthd.parallel.mesh import AXES, CONTEXT, DATA, TOKEN_AXES, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree


class NewSequences(NamedTuple):
    """Prompts that take places. The first dim is one of data ranks: 1 on a rank.

    ends: the prompts' ends in the page's rows. page: the page that they take; the number of pages for none.
    prompts: for each place the prompt that it takes, row * D + its number in the row; -1 if it keeps its own.
    keys: 64 random bits for each of these places.
    """

    ends: PromptEnds
    page: Int32[Any, " ranks"]
    prompts: Int32[Any, "ranks n"]
    keys: UInt32[Any, "ranks n 2"]


class Places(NamedTuple):
    """The places of a rank.

    lo, hi: their prompts' keys in all pages. keys: 64 random bits for each. decoding: of all places; its
    `fixed` leaves are [stages, layers, token slots of all pages, ...].
    """

    lo: Int32[Any, " n"]
    hi: Int32[Any, " n"]
    keys: UInt32[Any, "n 2"]
    decoding: Decoding


class InPlaces(NamedTuple):
    """Contents of the places of all data and context ranks.

    active: whether the answer has not ended. drawn: its tokens so far, padded, leaves [places, m].
    drafted: Drafts.checked of each of these ranks; None where no tokens are drafted.
    """

    active: Bool[Any, " places"]
    drawn: Drawn
    drafted: Int32[Any, "ranks 2"] | None = None


class DrawingSteps(NamedTuple):
    """empty: (params, buffers, batch, admitted, sampling) -> places without answers; only the arguments'
        shapes count.
    prefill: (params, buffers, places, batch, admitted, sampling) -> places.
    decode: (params, buffers, places, sampling, steps) -> (places, what they hold), after up to `steps` more
        steps of decoding; it stops early if all answers have ended.
    """

    empty: Callable[[Tree, Tree, Batch, NewSequences, Sampling], Tree]
    prefill: Callable[[Tree, Tree, Tree, Batch, NewSequences, Sampling], Tree]
    decode: Callable[[Tree, Tree, Tree, Sampling, Any], tuple[Tree, InPlaces]]


def new_sequence_specs() -> NewSequences:
    """PartitionSpecs: each data rank has its own page and prompts, each context rank its own places."""
    rows, places = PartitionSpec(DATA), PartitionSpec(DATA, CONTEXT)
    return NewSequences(PromptEnds(rows, rows), rows, places, places)


def make_drawing_steps(
    blueprint: Blueprint, mesh: Mesh, *, stop_ids: tuple[int, ...], new_tokens: int, pages: int
) -> DrawingSteps:
    """The programs, jitted, with stored batch statistics. The old places' memory is reused.

    stop_ids: tokens that end an answer; the first one is padding. new_tokens: most tokens of an answer.
    """
    graph, specs, config = blueprint.graph, blueprint.specs, blueprint.config

    def begun(model: SpeechLM, batch: Batch, admitted: NewSequences, sampling: Sampling) -> Places:
        """The new prompts' places, with one page."""
        keys_n2, sizes = admitted.keys[0], {"new_tokens": new_tokens, "fill": stop_ids[0]}
        pick = picks(model, keys_n2, sampling)
        _, decoding = begin(model, batch, admitted.ends, pick, **sizes, axes=AXES, places=admitted.prompts[0])
        return Places(decoding.keys.lo, decoding.keys.hi, keys_n2, decoding)

    def empty(params: Tree, buffers: Tree, batch: Batch, admitted: NewSequences, sampling: Sampling) -> Tree:
        model = nnx.merge(graph, params, buffers)

        def first(keys_n2: Array) -> Places:
            return begun(model, batch, admitted._replace(keys=keys_n2), sampling)

        return _held(_without_answers(jax.eval_shape(first, admitted.keys), pages))

    def prefill(
        params: Tree, buffers: Tree, places: Tree, batch: Batch, admitted: NewSequences, sampling: Sampling
    ) -> Tree:
        new = begun(nnx.merge(graph, params, buffers), batch, admitted, sampling)
        slots = batch.tokens.size * jax.lax.axis_size(CONTEXT)
        return _held(_admitted(_own(places), new, admitted, slots))

    def decode(
        params: Tree, buffers: Tree, places: Tree, sampling: Sampling, steps: Array
    ) -> tuple[Tree, InPlaces]:
        after = _decoded(nnx.merge(graph, params, buffers), _own(places), sampling, stop_ids, steps)
        decoding, drafts = after.decoding, after.decoding.drafts
        checked = None if drafts is None else drafts.checked[None]
        return _held(after), InPlaces(decoding.active, decoding.drawn, checked)

    everywhere, held, by_place = PartitionSpec(), PartitionSpec(AXES), PartitionSpec(TOKEN_AXES)
    on_mesh = NamedSharding(mesh, held)
    admission = batch_specs(), new_sequence_specs(), everywhere

    def compiled(rank: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Any:
        return jit_for(config, mesh, on_ranks(rank, mesh, (*specs, *in_specs), out_specs), **options)

    # All processes read all answers.
    after_decoding = on_mesh, NamedSharding(mesh, everywhere)
    reusing: Any = {"donate_argnums": 2}
    return DrawingSteps(
        compiled(empty, admission, held, out_shardings=on_mesh),
        compiled(prefill, (held, *admission), held, **reusing, out_shardings=on_mesh),
        compiled(
            decode, (held, everywhere, everywhere), (held, by_place), **reusing, out_shardings=after_decoding
        ),
    )


def picks(model: SpeechLM, keys_n2: Array, sampling: Sampling) -> Pick:
    """Draws the tokens of places with these random bits, with their log-probabilities."""

    def pick(h_ND: Array, number: Array) -> Drawn:
        keys_N2 = jnp.repeat(keys_n2, len(h_ND) // len(keys_n2), axis=0)
        return draw(model.logits(h_ND), keys_N2, number, sampling, model.vocabulary_axes)

    return pick


def _without_answers(begun: Places, pages: int) -> Places:
    """Places without answers, in the shapes of places with one page."""
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), begun)

    def of_pages(x: Array) -> Array:
        return jnp.zeros((*x.shape[:2], pages * x.shape[2], *x.shape[3:]), x.dtype)

    decoding, drafts = like.decoding, like.decoding.drafts
    if drafts is not None:
        drafts = drafts._replace(fixed=jax.tree.map(of_pages, drafts.fixed))
    fixed = jax.tree.map(of_pages, decoding.fixed)
    return like._replace(decoding=decoding._replace(fixed=fixed, drafts=drafts))


def _admitted(places: Places, new: Places, admitted: NewSequences, slots: int) -> Places:
    """The places, once new prompts have theirs, and a page. slots: of a page, on all context ranks."""
    page, is_new_n, old = admitted.page[0], admitted.prompts[0] >= 0, places.decoding

    def of_page(pages: Array, x: Array) -> Array:
        by_page = pages.reshape(*x.shape[:2], -1, *x.shape[2:])
        return by_page.at[:, :, page].set(x, mode="drop").reshape(pages.shape)

    def of_places(x: Any, y: Any, axis: int = 0) -> Any:
        """x in the new places, y in the others: leaves whose dim `axis` is n."""

        def chosen(x: Array, y: Array) -> Array:
            return jnp.where(is_new_n.reshape(-1, *[1] * (x.ndim - axis - 1)), x, y)

        return jax.tree.map(chosen, x, y)

    first_key, begun, drafts = page * slots, new.decoding, old.drafts
    if drafts is not None and begun.drafts is not None:
        drafts = drafts._replace(
            tokens=of_places(begun.drafts.tokens, drafts.tokens),
            accepted=of_places(begun.drafts.accepted, drafts.accepted),
            fixed=jax.tree.map(of_page, drafts.fixed, begun.drafts.fixed),
            state=of_places(begun.drafts.state, drafts.state, axis=2),
        )
    return Places(
        lo=of_places(new.lo + first_key, places.lo),
        hi=of_places(new.hi + first_key, places.hi),
        keys=of_places(new.keys, places.keys),
        decoding=old._replace(
            number=of_places(begun.number, old.number),
            active=of_places(begun.active, old.active),
            next=of_places(begun.next, old.next),
            drawn=of_places(begun.drawn, old.drawn),
            fixed=jax.tree.map(of_page, old.fixed, begun.fixed),
            state=of_places(begun.state, old.state, axis=2),
            adapted=of_places(begun.adapted, old.adapted),
            drafts=drafts,
        ),
    )


def _decoded(
    model: SpeechLM, places: Places, sampling: Sampling, stop_ids: tuple[int, ...], steps: Array
) -> Places:
    """The places after up to so many more steps of decoding."""
    old = places.decoding
    # A block of places sees the keys of all pages between its first and its last prompt: so prompts in order.
    lo_n, hi_n = (jnp.where(old.active, x, 0) for x in (places.lo, places.hi))
    order_n = jnp.argsort(lo_n).astype(jnp.int32)
    keys = key_intervals(lo_n[order_n], hi_n[order_n], KEYS_BLOCK, DOCUMENTS_BLOCK)
    decoding = advance(
        model,
        old._replace(keys=keys, order=order_n),
        picks(model, places.keys, sampling),
        stop_ids=stop_ids,
        until=old.steps + steps,
    )
    return places._replace(decoding=decoding._replace(keys=old.keys, order=None))


def _held(tree: Tree) -> Tree:
    """Each rank holds its own places: a row of a leading dim that all axes shard."""
    return jax.tree.map(lambda x: x[None], tree)


def _own(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)
