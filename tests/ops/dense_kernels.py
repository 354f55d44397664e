"""Fused attention's kernels, computed densely on a CPU.

They are given what a kernel is given: the lengths of M segments and where these start. Unused segments have
length 0 and come last. Results and log-sum-exp are NaN outside all segments, so that no caller can rely on
values there.

Legend: N queries, S keys, H query heads, K key/value heads, M segments, D head dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.interpreters import mlir


class Pairs(NamedTuple):
    """allowed: pairs [N, S]. piece: each query's segment [N], -1 for none. place: its position in it [N]."""

    allowed: Any
    piece: Any
    place: Any


def pairs_of(n: int, s: int, lengths: Any, starts: Any, causal: bool) -> Pairs:
    """The allowed pairs. lengths, starts: (queries' [M], keys' [M])."""

    def places(tokens: int, start: Any, length: Any) -> Any:
        """Positions in each segment [tokens, M]; -1 outside."""
        found = jnp.arange(tokens)[:, None] - start
        return jnp.where((found >= 0) & (found < length), found, -1)

    in_q, in_k = (places(*given) for given in zip((n, s), starts, lengths, strict=True))
    allowed = (in_q[:, None] >= 0) & (in_k[None] >= 0)
    if causal:
        allowed &= in_k[None] <= in_q[:, None]
    piece = jnp.where((in_q >= 0).any(1), in_q.argmax(1), -1)
    return Pairs(allowed.any(-1), piece, in_q.max(1))


def _scores(q: Any, k: Any, v: Any, scale: float) -> Any:
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    return q, k, v, scale * jnp.einsum("nhd,shd->hns", q, k)


def forward(q: Any, k: Any, v: Any, pairs: Pairs, scale: float) -> tuple[Any, Any]:
    """(output [N, H, D], log-sum-exp [N, H])."""
    _, _, vv, s = _scores(q, k, v, scale)
    s = jnp.where(pairs.allowed, s, -jnp.inf)
    lse = jnp.log(jnp.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    out = jnp.einsum("hns,shv->nhv", jnp.exp(s - lse[..., None]), vv)
    return out.astype(q.dtype), jnp.where((pairs.piece >= 0)[:, None], lse.T, jnp.nan)


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, pairs: Pairs, scale: float) -> Any:
    """Gradients of q, k and v."""
    qq, kk, vv, s = _scores(q, k, v, scale)
    out, dout = (x.astype(jnp.float32) for x in (out, dout))
    p = jnp.where(pairs.allowed, jnp.exp(s - lse.T[..., None]), 0)
    dp = jnp.einsum("nhv,shv->hns", dout, vv)
    ds = scale * p * (dp - (out * dout).sum(-1).T[..., None])

    def sum_groups(x: Any) -> Any:
        return x.reshape(len(x), k.shape[1], -1, x.shape[-1]).sum(2)

    dq = jnp.einsum("hns,shd->nhd", ds, kk)
    dk = sum_groups(jnp.einsum("hns,nhd->shd", ds, qq))
    dv = sum_groups(jnp.einsum("hns,nhv->shv", p, dout))
    used_q, used_k = (pairs.allowed.any(axis)[:, None, None] for axis in (1, 0))
    used = (used_q, used_k, used_k)
    return tuple(jnp.where(u, x, jnp.nan).astype(q.dtype) for u, x in zip(used, (dq, dk, dv), strict=True))


def to_rows(lse: Any, pairs: Pairs, pieces: int) -> Any:
    """[N, H] -> [M, H, N], cuDNN's form in jax: row m holds segment m's queries from 0 on, then NaN."""
    rows = jnp.full((pieces + 1, lse.shape[1], len(lse)), jnp.nan, jnp.float32)
    at = jnp.where(pairs.piece >= 0, pairs.piece, pieces)
    return rows.at[at, :, jnp.maximum(pairs.place, 0)].set(lse)[:pieces]


def from_rows(rows: Any, pairs: Pairs) -> Any:
    """The inverse of to_rows."""
    return rows[jnp.maximum(pairs.piece, 0), :, jnp.maximum(pairs.place, 0)]


def under_jax(patch: Callable[[Any, str, Any], None]) -> None:
    """Replaces cuDNN under jax: jax's own code of fused attention runs on a CPU up to the cuDNN call, in
    float32 too.

    patch: setattr, or a test's. The new lowerings stay registered; jax itself has none for a CPU.
    """
    module = fused_attention_stablehlo
    patch(module, "check_cudnn_version", lambda: 91400)
    patch(module, "check_compute_capability", lambda capability: True)
    patch(module, "is_cuda_compute_capability_equal", lambda capability: False)
    patch(module, "check_layout", lambda *given: None)  # dtypes
    for name, kernel in (("fwd", _cudnn_forward), ("bwd", _cudnn_backward)):
        primitive = getattr(module, f"_dot_product_attention_{name}_p")
        mlir.register_lowering(primitive, mlir.lower_fun(kernel, multiple_results=True), platform="cpu")


def _cudnn_pairs(q: Any, k: Any, lengths: Any, offsets: Any, mask: Any) -> Pairs:
    """The allowed pairs. offsets: in elements, where tokens are heads x dim elements apart."""
    strides = (x.shape[2] * x.shape[3] for x in (q, k))
    starts = [x.reshape(-1)[:-1] // stride for x, stride in zip(offsets, strides, strict=True)]
    causal = mask is fused_attention_stablehlo.MaskType.PADDING_CAUSAL
    return pairs_of(q.shape[1], k.shape[1], [x.reshape(-1) for x in lengths], starts, causal)


def _cudnn_forward(
    q: Any, k: Any, v: Any, bias: Any, *more: Any, scale: float, mask_type: Any, **_: Any
) -> Any:
    lengths, offsets = more[:2], more[2:4]
    pairs = _cudnn_pairs(q, k, lengths, offsets, mask_type)
    out, lse = forward(q[0], k[0], v[0], pairs, scale)
    return [out[None], to_rows(lse, pairs, lengths[0].size)]


def _cudnn_backward(
    q: Any, k: Any, v: Any, bias: Any, *more: Any, scale: float, mask_type: Any, **_: Any
) -> Any:
    lengths, offsets, (rows, out, dout) = more[:2], more[2:4], more[6:9]
    pairs = _cudnn_pairs(q, k, lengths, offsets, mask_type)
    gradients = backward(q[0], k[0], v[0], out[0], from_rows(rows, pairs), dout[0], pairs, scale)
    return [x[None] for x in gradients]
