"""Places for answers, which take the next prompts as answers end: the state of rollouts on a rank.

A prompt and all answers to it are held apart. Packed prompts lie in pages: the keys and values of a page's
token slots, for every layer that keeps any. An answer has a place: its own keys and values, the scan's state,
and which interval of the pages' keys is its prompt. Several places may name one prompt, which is encoded and
prefilled once. A page is free when no active place names a prompt in it.

Legend: n places of this rank, P pages, R rows of a page on this rank, D prompts of a row, m the most tokens of
an answer; S token slots of a page on all context ranks, of all its rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, UInt32

from jaxthd.models.decoding import Decoding, Pick, advance, begin
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import DOCUMENTS_BLOCK, PromptEnds
from jaxthd.packing.segments import key_intervals

PAGES = 4
"""Pages of prompts. Few places with long answers then keep no others waiting; half of the pages would do if
all answers were equally long."""


class Admitted(NamedTuple):
    """Prompts that take places.

    ends: the prompts' ends in the page's rows. page: the page that they take; PAGES for none.
    prompts: for each place the prompt that it takes, row * D + its number in the row; -1 if it keeps its own.
    keys: 64 random bits for each of these places.
    """

    ends: PromptEnds
    page: Int32[Any, "1"]
    prompts: Int32[Any, " n"]
    keys: UInt32[Any, "n 2"]


class Places(NamedTuple):
    """The places of a rank.

    lo, hi: their prompts' keys in all pages. keys: 64 random bits for each. decoding: of all places; the first
    dim of its `fixed` leaves, behind stages and layers, is the token slots of all pages.
    """

    lo: Int32[Any, " n"]
    hi: Int32[Any, " n"]
    keys: UInt32[Any, "n 2"]
    decoding: Decoding


PickFor = Callable[[SpeechLM, Array], Pick]
"""(model, keys of the places [n, 2]) -> how their tokens are drawn."""


def empty_places(
    model: SpeechLM, batch: Batch, admitted: Admitted, pick_for: PickFor, *, new_tokens: int, fill: int, axes: Any
) -> Places:
    """Places without answers. Only the shapes of `batch` and `admitted` count."""

    def first(keys_n2: Array) -> Places:
        return _begun(model, batch, admitted, pick_for(model, keys_n2), new_tokens, fill, axes)

    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first, admitted.keys))

    def of_pages(x: Array) -> Array:
        return jnp.zeros((*x.shape[:2], PAGES * x.shape[2], *x.shape[3:]), x.dtype)

    decoding = like.decoding._replace(fixed=jax.tree.map(of_pages, like.decoding.fixed))
    return like._replace(decoding=decoding)


def _begun(
    model: SpeechLM, batch: Batch, admitted: Admitted, pick: Pick, new_tokens: int, fill: int, axes: Any
) -> Places:
    """The prompts' places alone, in pages of which there is one."""
    _, decoding = begin(
        model, batch, admitted.ends, pick, new_tokens=new_tokens, fill=fill, axes=axes, places=admitted.prompts
    )
    return Places(decoding.keys.lo, decoding.keys.hi, admitted.keys, decoding)


def admit(
    model: SpeechLM,
    places: Places,
    batch: Batch,
    admitted: Admitted,
    pick_for: PickFor,
    *,
    new_tokens: int,
    fill: int,
    axes: tuple[str, ...],
) -> Places:
    """Prefills a page of prompts, and gives them their places. Arguments: as for `begin`."""
    new = _begun(model, batch, admitted, pick_for(model, admitted.keys), new_tokens, fill, axes)
    page, is_new_n, old = admitted.page[0], admitted.prompts >= 0, places.decoding

    def of_page(pages: Array, x: Array) -> Array:
        by_page = pages.reshape(*x.shape[:2], -1, *x.shape[2:])
        return by_page.at[:, :, page].set(x, mode="drop").reshape(pages.shape)

    def of_place(axis: int) -> Callable[[Array, Array], Array]:
        def chosen(x: Array, y: Array) -> Array:
            return jnp.where(is_new_n.reshape(-1, *[1] * (x.ndim - axis - 1)), x, y)

        return chosen

    slots = batch.tokens.size * (jax.lax.axis_size("context") if axes else 1)
    lo_n, hi_n = new.lo + page * slots, new.hi + page * slots
    lo_n, hi_n, keys_n2 = jax.tree.map(of_place(0), (lo_n, hi_n, new.keys), (places.lo, places.hi, places.keys))
    begun = new.decoding._replace(start=jnp.full_like(old.start, old.steps))
    each = jax.tree.map(
        of_place(0),
        (begun.start, begun.active, begun.next, begun.drawn),
        (old.start, old.active, old.next, old.drawn),
    )
    decoding = old._replace(
        **dict(zip(("start", "active", "next", "drawn"), each, strict=True)),
        fixed=jax.tree.map(of_page, old.fixed, begun.fixed),
        state=jax.tree.map(of_place(2), begun.state, old.state),
    )
    return Places(lo_n, hi_n, keys_n2, decoding)


def decode(
    model: SpeechLM, places: Places, pick_for: PickFor, *, stop_ids: tuple[int, ...], tokens: Array | int
) -> Places:
    """Decodes up to so many more tokens in every place; it stops early if all answers have ended."""
    old = places.decoding
    # A block of places sees the keys of all pages between its first and its last prompt: so prompts in order.
    lo_n, hi_n = (jnp.where(old.active, x, 0) for x in (places.lo, places.hi))
    order_n = jnp.argsort(lo_n).astype(jnp.int32)
    keys = key_intervals(lo_n[order_n], hi_n[order_n], model.compute.attention_block, DOCUMENTS_BLOCK)
    decoding = advance(
        model,
        old._replace(keys=keys, order=order_n),
        pick_for(model, places.keys),
        stop_ids=stop_ids,
        until=old.steps + tokens,
    )
    return places._replace(decoding=decoding._replace(keys=old.keys, order=None))
