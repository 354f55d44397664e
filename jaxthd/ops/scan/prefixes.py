"""The scan of documents that continue others (packing/prefixes.py): what a prefix's state adds to them.

The scan is linear in the state that a document starts from. So documents and their prefixes are scanned as if
all stood alone, by any back-end, and a token t of a document that continues a prefix gets

    exp(sum of dt a from the document's first token to t) C_t . H

more, where H is the state at the prefix's end. Context ranks exchange the H of all prefixes; how much that is
does not depend on the number of tokens. The decay from a document's start is itself the state of a scan, of
one number a head, and crosses scan chunks and context ranks as states do.

Legend: as ops/scan/ssd.py; E prefixes of all rows; M pairs of a scan chunk and a prefix that some of its
tokens continue.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.decays import decays_since_start_here
from jaxthd.ops.scan.ssd import (
    ScanChunks,
    in_scan_chunks,
    matmul,
    ssd_and_states,
    states_between,
)
from jaxthd.ops.scan.state_passing import DecayMap
from jaxthd.packing.segments import Segments


def ssd_and_prefix_outputs(
    inputs: ScanInputs, segments: Segments, *, chunk: int
) -> tuple[Float[Array, "N H P"], Float[Array, "N H P"]]:
    """Output of ssd where every document stands alone; and what documents get from their prefixes.

    Arguments and dtypes: as ssd's; segments.prefixes is not None.
    """
    own = segments if segments.splits is None else segments.splits.on_rank
    assert own.prefixes is not None
    ends = own.local_index(own.prefixes.last)
    y_NHP, state_EHPS = ssd_and_states(inputs, segments, ends, chunk=chunk)
    if own.context > 1:
        state_EHPS = jax.lax.psum(state_EHPS, own.axis)
    length = len(inputs.x) // (own.rows * own.context_chunks)
    chunks = in_scan_chunks(inputs, own, min(chunk, length))
    decay_CGhQ = decays_since_start(chunks, own)
    return y_NHP, from_states(inputs, chunks, decay_CGhQ, state_EHPS, own.prefixes.of_token, own)


def from_states(
    inputs: ScanInputs,
    chunks: ScanChunks,
    decay_CGhQ: Array,
    state_EHPS: Array,
    of_token_N: Int32[Array, " N"],
    segments: Segments,
) -> Float[Array, "N H P"]:
    """Additions of the states that documents start from to outputs. decay: from a document's start to the
    token. of_token: the number of each token's state; -1 for none."""
    number_CQ = numbers_by_scan_chunk(of_token_N, segments, chunks.positions_CQ.shape[1])
    more_CGQhP = of_states(chunks.c_CGQS, state_EHPS, number_CQ)
    more_CGQhP = more_CGQhP * decay_CGhQ.swapaxes(2, 3)[..., None]
    context_chunks, x_NHP = segments.rows * segments.context_chunks, inputs.x
    more_ZLHP = more_CGQhP.swapaxes(1, 2).reshape(context_chunks, -1, *x_NHP.shape[1:])
    return more_ZLHP[:, : len(x_NHP) // context_chunks].reshape(x_NHP.shape)


def numbers_by_scan_chunk(
    of_token_N: Int32[Array, " N"], segments: Segments, chunk: int
) -> Int32[Array, "C Q"]:
    """The number of the state that each token's document starts from, from 1; 0 for none. of_token: the same
    from 0; -1 for none. The filling continues the last token's document.
    """
    of_token_ZL = of_token_N.reshape(segments.rows * segments.context_chunks, -1) + 1
    filling = (0, 0), (0, -of_token_ZL.shape[1] % chunk)
    return jnp.pad(of_token_ZL, filling, mode="edge").reshape(-1, chunk)


def of_states(c_CGQS: Array, state_EHPS: Array, prefix_CQ: Array) -> Array:
    """C_t . H of the token's prefix, [C, G, Q, h, P]; 0 for tokens without one.

    The tokens that continue a prefix are one run, so there are at most as many pairs of a scan chunk and a
    prefix as scan chunks and prefixes.
    prefix: the number of each token's prefix, from 1; or 0.
    """
    (scan_chunks, groups, tokens, state), prefixes = c_CGQS.shape, len(state_EHPS)
    heads = state_EHPS.shape[1] // groups, state_EHPS.shape[2]
    state_EGShP = jnp.moveaxis(state_EHPS.reshape(prefixes, groups, *heads, state), -1, 2)
    i = jnp.arange(tokens)
    is_repeated_CQ = ((prefix_CQ[:, :, None] == prefix_CQ[:, None]) & (i < i[:, None])).any(-1)
    pairs = min(scan_chunks + prefixes, prefix_CQ.size)
    is_first_CQ = (prefix_CQ > 0) & ~is_repeated_CQ
    chunk_M, token_M = jnp.nonzero(is_first_CQ, size=pairs, fill_value=(scan_chunks, 0))
    here_M = jnp.minimum(chunk_M, scan_chunks - 1)
    prefix_M = prefix_CQ[here_M, token_M]
    entering_MGSI = jax.lax.collapse(state_EGShP[prefix_M - 1].astype(c_CGQS.dtype), 3)
    y_MGQI = matmul(c_CGQS[here_M], entering_MGSI)
    continues_MQ = prefix_CQ[here_M] == prefix_M[:, None]
    y_MGQI = jnp.where(continues_MQ[:, None, :, None], y_MGQI, 0)
    y_CGQI = jnp.zeros((scan_chunks, *y_MGQI.shape[1:]), y_MGQI.dtype).at[chunk_M].add(y_MGQI, mode="drop")
    return jnp.where((prefix_CQ > 0)[:, None, :, None], y_CGQI, 0).reshape(*y_CGQI.shape[:3], *heads)


def decays_since_start(chunks: ScanChunks, segments: Segments) -> Array:
    """exp(sum of decay from the first token of the token's document to the token), [C, G, h, Q].

    Sums are over terms of one sign, as in ssd.py.
    """
    i = jnp.arange(chunks.positions_CQ.shape[1])
    here_CGhQ = decays_since_start_here(chunks.decay_CGhQ, chunks.positions_CQ)
    began_before_CQ = chunks.positions_CQ > i
    passes_C11 = began_before_CQ[:, -1, None, None]
    to_end_CGh = here_CGhQ[..., -1]
    maps = DecayMap(
        jnp.where(passes_C11, to_end_CGh, 0), jnp.where(passes_C11, 0, to_end_CGh)[:, :, None, :, None]
    )
    before_CGh = states_between(maps, segments)[:, :, 0, :, 0]
    return here_CGhQ * jnp.where(began_before_CQ[:, None, None], before_CGh[..., None], 1)
