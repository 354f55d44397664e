"""The gated delta rule of documents that are split over context ranks, while others are whole
(packing/split_documents.py).

Each context chunk of a split document runs from a zero state, as if it were a document, together with the
whole documents. The rule is affine in the state H that enters the chunk. A token gets r . H more, and the
state after it M H more: r and M are what the rule gives where the state begins as the identity and nothing is
written. So a second run, from the identity, gives r of every token and M of every chunk. H comes from what
all chunks of the document do to a state: 2 * context maps for each split document. If no document is split,
nothing of this is computed or exchanged.

Legend: as rule.py; E context chunks of split documents on this rank.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.delta.rule import DeltaInputs, Given, gated_delta_rule
from jaxthd.ops.numerics import accumulation_dtype, exact_product
from jaxthd.ops.scan.prefixes import numbers_by_scan_chunk, of_states
from jaxthd.ops.scan.ssd import by_scan_chunk
from jaxthd.ops.scan.state_passing import MatrixMap, entering_states
from jaxthd.packing.segments import Segments


def outputs_and_states(
    inputs: DeltaInputs, segments: Segments, at_D: Int32[Array, " D"], *, chunk: int
) -> tuple[Float[Array, "N H V"], Float[Array, "D H K V"]]:
    """gated_delta_rule under every layout."""
    segments = segments.for_mixers
    if segments.splits is None:
        return gated_delta_rule(inputs, segments, at_D, chunk=chunk)
    own = segments.splits.on_rank
    ends_E = own.local_index(segments.splits.end)
    at = jnp.concatenate([at_D, ends_E])
    y_NHV, states = gated_delta_rule(inputs, own, at, chunk=chunk)
    state_DHKV, added_EHKV = jnp.split(states, [len(at_D)])

    def passed(inputs: DeltaInputs, added_EHKV: Array) -> tuple[Array, Array]:
        """Additions of the states that enter context chunks."""
        return _from_entering_states(inputs, added_EHKV, segments, at, chunk)

    def none(inputs: DeltaInputs, added_EHKV: Array) -> tuple[Array, Array]:
        """Zeros in their place: no document is split."""
        return jnp.zeros_like(y_NHV), jnp.zeros_like(state_DHKV)

    more_NHV, more_DHKV = jax.lax.cond(segments.splits.width > 0, passed, none, inputs, added_EHKV)
    return y_NHV + more_NHV, state_DHKV + more_DHKV


def _from_entering_states(
    inputs: DeltaInputs, added_EHKV: Array, segments: Segments, at: Array, chunk: int
) -> tuple[Array, Array]:
    """Additions of the states that enter context chunks of split documents to outputs, and to the states
    after the first of the tokens `at`; the last of these are the chunks' ends.
    """
    split, (chunks_E, heads, key_dim, _) = segments.splits, added_EHKV.shape
    assert split is not None
    acc, number_N = accumulation_dtype(inputs.v), split.chunk_of_token
    identity = Given(
        jnp.broadcast_to(jnp.eye(key_dim, dtype=acc), (chunks_E, heads, key_dim, key_dim)), number_N
    )
    nothing = inputs._replace(v=jnp.zeros((*inputs.v.shape[:2], key_dim), inputs.v.dtype))
    alone = replace(split.on_rank, prefixes=None)
    reads_NHK, factors = gated_delta_rule(nothing, alone, at, chunk=chunk, given=identity)
    factor_DHKK, factor_EHKK = jnp.split(factors, [len(at) - chunks_E])
    exists_E111 = (at[-chunks_E:] >= 0)[:, None, None, None]
    entering_EHKV = entering_states(MatrixMap(factor_EHKK, added_EHKV).where(exists_E111), segments)

    tokens = segments.row_length
    chunk = min(chunk, tokens)
    number_CQ = numbers_by_scan_chunk(number_N, alone, chunk)
    reads_CHQK = by_scan_chunk(reads_NHK.astype(inputs.q.dtype), segments.rows, chunk)
    more_CHQ1V = of_states(reads_CHQK, entering_EHKV.mT, number_CQ)
    more_RLHV = more_CHQ1V[..., 0, :].swapaxes(1, 2).reshape(segments.rows, -1, *inputs.v.shape[1:])
    number_D = jnp.where(at >= 0, number_N[at], -1)[: len(factor_DHKK)]
    carried_DHKV = exact_product(factor_DHKK, entering_EHKV[number_D])
    more_DHKV = jnp.where((number_D >= 0)[:, None, None, None], carried_DHKV, 0)
    return more_RLHV[:, :tokens].reshape(inputs.v.shape), more_DHKV
