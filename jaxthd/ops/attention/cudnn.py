"""The back-end "cudnn": jax's own call of cuDNN's packed attention.

jax.nn.dot_product_attention takes no packed offsets, so this calls jax._src.cudnn, which is private: before
it is used, its signatures are compared with those known here. It keeps the log-sum-exp as [M, H, N], where
row m holds the queries of packed segment m from 0 on: one array of M * H * N floats more than with other
back-ends. The backward rule takes it and the output among its residuals, so those over all ranks' keys can be
given.

Legend: N queries, S keys, H query heads, M packed segments.
"""

import inspect
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.attention.contract import AttentionBackend, AttentionShape, Call
from jaxthd.ops.attention.thd import (
    PackedSegments,
    is_seen,
    keep,
    lengths_and_offsets,
    nan_if_too_many,
    packed_segments,
    sees_a_key,
    unfit_cudnn,
    unfit_shape,
)
from jaxthd.ops.backend import RAN_ON_CPU, RAN_ON_GPU, Machine, below_capability, version_numbers

GROUPED_LEAST = (0, 11, 1)
"""The first version of jax that is right: earlier ones counted the keys' offsets in query heads (jax-ml/jax
#39521)."""
WORKSPACE_MOST = 4 * 2**30
"""The most bytes that its backward pass may take besides its results."""
_FORWARD = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "return_residual")
_SETTINGS = ["scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"]
_OLDER = (*_SETTINGS, "is_training", "return_residual", "res", "grad_output")
_NEWER = (*_SETTINGS, "score_mod", "cudnn_version", "return_residual", "res", "grad_output")
"""All arguments of the backward rule: in jax 0.10.2, where cuDNN's version is called is_training, and in
0.12.0.1."""


def _unfit(shape: AttentionShape, machine: Machine) -> str | None:
    reason = unfit_shape(shape, machine.platform) or below_capability(machine, (9, 0), "Hopper")
    if reason:
        return reason
    if shape.q_heads != shape.kv_heads and version_numbers(machine.jax) < GROUPED_LEAST:
        return f"grouped-query attention is wrong in it before jax 0.11.1, and this is {machine.jax}"
    return unfit_cudnn(machine) or _too_large(shape) or changed()


def workspace(shape: AttentionShape) -> int:
    """Bytes that its backward pass takes besides its results.

    XLA gives cuDNN one batch for each packed segment, each as long as the buffer, and cuDNN sums dq in
    float32 for all of them, twice: with 194 segments of 32 heads, 32,768 tokens and 128 dims XLA asked for
    195.5 GiB (one H200, jax 0.11.2, cuDNN 9.19, 2026-11-26).
    """
    return 8 * (shape.documents + 1) * shape.q_heads * shape.tokens * shape.head_dim


def _too_large(shape: AttentionShape) -> str | None:
    segments, size = shape.documents + 1, workspace(shape)
    if size <= WORKSPACE_MOST:
        return None
    return (
        f"its backward pass would take {size / 2**30:.2f} GiB of workspace, 8 bytes x {segments} segments x "
        f"{shape.q_heads} heads x {shape.tokens} tokens x {shape.head_dim} dims, and "
        f"{WORKSPACE_MOST / 2**30:.2f} GiB is the most that it may: lower data.max_documents or data.capacity"
    )


def changed() -> str | None:
    """Difference of jax's private functions from those that this file calls; None if there is none."""
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


def _packed(call: Call) -> PackedSegments:
    """One more than there are documents: with a single one jax would assume that nothing is packed."""
    assert call.documents is not None
    return packed_segments(call.intervals, call.documents + 1)


def _mask(call: Call) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    return MaskType.PADDING_CAUSAL if call.causal else MaskType.PADDING


def by_segment(lse_NH: Float[Array, "N H"], packed: PackedSegments) -> Float[Array, "M H N"]:
    """Row m holds the log-sum-exp of the queries of packed segment m from 0 on, and 0 behind them."""
    offset_N = jnp.arange(len(lse_NH))
    index_MN = jnp.minimum(packed.q_start[:, None] + offset_N, len(lse_NH) - 1)
    inside_MN1 = (offset_N < packed.q_length[:, None])[..., None]
    return jnp.where(inside_MN1, lse_NH[index_MN], 0).swapaxes(1, 2)


def by_query(lse_MHN: Float[Array, "M H N"], packed: PackedSegments) -> Float[Array, "N H"]:
    """The inverse of by_segment; anything for a query that is in no packed segment."""
    n = lse_MHN.shape[2]
    starts_N = jnp.zeros(n + 1, jnp.int32).at[jnp.where(packed.is_used, packed.q_start, n)].add(1)[:n]
    segment_N = jnp.maximum(jnp.cumsum(starts_N) - 1, 0)
    return lse_MHN[segment_N, :, jnp.arange(n) - packed.q_start[segment_N]]


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    packed, where = _packed(call), sees_a_key(call)
    (q_seqlen, kv_seqlen), (q_offsets, kv_offsets) = lengths_and_offsets(packed)
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
    return nan_if_too_many(keep(where, out[0]), call), keep(where, by_query(lse_MHN, packed), -jnp.inf)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    from jax._src.cudnn import fused_attention_stablehlo as module

    packed, where = _packed(call), sees_a_key(call)
    lengths, offsets = lengths_and_offsets(packed)
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
        *[()] * takes_score_mod,  # arguments of a score modifier
        by_segment(keep(where, lse), packed),
        out.astype(q.dtype)[None],
    )
    dq, dk, dv, *_ = rule(
        scale,
        42,  # seed of the dropout
        0.0,  # no dropout
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
    keys = is_seen(packed, len(k))
    return keep(where, dq[0]), keep(keys, dk[0]), keep(keys, dv[0])


BACKEND = AttentionBackend(
    "cudnn",
    _unfit,
    _forward,
    _backward,
    f"{RAN_ON_GPU}, cuDNN 9.19; jax's own code over dense kernels on a {RAN_ON_CPU}",
)
