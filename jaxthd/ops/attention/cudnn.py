"""The back-end "cudnn": jax's own call of cuDNN's packed attention. Not yet run on a GPU.

jax.nn.dot_product_attention does not hand out packed offsets, so this uses jax._src.cudnn, which is private:
its signatures are compared with those known before it is used. It keeps the log-sum-exp as [M, H, N], row m
holding piece m's queries from 0 on, so one more array of M * H * N floats exists than with other back-ends;
the backward rule takes it and the output among its residuals, so those over all ranks' keys can be given.

Legend: N queries, S keys, H query heads, M pieces.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.kernels.machine import Machine, numbers
from jaxthd.ops.attention.contract import Backend, Call, Problem
from jaxthd.ops.attention.pieces import (
    Pieces,
    all_seen,
    find_pieces,
    keep,
    lengths_and_offsets,
    seeing,
    seen,
    unfit_cudnn,
    unfit_for_fused,
)
from jaxthd.terminal.tables import size_text

GROUPED_LEAST = (0, 11, 1)
"""Before it, keys' offsets were counted in query heads (jax-ml/jax #39521)."""
WORKSPACE_MOST = 4 * 2**30
"""Bytes that its backward pass may take besides its results."""
_FORWARD = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "return_residual")
_SETTINGS = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"]
_OLDER = (*_SETTINGS, "is_training", "return_residual", "res", "grad_output")
_NEWER = (*_SETTINGS, "score_mod", "cudnn_version", "return_residual", "res", "grad_output")
"""All arguments of the backward rule, in jax 0.10.2 (is_training being cuDNN's version) and in 0.12.0.1."""


def _unfit(problem: Problem, machine: Machine) -> str | None:
    reason = unfit_for_fused(problem, machine.platform)
    if reason:
        return reason
    if machine.capability is None or machine.capability < (9, 0):
        return f"it needs compute capability 9.0 (Hopper) or later, and this is {machine.compute_capability}"
    if problem.q_heads != problem.kv_heads and numbers(machine.jax) < GROUPED_LEAST:
        return f"grouped-query attention is wrong in it before jax 0.11.1, and this is {machine.jax}"
    return unfit_cudnn(machine) or _too_large(problem) or changed()


def _too_large(problem: Problem) -> str | None:
    """XLA tells cuDNN of as many batches as there are pieces, each as long as the buffer, and cuDNN sums dq
    in float32 for all of them (XLA's and cudnn-frontend's sources, 2026-11; not yet run).
    """
    size = 4 * (problem.documents + 1) * problem.q_heads * problem.tokens * problem.head_dim
    if size <= WORKSPACE_MOST:
        return None
    return (
        f"its backward pass would take {size_text(size)} of workspace, 4 x {problem.documents + 1} pieces x "
        f"{problem.q_heads} heads x {problem.tokens} tokens x {problem.head_dim} dims, and "
        f"{size_text(WORKSPACE_MOST)} is the most that it may: lower data.max_documents or data.capacity"
    )


def changed() -> str | None:
    """How jax's private functions differ from what is called here; None where they do not."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        forward = inspect.signature(module.dot_product_attention).parameters
        backward = tuple(inspect.signature(module._dot_product_attention_bwd_rule).parameters)
        masks = module.MaskType.PADDING, module.MaskType.PADDING_CAUSAL, module.AttentionLayout.BTNH
    except (ImportError, AttributeError) as error:
        return f"jax's private cuDNN functions have changed ({error})"
    missing = [name for name in _FORWARD if name not in forward]
    if missing or backward not in (_OLDER, _NEWER) or None in masks:
        return f"jax's private cuDNN functions have changed (arguments {', '.join(missing or backward)})"
    return None


def _pieces(call: Call) -> Pieces:
    """One more than there are documents, since jax takes a single one for no packing at all."""
    assert call.documents is not None
    return find_pieces(call.intervals, call.documents + 1)


def _mask(call: Call) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    return MaskType.PADDING_CAUSAL if call.causal else MaskType.PADDING


def to_pieces(lse_NH: Float[Array, "N H"], pieces: Pieces) -> Float[Array, "M H N"]:
    """Row m holds the log-sum-exp of piece m's queries, from 0 on; 0 behind them."""
    places_N = jnp.arange(len(lse_NH))
    index_MN = jnp.minimum(pieces.q_start[:, None] + places_N, len(lse_NH) - 1)
    inside_MN1 = (places_N < pieces.q_length[:, None])[..., None]
    return jnp.where(inside_MN1, lse_NH[index_MN], 0).swapaxes(1, 2)


def from_pieces(lse_MHN: Float[Array, "M H N"], pieces: Pieces) -> Float[Array, "N H"]:
    """The inverse; anything where a query is in no piece."""
    n = lse_MHN.shape[2]
    starts_N = jnp.zeros(n + 1, jnp.int32).at[jnp.where(pieces.is_used, pieces.q_start, n)].add(1)[:n]
    piece_N = jnp.maximum(jnp.cumsum(starts_N) - 1, 0)
    return lse_MHN[piece_N, :, jnp.arange(n) - pieces.q_start[piece_N]]


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    pieces, where = _pieces(call), seeing(call)
    (q_seqlen, kv_seqlen), (q_offsets, kv_offsets) = lengths_and_offsets(pieces)
    out, lse_MHN = dot_product_attention(
        q[None],
        k[None],
        v[None],
        q_seqlen=q_seqlen,
        kv_seqlen=kv_seqlen,
        q_offsets=q_offsets,
        kv_offsets=kv_offsets,
        scale=scale,
        mask_type=_mask(call),
        return_residual=True,
    )
    return all_seen(keep(where, out[0]), call), keep(where, from_pieces(lse_MHN, pieces), -jnp.inf)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    from jax._src.cudnn import fused_attention_stablehlo as module

    pieces, where = _pieces(call), seeing(call)
    lengths, offsets = lengths_and_offsets(pieces)
    rule: Any = module._dot_product_attention_bwd_rule
    none = jnp.zeros(0, q.dtype)
    takes_score_mod = tuple(inspect.signature(rule).parameters) == _NEWER
    residuals = (
        *(x[None] for x in (q, k, v)),
        none,  # bias
        *lengths,
        *offsets,
        none,  # page tables
        none,
        *[()] * takes_score_mod,  # its arguments
        to_pieces(keep(where, lse), pieces),
        out.astype(q.dtype)[None],
    )
    dq, dk, dv, *_ = rule(
        scale,
        42,  # the seed and rate of a dropout that there is not
        0.0,
        (False, False),  # no bias, no gradient of one
        _mask(call),
        module.AttentionLayout.BTNH.value,
        None,  # no window
        *[None] * takes_score_mod,
        module.check_cudnn_version(),
        False,
        residuals,
        dout.astype(q.dtype)[None],
    )
    keys = seen(pieces, len(k))
    return keep(where, dq[0]), keep(keys, dk[0]), keep(keys, dv[0])


BACKEND = Backend("cudnn", _unfit, _forward, _backward)
