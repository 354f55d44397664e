"""Places for answers, which take the next prompts as answers end: the state of rollouts on a rank.

A prompt and all answers to it are held apart. Packed prompts lie in pages: the keys and values of a page's
token slots, for every layer that keeps any. An answer has a place: its own keys and values, the scan's state,
and which interval of the pages' keys is its prompt. Several places may name one prompt, which is encoded and
prefilled once. A page is free when no active place names a prompt in it.

Legend: n places of this rank, D prompts of a row of a page.
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
from jaxthd.packing.intervals import key_intervals
from jaxthd.packing.prompts import DOCUMENTS_BLOCK, PromptEnds
from jaxthd.parallel.mesh import CONTEXT

PAGES = 4
"""Pages of prompts. Few places with long answers then keep no others waiting; half of the pages would do if
all answers were equally long."""


class Admitted(NamedTuple):
    """Prompts that take places. The first dim is one of data ranks: 1 on a rank.

    ends: the prompts' ends in the page's rows. page: the page that they take; PAGES for none.
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


PickFor = Callable[[SpeechLM, Array], Pick]
"""(model, keys of the places [n, 2]) -> how their tokens are drawn."""


def empty_places(
    model: SpeechLM,
    batch: Batch,
    admitted: Admitted,
    pick_for: PickFor,
    *,
    new_tokens: int,
    fill: int,
    axes: tuple[str, ...],
) -> Places:
    """Places without answers. Only the shapes of `batch` and `admitted` count. Otherwise as `admit`."""

    def first(keys_n2: Array) -> Places:
        return _begun(model, batch, admitted._replace(keys=keys_n2), pick_for, new_tokens, fill, axes)

    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first, admitted.keys))

    def of_pages(x: Array) -> Array:
        return jnp.zeros((*x.shape[:2], PAGES * x.shape[2], *x.shape[3:]), x.dtype)

    decoding = like.decoding._replace(fixed=jax.tree.map(of_pages, like.decoding.fixed))
    return like._replace(decoding=decoding)


def _begun(
    model: SpeechLM,
    batch: Batch,
    admitted: Admitted,
    pick_for: PickFor,
    new_tokens: int,
    fill: int,
    axes: tuple[str, ...],
) -> Places:
    """The new prompts' places, with one page."""
    keys_n2, prompts_n = admitted.keys[0], admitted.prompts[0]
    pick = pick_for(model, keys_n2)
    _, decoding = begin(
        model, batch, admitted.ends, pick, new_tokens=new_tokens, fill=fill, axes=axes, places=prompts_n
    )
    return Places(decoding.keys.lo, decoding.keys.hi, keys_n2, decoding)


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
    """Prefills a page of prompts, and gives them their places.

    new_tokens, fill, axes: as for models.decoding.begin.
    """
    new = _begun(model, batch, admitted, pick_for, new_tokens, fill, axes)
    page, is_new_n, old = admitted.page[0], admitted.prompts[0] >= 0, places.decoding

    def of_page(pages: Array, x: Array) -> Array:
        by_page = pages.reshape(*x.shape[:2], -1, *x.shape[2:])
        return by_page.at[:, :, page].set(x, mode="drop").reshape(pages.shape)

    def of_places(x: Any, y: Any, axis: int = 0) -> Any:
        """x in the new places, y in the others: leaves whose dim `axis` is n."""

        def chosen(x: Array, y: Array) -> Array:
            return jnp.where(is_new_n.reshape(-1, *[1] * (x.ndim - axis - 1)), x, y)

        return jax.tree.map(chosen, x, y)

    first_key = page * batch.tokens.size * (jax.lax.axis_size(CONTEXT) if axes else 1)
    begun = new.decoding
    return Places(
        lo=of_places(new.lo + first_key, places.lo),
        hi=of_places(new.hi + first_key, places.hi),
        keys=of_places(new.keys, places.keys),
        decoding=old._replace(
            start=of_places(jnp.full_like(old.start, old.steps), old.start),
            active=of_places(begun.active, old.active),
            next=of_places(begun.next, old.next),
            drawn=of_places(begun.drawn, old.drawn),
            fixed=jax.tree.map(of_page, old.fixed, begun.fixed),
            state=of_places(begun.state, old.state, axis=2),
        ),
    )


def decode(
    model: SpeechLM, places: Places, pick_for: PickFor, *, stop_ids: tuple[int, ...], tokens: Array | int
) -> Places:
    """Decodes up to so many more tokens in every place; it stops early if all answers have ended."""
    old = places.decoding
    # A block of places sees the keys of all pages between its first and its last prompt: so prompts in order.
    lo_n, hi_n = (jnp.where(old.active, x, 0) for x in (places.lo, places.hi))
    order_n = jnp.argsort(lo_n).astype(jnp.int32)
    keys = key_intervals(lo_n[order_n], hi_n[order_n], model.compute.blocks.attention, DOCUMENTS_BLOCK)
    decoding = advance(
        model,
        old._replace(keys=keys, order=order_n),
        pick_for(model, places.keys),
        stop_ids=stop_ids,
        until=old.steps + tokens,
    )
    return places._replace(decoding=decoding._replace(keys=old.keys, order=None))
