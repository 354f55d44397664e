"""Finds where the prompts of packed documents end, so that decoding starts from there.

A packed batch holds whole documents: prompt and answer. In a causal model later tokens do not affect earlier
ones. So one forward pass gives both the log-probabilities of the answer and all that decoding after the
prompt needs. Prompts stay packed in their buffer, and nothing is padded to the longest.

Several answers can be decoded to one prompt. Then each of the rank's n places names the prompt that it
answers, and what a place needs of its prompt is computed once for the prompt.

A step of decoding takes a token of every document, or several: the newest one, and those that are drafted
after it. The state of a layer is then kept after each of them, and the next step goes on from the state after
the last token that was accepted (models/decoding.py).

Legend: R rows, D most documents of a row (a multiple of the context axis), n documents that this rank
decodes: R * D over the context axis, or as many as there are places; L tokens that a step takes of each,
N = n * L, m tokens of a document that a layer has room for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from jaxthd.packing.batch import Batch
from jaxthd.packing.intervals import KeyIntervals, key_intervals
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.segments import Segments

DOCUMENTS_BLOCK = 8
"""Documents in a block: their new tokens are one block of queries to the keys of all of their prompts."""
KEYS_BLOCK = 512
"""Keys of prompts in a block. There are few queries, so that a product with fewer keys takes longer to begin
than to compute, and the prompts of a block of documents lie one after the other."""


class PromptEnds(NamedTuple):
    """Slots, in document order, of each document's first token and of its prompt's last one.

    The prompt is all that precedes the document's last answer. The slot is -1 without a document or answer.
    """

    first: Int32[Any, "R D"]
    last: Int32[Any, "R D"]


def find_prompts(
    batch: Batch, layout: ContextLayout, max_documents: int
) -> tuple[PromptEnds, list[list[int]]]:
    """Finds the prompts of a host batch and the token ids of their answers (end mark included), R * D lists.

    layout: the layout that the batch was packed with. An answer is a run of supervised tokens; the last one
        of a document counts.
    Raises ValueError for answers that share their prompt's slots: decoding does not go on from these.
    """
    ends = _no_ends(batch, layout, max_documents)
    rows, entries = ends.first.shape
    answers: list[list[int]] = [[] for _ in range(rows * entries)]
    for row, document, order, slots in _documents(batch, layout):
        supervised, targets = (x[row][order][slots] for x in (batch.weights, batch.targets))
        at = np.flatnonzero(supervised)
        if len(at):
            answer = at[np.flatnonzero(np.diff(at, prepend=-2) > 1)[-1] :]
            ends.first[row, document], ends.last[row, document] = slots[0], slots[answer[0]]
            answers[row * entries + document] = targets[answer].tolist()
    return ends, answers


def whole_prompts(batch: Batch, layout: ContextLayout, max_documents: int) -> PromptEnds:
    """The ends of a host batch's documents, each taken as a prompt. Arguments, errors: as in find_prompts."""
    ends = _no_ends(batch, layout, max_documents)
    for row, document, _, slots in _documents(batch, layout):
        ends.first[row, document], ends.last[row, document] = slots[0], slots[-1]
    return ends


def _no_ends(batch: Batch, layout: ContextLayout, max_documents: int) -> PromptEnds:
    """Room for the ends of a host batch's documents."""
    entries = -(-max_documents // layout.ranks) * layout.ranks
    return PromptEnds(*np.full((2, len(batch.tokens), entries), -1, np.int32))


def _documents(
    batch: Batch, layout: ContextLayout
) -> Iterator[tuple[int, int, Int32[np.ndarray, " T"], Int[np.ndarray, " n"]]]:
    """Yields (row, document, the permutation to document order, the document's slots in that order)."""
    if batch.prefixes is not None and batch.prefixes.any():
        raise ValueError(
            "the batch to decode from has answers that share their prompts' slots; expected whole documents: "
            "pack with share_prompts=False, or pack the prompts alone"
        )
    for row, segment_ids in enumerate(batch.segment_ids):
        order = layout.inverse(segment_ids, batch.splits_of(row))
        ids = segment_ids[order]
        for document in range(ids.max()):
            yield row, document, order, np.flatnonzero(ids == document + 1)


@dataclass(frozen=True)
class Prompts:
    """A batch's prompts as a rank sees them.

    ends: the ends in this rank's rows. at: this rank's index of each prompt's last token, or -1; [R * D].
    keys: which keys of all ranks, in document order, the new tokens of this rank's n documents attend to.
    places: the prompt that each of this rank's n places answers, of R * D, or -1; None where this rank's
        documents are its share of the prompts.
    documents: n. new_tokens: most tokens to decode. step_tokens: L.
    """

    ends: PromptEnds
    at: Int32[Array, " entries"]
    keys: KeyIntervals
    places: Int32[Array, " n"] | None
    documents: int
    new_tokens: int
    step_tokens: int = 1

    def share(self, x: Array, segments: Segments) -> Array:
        """Takes [R * D, ...], zero except on the rank with the prompt's end; returns this rank's [n, ...]."""
        if segments.context > 1 and self.places is None:
            return jax.lax.psum_scatter(x, segments.axis, scatter_dimension=0, tiled=True)
        if segments.context > 1:
            x = jax.lax.psum(x, segments.axis)
        return x if self.places is None else self._of_places(x)

    def state(self, x: Array, segments: Segments) -> Array:
        """The state [n, L, ...] from which Now.latest takes what `share` returns."""
        x = self.share(x, segments)[:, None]
        return jnp.broadcast_to(x, (x.shape[0], self.step_tokens, *x.shape[2:]))

    def room(self, window: int = 0) -> int:
        """m: tokens of a document that a layer keeps whose tokens see `window` of them, or all if it is 0.
        Drafted ones do not take the place of any that are seen."""
        return min(self.new_tokens, window or self.new_tokens) + self.step_tokens - 1

    def _of_places(self, x: Array) -> Array:
        assert self.places is not None
        is_some = (self.places >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(is_some, x[self.places], 0)


class Now(NamedTuple):
    """A step of decoding. The N tokens lie document after document.

    keys: as in Prompts, for each token. token: the number of each token among the document's new ones,
        from 0. positions: its index in the document, prompt included. active: documents that have not ended,
        for each token.
    order: the documents in the order of their prompts' keys, which is the order of `keys`; None where they
        have it.
    adapted: the tokens that low-rank matrices are on for; None: all.
    documents: n. accepted: the tokens of the last step after which documents go on; None: the first ones.
    """

    keys: KeyIntervals
    token: Int32[Array, " N"]
    positions: Int32[Array, " N"]
    active: Bool[Array, " N"]
    order: Int32[Array, " n"] | None
    adapted: Bool[Array, " N"] | None
    documents: int
    accepted: Int32[Array, " n"] | None

    @property
    def query_block(self) -> int:
        """Tokens in a block of queries to the prompts' keys."""
        return query_block(len(self.token) // self.documents)

    def by_document(self, x: Array) -> Array:
        """[N, ...] -> [n, L, ...]."""
        return x.reshape(self.documents, -1, *x.shape[1:])

    def latest(self, x: Array) -> Array:
        """The states [n, ...] to go on from, of those after each token of the last step, [n, its L, ...]."""
        if self.accepted is None or x.shape[1] == 1:
            return x[:, 0]
        at = self.accepted.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.take_along_axis(x, at, axis=1)[:, 0]

    def kept(self, old: Array, new_N: Array) -> Array:
        """The new tokens' values [N, ...] among those of earlier ones, [n, m, ...] (Prompts.room). They take
        the place of the oldest, and of those that were drafted and not accepted."""
        new_nL, room = self.by_document(new_N), old.shape[1]
        first_n1 = self.by_document(self.token)[:, :1]
        number_nm = (jnp.arange(room, dtype=jnp.int32) - first_n1) % room
        for number in range(new_nL.shape[1]):
            is_it = (number_nm == number).reshape(*number_nm.shape, *[1] * (old.ndim - 2))
            old = jnp.where(is_it, new_nL[:, number, None], old)
        return old

    def seen(self, room: int, window: int = 0) -> Bool[Array, "n L m"]:
        """Which of the m kept tokens each new one sees. window: tokens that it sees at most; 0: all."""
        token_nL1 = self.by_document(self.token)[..., None]
        age_nLm = (token_nL1 - jnp.arange(room, dtype=jnp.int32)) % room
        seen_nLm = age_nLm <= token_nL1
        return seen_nLm & (age_nLm < window) if window else seen_nLm

    def in_order(self, x_N: Array) -> Array:
        """Values of the tokens, in the order of the prompts' keys."""
        return x_N if self.order is None else self.by_document(x_N)[self.order].reshape(x_N.shape)

    def of_prompts(self, attend: Callable[[Array], tuple[Array, Array]], q_NHd: Array) -> tuple[Array, Array]:
        """attend(queries in the order of the prompts' keys), two arrays [N, ...], in the documents' order."""
        out, lse = attend(self.in_order(q_NHd))
        if self.order is None:
            return out, lse
        back = self._replace(order=jnp.argsort(self.order))
        return back.in_order(out), back.in_order(lse)


def query_block(step_tokens: int) -> int:
    """Tokens in a block of queries to the prompts' keys: those of DOCUMENTS_BLOCK documents."""
    return DOCUMENTS_BLOCK * step_tokens


def queries_of(keys: KeyIntervals, step_tokens: int) -> KeyIntervals:
    """The keys that each of a step's tokens sees, from those of its document."""
    if step_tokens == 1:
        return keys
    lo, hi = (jnp.repeat(x, step_tokens) for x in (keys.lo, keys.hi))
    return key_intervals(lo, hi, KEYS_BLOCK, query_block(step_tokens))


def make_prompts(
    ends: PromptEnds,
    segments: Segments,
    new_tokens: int,
    places: Int32[Array, " n"] | None = None,
    step_tokens: int = 1,
) -> Prompts:
    """Called inside the step's shard_map. ends: for this data rank's rows, equal on all its context ranks.
    places, step_tokens: see Prompts.
    """
    rows, entries = ends.first.shape
    tokens = len(segments.ids) // rows * segments.context
    documents = rows * entries // segments.context if places is None else len(places)
    start_R1 = tokens * jnp.arange(rows, dtype=jnp.int32)[:, None]
    exists_RD = ends.last >= 0
    lo, hi = (jnp.where(exists_RD, start_R1 + x, 0).reshape(-1) for x in (ends.first, ends.last + 1))
    if places is not None:
        lo, hi = (jnp.where(places >= 0, x[places], 0) for x in (lo, hi))
    elif segments.axis is not None:
        mine = jax.lax.axis_index(segments.axis) * documents
        lo, hi = (jax.lax.dynamic_slice_in_dim(x, mine, documents) for x in (lo, hi))
    return Prompts(
        ends=ends,
        at=segments.local_index(ends.last),
        keys=key_intervals(lo, hi, KEYS_BLOCK, DOCUMENTS_BLOCK),
        places=places,
        documents=documents,
        new_tokens=new_tokens,
        step_tokens=step_tokens,
    )
