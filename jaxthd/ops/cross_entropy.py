"""Log-probabilities of the supervised tokens, without ever holding the logits.

Only supervised positions reach the vocabulary, a block of them at a time. An online log-sum-exp runs over
blocks of the vocabulary, and keeps the likeliest entries so far if asked to. The backward pass computes the
blocks again. The cost follows the number of supervised positions on the rank; that number has no bound, so
none is dropped.

The vocabulary may be sharded over ranks that hold the same tokens. Each finds (maximum, sum of exponentials,
target's logit, likeliest entries) over its entries, and one exchange merges these.

Legend: N tokens, D model dim, V vocabulary entries of this rank, b blocks of positions, r rows of a block,
v vocabulary entries of a block, k likeliest entries.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.ops.numerics import accumulation_dtype


class HeadInputs(NamedTuple):
    """Hidden states of tokens, this rank's entries of the head, the tokens' targets, and which of these
    count."""

    h: Float[Array, "N D"]
    head: Float[Array, "V D"]
    targets: Int32[Array, " N"]
    supervised: Bool[Array, " N"]


class HeadBlocks(NamedTuple):
    """Positions and vocabulary entries that are multiplied at a time.

    axes: mesh axes over which the vocabulary is sharded, rank-major. temperature: of the softmax.
    """

    rows: int
    entries: int
    axes: tuple[str, ...] = ()
    temperature: float = 1.0


def supervised_log_probs(inputs: HeadInputs, blocks: HeadBlocks) -> Float[Array, " N"]:
    """log softmax(h head^T / temperature)[target] at supervised positions, 0 elsewhere; promote(float32, h's
    dtype). Differentiable in h and head.
    """
    log_probs_N: Array = _log_probs(blocks, *inputs)
    return log_probs_N


def supervised_scores(inputs: HeadInputs, blocks: HeadBlocks) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
    """As supervised_log_probs, and whether no entry is likelier than the target (False elsewhere). Not
    differentiable."""
    return _forward_scores(blocks, *inputs)[:2]


class TokenScores(NamedTuple):
    """log_probs: of the targets. top_ids, top_log_probs: the k likeliest entries of the vocabulary, the
    likeliest first, of equals the lowest id. promote(float32, the hidden states' dtype); 0 where nothing is
    supervised. All are of the softmax at the temperature.
    """

    log_probs: Float[Array, "*tokens"]
    top_ids: Int32[Array, "*tokens k"]
    top_log_probs: Float[Array, "*tokens k"]


def supervised_top_k(inputs: HeadInputs, blocks: HeadBlocks, top_k: int) -> TokenScores:
    """As supervised_log_probs, and the top_k likeliest entries: at most as many as all ranks hold. Not
    differentiable."""
    logp_N, _, lse_br, top = _forward_scores(blocks, *inputs, top_k)
    rows_br, _ = _rows(inputs.supervised, blocks.rows)
    ids_Nk = jnp.zeros((len(logp_N), top_k), jnp.int32)
    top_Nk = ids_Nk.astype(logp_N.dtype)
    if top is not None:
        logits_brk, ids_brk = top
        ids_Nk = ids_Nk.at[rows_br].set(ids_brk, mode="drop")
        top_Nk = top_Nk.at[rows_br].set(logits_brk - lse_br[..., None], mode="drop")
    return TokenScores(logp_N, ids_Nk, top_Nk)


Entries = tuple[Array, Array]
"""(logits, ids) of entries of the vocabulary, [..., entries]."""


def _rows(supervised_N: Array, row_block: int) -> tuple[Array, Array]:
    """(the supervised positions, filled up with N [b, r], the number of blocks in use)."""
    n = len(supervised_N)
    rows = jnp.nonzero(supervised_N, size=n + -n % row_block, fill_value=n)[0]
    return rows.reshape(-1, row_block), -(-supervised_N.sum() // row_block)


def _take(x_ND: Array, rows_r: Array) -> Array:
    return jnp.take(x_ND, rows_r, axis=0, mode="fill", fill_value=0)


def _vocab_blocks(vocab: int, vocab_block: int) -> tuple[Array, int]:
    """(the first entry that each block counts, the block size). The last block reaches back to be full."""
    size = min(vocab_block, vocab)
    return jnp.arange(0, vocab, size), size


def _logits(
    h_rD: Array, head_VD: Array, first: Array, size: int, temperature: float
) -> tuple[Array, Array, Array]:
    """(a block's logits over the temperature, -inf for entries that an earlier block counted; its entries'
    ids; its rows of the head)."""
    acc = accumulation_dtype(h_rD)
    start = jnp.minimum(first, len(head_VD) - size)
    head_vD = jax.lax.dynamic_slice_in_dim(head_VD, start, size)
    ids_v = start + jnp.arange(size)
    logits_rv = jnp.einsum("rd,vd->rv", h_rD, head_vD, preferred_element_type=acc)
    if temperature != 1:
        logits_rv /= temperature
    return jnp.where(ids_v >= first, logits_rv, -jnp.inf), ids_v, head_vD


def _local(targets_N: Array, head_VD: Array, axes: tuple[str, ...]) -> Array:
    """The targets as numbers of this rank's entries; outside 0 .. V - 1 where another rank has them."""
    return targets_N - jax.lax.axis_index(axes) * len(head_VD)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(blocks: HeadBlocks, h_ND, head_VD, targets_N, supervised_N):
    return _forward_scores(blocks, h_ND, head_VD, targets_N, supervised_N)[0]


def _forward(blocks, h, head, targets, supervised):
    # A frozen head's gradient is skipped here: the compiler would not remove it from nested loops.
    wants_head = () if head.perturbed else None
    given = [x.value for x in (h, head, targets, supervised)]
    logp_N, _, lse_br, _ = _forward_scores(blocks, *given)
    return logp_N, (*given, lse_br, wants_head)


def _forward_scores(blocks: HeadBlocks, h_ND, head_VD, targets_N, supervised_N, top_k=0):
    row_block, vocab_block, axes, temperature = blocks
    acc = accumulation_dtype(h_ND)
    rows_br, used = _rows(supervised_N, row_block)
    firsts, size = _vocab_blocks(len(head_VD), vocab_block)
    local_N = _local(targets_N, head_VD, axes)

    def none(*dims: int) -> Entries:
        """As many entries as are kept, of log-probability -inf."""
        return jnp.full((*dims, top_k), -jnp.inf, acc), jnp.zeros((*dims, top_k), jnp.int32)

    def row_step(b: Array, found: tuple) -> tuple:
        """Writes the softmax's sums over the vocabulary for block b of positions."""
        h_rD, target_r = _take(h_ND, rows_br[b]), _take(local_N, rows_br[b])

        def vocab_step(carry: tuple, first: Array) -> tuple[tuple, None]:
            """Adds a block of the vocabulary to the online softmax."""
            max_r, sum_r, target_logit_r, top = carry
            logits_rv, ids_v, _ = _logits(h_rD, head_VD, first, size, temperature)
            new_max_r = jnp.maximum(max_r, logits_rv.max(-1))
            sum_r = sum_r * jnp.exp(max_r - new_max_r) + jnp.exp(logits_rv - new_max_r[:, None]).sum(-1)
            hit_rv = (ids_v == target_r[:, None]) & (ids_v >= first)
            target_logit_r += jnp.where(hit_rv, logits_rv, 0).sum(-1)
            if top_k:
                ids_rv = jnp.broadcast_to(ids_v.astype(jnp.int32), logits_rv.shape)
                top = _likeliest([top, (logits_rv, ids_rv)], top_k)
            return (new_max_r, sum_r, target_logit_r, top), None

        zero_r = jnp.zeros(row_block, acc)
        top = none(row_block) if top_k else None
        of_block, _ = jax.lax.scan(vocab_step, (zero_r - jnp.inf, zero_r, zero_r, top), firsts)
        return jax.tree.map(lambda all_br, x_r: all_br.at[b].set(x_r), found, of_block)

    zeros_br = jnp.zeros(rows_br.shape, acc)
    start = zeros_br, zeros_br + 1, zeros_br, none(*rows_br.shape) if top_k else None
    max_br, sum_br, target_logit_br, top = jax.lax.fori_loop(0, used, row_step, start)
    if axes:
        local_max_br, max_br = max_br, jax.lax.pmax(max_br, axes)
        sum_br = jax.lax.psum(sum_br * jnp.exp(local_max_br - max_br), axes)
        target_logit_br = jax.lax.psum(target_logit_br, axes)
        if top is not None:
            logits_brk, ids_brk = top
            ids_brk += jax.lax.axis_index(axes) * len(head_VD)
            of_ranks = zip(*jax.lax.all_gather((logits_brk, ids_brk), axes), strict=True)
            top = _likeliest(list(of_ranks), top_k)
    lse_br = max_br + jnp.log(sum_br)
    logp_N = jnp.zeros(len(h_ND), acc).at[rows_br].set(target_logit_br - lse_br, mode="drop")
    best_N = jnp.zeros(len(h_ND), bool).at[rows_br].set(target_logit_br >= max_br, mode="drop")
    return logp_N, best_N, lse_br, top


def _likeliest(found: Sequence[Entries], k: int) -> Entries:
    """The k highest entries, the highest first, of equals the lowest id. Each of `found` has higher ids than
    the one before it, and its equals in the order of their ids.
    """
    logits, ids = (jnp.concatenate(x, axis=-1) for x in zip(*found, strict=True))
    top, at = jax.lax.top_k(logits, k)  # of equals the first
    return top, jnp.take_along_axis(ids, at, axis=-1)


def _backward(blocks: HeadBlocks, residuals, dlogp_N):
    row_block, vocab_block, axes, temperature = blocks
    h_ND, head_VD, targets_N, supervised_N, lse_br, wants_head = residuals
    acc = accumulation_dtype(h_ND)
    rows_br, used = _rows(supervised_N, row_block)
    firsts, size = _vocab_blocks(len(head_VD), vocab_block)
    local_N = _local(targets_N, head_VD, axes)
    # Every rank's cotangent of the replicated result is a partial sum.
    dlogp_N = jax.lax.psum(dlogp_N, axes)
    if temperature != 1:
        dlogp_N /= temperature

    def row_step(b: Array, carry: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        """Writes dh of block b of positions, and adds what it gives to dhead."""
        dh_ND, dhead_VD = carry
        h_rD, target_r, dlogp_r1 = (_take(x, rows_br[b]) for x in (h_ND, local_N, dlogp_N[:, None]))

        def vocab_step(carry: tuple[Array, Array | None], first: Array) -> tuple[Any, None]:
            """Adds what a block of the vocabulary gives to dh, and its rows of dhead."""
            dh_rD, dhead_VD = carry
            logits_rv, ids_v, head_vD = _logits(h_rD, head_VD, first, size, temperature)
            hit_rv = (ids_v == target_r[:, None]) & (ids_v >= first)
            dlogits_rv = (dlogp_r1 * (hit_rv - jnp.exp(logits_rv - lse_br[b][:, None]))).astype(h_ND.dtype)
            dh_rD += jnp.einsum("rv,vd->rd", dlogits_rv, head_vD, preferred_element_type=acc)
            if dhead_VD is not None:
                dhead_vD = jnp.einsum("rv,rd->vd", dlogits_rv, h_rD, preferred_element_type=acc)
                old_vD = jax.lax.dynamic_slice_in_dim(dhead_VD, ids_v[0], size)
                dhead_VD = jax.lax.dynamic_update_slice_in_dim(dhead_VD, old_vD + dhead_vD, ids_v[0], 0)
            return (dh_rD, dhead_VD), None

        (dh_rD, dhead_VD), _ = jax.lax.scan(vocab_step, (jnp.zeros(h_rD.shape, acc), dhead_VD), firsts)
        return dh_ND.at[rows_br[b]].set(dh_rD.astype(dh_ND.dtype), mode="drop"), dhead_VD

    dhead_VD = None if wants_head is None else jnp.zeros(head_VD.shape, acc)
    dh_ND, dhead_VD = jax.lax.fori_loop(0, used, row_step, (jnp.zeros_like(h_ND), dhead_VD))
    return dh_ND, None if dhead_VD is None else dhead_VD.astype(head_VD.dtype), None, None


_log_probs.defvjp(_forward, _backward, symbolic_zeros=True)
