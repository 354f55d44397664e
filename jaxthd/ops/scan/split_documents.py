"""The scan of documents that are split over context ranks, while others are whole
(packing/split_documents.py).

Each context chunk of a split document is scanned from a zero state, as if it were a document, by any
back-end, together with the whole documents. The scan is linear in the state that enters it. So a token t gets

    exp(sum of dt a from the chunk's first token to t) C_t . H

more, where H is the state that enters the chunk: as ops/scan/prefixes.py has it for documents that continue a
prefix. H comes from what all chunks of the document do to a state, as in state_passing.py: 2 * context maps
for each split document. If no document is split, nothing of this is computed or exchanged.

Legend: as ops/scan/ssd.py; E context chunks of split documents on this rank.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.prefixes import decays_since_start, from_states
from jaxthd.ops.scan.ssd import in_scan_chunk, in_scan_chunks, ssd_and_states
from jaxthd.ops.scan.state_passing import DecayMap, StateMap, gathered_chunks, states_between_chunks
from jaxthd.packing.segments import Segments


def from_entering_states(
    inputs: ScanInputs, segments: Segments, at_D: Int32[Array, " D"], *, chunk: int
) -> tuple[Float[Array, "N H P"], Float[Array, "D H P S"]]:
    """Additions of the states that enter context chunks of split documents to outputs, and to the states
    after the tokens at_D; 0 elsewhere.

    Arguments and dtypes: as ssd_and_states has them; segments.splits is not None.
    """
    split, tokens = segments.splits, segments.row_length
    assert split is not None
    heads, number_N = inputs.x.shape[1:], split.chunk_of_token

    def passed(inputs: ScanInputs) -> tuple[Array, Array]:
        """Additions of the states that enter context chunks."""
        ends_E = split.on_rank.local_index(split.end)
        _, state_EHPS = ssd_and_states(inputs, split.on_rank, ends_E, chunk=chunk)
        chunks = in_scan_chunks(inputs, split.on_rank, min(chunk, tokens))
        decay_CGhQ = decays_since_start(chunks, split.on_rank)
        entering_EHPS = _entering_states(_decay_at(decay_CGhQ, ends_E, tokens), state_EHPS, segments)
        more_NHP = from_states(inputs, chunks, decay_CGhQ, entering_EHPS, number_N, split.on_rank)
        decay_DH11 = _decay_at(decay_CGhQ, at_D, tokens).reshape(len(at_D), heads[0], 1, 1)
        number_D = jnp.where(at_D >= 0, number_N[at_D], -1)
        more_DHPS = jnp.where((number_D >= 0).reshape(-1, 1, 1, 1), decay_DH11 * entering_EHPS[number_D], 0)
        return more_NHP, more_DHPS

    def none(inputs: ScanInputs) -> tuple[Array, Array]:
        """Zeros in their place: no document is split."""
        acc, state = accumulation_dtype(inputs.x), inputs.b.shape[-1]
        return jnp.zeros(inputs.x.shape, acc), jnp.zeros((len(at_D), *heads, state), acc)

    more: tuple[Array, Array] = jax.lax.cond(split.width > 0, passed, none, inputs)
    return more


def outputs_and_states(
    inputs: ScanInputs, segments: Segments, at_D: Int32[Array, " D"], *, chunk: int
) -> tuple[Float[Array, "N H P"], Float[Array, "D H P S"]]:
    """ssd_and_states under every layout."""
    segments = segments.for_mixers
    if segments.splits is None:
        return ssd_and_states(inputs, segments, at_D, chunk=chunk)
    y_NHP, state_DHPS = ssd_and_states(inputs, segments.splits.on_rank, at_D, chunk=chunk)
    more_NHP, more_DHPS = from_entering_states(inputs, segments, at_D, chunk=chunk)
    return y_NHP + more_NHP, state_DHPS + more_DHPS


def _decay_at(decay_CGhQ: Array, at_E: Array, tokens: int) -> Array:
    """The decays of tokens of this rank, [E, G, h]; 1 for -1."""
    c_E, q_E = in_scan_chunk(at_E, tokens, decay_CGhQ.shape[-1])
    return jnp.where((at_E >= 0)[:, None, None], decay_CGhQ[c_E, :, :, q_E], 1)


def _entering_states(decay_EGh: Array, state_EHPS: Array, segments: Segments) -> Array:
    """The state that enters each context chunk, [E, H, P, S], from all chunks' decays and final states."""
    groups_and_heads = decay_EGh.shape[1:]
    state_EGShP = jnp.moveaxis(state_EHPS.reshape(-1, *groups_and_heads, *state_EHPS.shape[2:]), -1, 2)
    entering_EGShP = entering_states(DecayMap(decay_EGh, state_EGShP), segments)
    return jnp.moveaxis(entering_EGShP, 2, -1).reshape(state_EHPS.shape)


def entering_states(maps: StateMap, segments: Segments) -> Array:
    """The state that enters each context chunk of split documents, shaped as maps.added.

    maps: what each of them does to a state, leaves [E, ...]; 0 where there is no such chunk. One document of
    each row after the other, as many as there are.
    """
    assert segments.splits is not None
    chunk_RK = segments.splits.slots.chunk

    def by_document(x_E: Array) -> Array:
        """[E, ...] -> [K, R, 2, ...]."""
        return x_E.reshape(*chunk_RK.shape, 2, *x_E.shape[1:]).swapaxes(0, 1)

    def exchanged(maps_R2: StateMap) -> Array:
        """The states [R, 2, ...] that enter this rank's two chunks of a document of each row."""
        everywhere = jax.tree.map(lambda x: gathered_chunks(x, 1, segments)[0], maps_R2)
        return states_between_chunks(everywhere, segments)

    def document(_: None, given: tuple[Array, StateMap]) -> tuple[None, Array]:
        """Exchanges the maps of the next document of each row, if any row has one."""
        exists, maps_R2 = given
        return None, jax.lax.cond(exists, exchanged, lambda maps: jnp.zeros_like(maps.added), maps_R2)

    by_number = (chunk_RK > 0).any(0), jax.tree.map(by_document, maps)
    _, before_KR2 = jax.lax.scan(document, None, by_number)
    return before_KR2.swapaxes(0, 1).reshape(maps.added.shape)
