"""Stand-ins for Transformer Engine's and jax's cuDNN calls: the same arguments, computed densely on a CPU.

They know nothing but lengths and offsets, as documented; what is in no piece is NaN, in results as in the
log-sum-exp, so that nothing may rely on it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo


def _shifted(x: Any, unused: int) -> Any:
    """[1, M] without its -1s, which become `unused` behind the rest."""
    (at,) = jnp.nonzero(x[0] >= 0, size=x.shape[1], fill_value=x.shape[1])
    return jnp.take(x[0], at, fill_value=unused)


def _mask(n: int, s: int, lengths: Any, offsets: Any, causal: bool) -> tuple[Any, Any, Any]:
    """(allowed pairs [N, S], the piece [N] of each query and its place in that)."""
    assert all(x.dtype == jnp.int32 and x.shape[0] == 1 for x in (*lengths, *offsets))
    assert offsets[0].shape[1] == lengths[0].shape[1] + 1
    q_length, k_length = (_shifted(x, 0) for x in lengths)
    q_start, k_start = (_shifted(x, unused)[:-1] for x, unused in zip(offsets, (n, s), strict=True))
    in_q = jnp.arange(n)[:, None] - q_start
    in_k = jnp.arange(s)[:, None] - k_start
    in_q = jnp.where((in_q >= 0) & (in_q < q_length), in_q, -1)
    in_k = jnp.where((in_k >= 0) & (in_k < k_length), in_k, -1)
    allowed = (in_q[:, None] >= 0) & (in_k[None] >= 0)
    if causal:
        allowed &= in_k[None] <= in_q[:, None]
    piece = jnp.where((in_q >= 0).any(1), in_q.argmax(1), -1)
    return allowed.any(-1), piece, in_q.max(1)


def _scores(q: Any, k: Any, v: Any, scale: float) -> Any:
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    return q, k, v, scale * jnp.einsum("nhd,shd->hns", q, k)


def forward(q: Any, k: Any, v: Any, allowed: Any, scale: float) -> tuple[Any, Any]:
    _, _, vv, s = _scores(q, k, v, scale)
    s = jnp.where(allowed, s, -jnp.inf)
    lse = jnp.log(jnp.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
    out = jnp.einsum("hns,shv->nhv", jnp.exp(s - lse[..., None]), vv)
    return out.astype(q.dtype), lse.T


def backward(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, allowed: Any, scale: float) -> Any:
    qq, kk, vv, s = _scores(q, k, v, scale)
    out, dout = (x.astype(jnp.float32) for x in (out, dout))
    p = jnp.where(allowed, jnp.exp(s - lse.T[..., None]), 0)
    dp = jnp.einsum("nhv,shv->hns", dout, vv)
    ds = scale * p * (dp - (out * dout).sum(-1).T[..., None])

    def sum_groups(x: Any) -> Any:
        return x.reshape(len(x), k.shape[1], -1, x.shape[-1]).sum(2)

    dq = jnp.einsum("hns,shd->nhd", ds, kk)
    dk = sum_groups(jnp.einsum("hns,nhd->shd", ds, qq))
    dv = sum_groups(jnp.einsum("hns,nhv->shv", p, dout))
    used = allowed.any(1)[:, None, None], allowed.any(0)[:, None, None], allowed.any(0)[:, None, None]
    grads = (jnp.where(u, x, jnp.nan).astype(q.dtype) for u, x in zip(used, (dq, dk, dv), strict=True))
    return tuple(x[None] for x in grads)


class _Kind(Enum):
    NO_BIAS = 1
    VANILLA_SOFTMAX = 2
    THD_THD_THD = 3
    PADDING_CAUSAL_MASK = 4
    PADDING_MASK = 5


class _Descriptor:
    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Any, seq_offsets: Any) -> Any:
        return seqlens, seq_offsets


_GUARDS: list[Any] = []
"""Transformer Engine's mesh resources that are in force."""


class _MeshResource:
    """None of its axes is given."""


@contextmanager
def _global_shard_guard(resource: _MeshResource) -> Iterator[None]:
    _GUARDS.append(resource)
    yield
    _GUARDS.pop()


def _te_settings(settings: dict[str, Any], descriptor: Any) -> bool:
    """Whether the mask is causal; the rest must be as it should."""
    assert _GUARDS or jax.sharding.get_abstract_mesh().empty, "Global mesh resource is not set"
    assert settings["qkv_layout"] is _Kind.THD_THD_THD
    assert settings["is_training"]
    assert settings["dropout_probability"] == 0
    assert settings["max_segments_per_seq"] == descriptor[0][0].shape[1]
    assert "context_parallel_strategy" not in settings
    return settings["attn_mask_type"] is _Kind.PADDING_CAUSAL_MASK


def _te_forward(*, qkv: Any, sequence_descriptor: Any, scaling_factor: float, **settings: Any) -> Any:
    q, k, v = (x[0] for x in qkv)
    causal = _te_settings(settings, sequence_descriptor)
    allowed, piece, _ = _mask(len(q), len(k), *sequence_descriptor, causal)
    out, lse = forward(q, k, v, allowed, scaling_factor)
    lse = jnp.where((piece >= 0)[:, None], lse, jnp.nan)
    return out[None], lse[None, :, :, None], jnp.zeros((2, 4), jnp.uint32)


def _te_backward(
    *,
    qkv: Any,
    softmax_aux: Any,
    output: Any,
    doutput: Any,
    sequence_descriptor: Any,
    scaling_factor: float,
    **settings: Any,
) -> Any:
    q, k, v = (x[0] for x in qkv)
    assert output.dtype == doutput.dtype == q.dtype
    assert softmax_aux.dtype == jnp.float32
    causal = _te_settings(settings, sequence_descriptor)
    allowed, _, _ = _mask(len(q), len(k), *sequence_descriptor, causal)
    lse = softmax_aux[0, :, :, 0]
    return backward(q, k, v, output[0], lse, doutput[0], allowed, scaling_factor), None


def _jax_forward(query: Any, key: Any, value: Any, *, scale: float, mask_type: Any, **given: Any) -> Any:
    assert given["return_residual"]
    q, k, v = query[0], key[0], value[0]
    lengths, offsets = (tuple(given[f"{x}_{name}"] for x in ("q", "kv")) for name in ("seqlen", "offsets"))
    causal = mask_type is fused_attention_stablehlo.MaskType.PADDING_CAUSAL
    allowed, piece, place = _mask(len(q), len(k), lengths, offsets, causal)
    out, lse = forward(q, k, v, allowed, scale)
    pieces = lengths[0].shape[1]
    residual = jnp.full((pieces + 1, q.shape[1], len(q)), jnp.nan)
    residual = residual.at[jnp.where(piece >= 0, piece, pieces), :, jnp.maximum(place, 0)].set(lse)
    return out[None], residual[:pieces]


def _jax_backward(
    scale: float,
    seed: int,
    dropout_rate: float,
    variadic_args: Any,
    mask_type: Any,
    layout: int,
    sliding_window_length: Any,
    is_training: Any,
    return_residual: bool,
    res: Any,
    grad_output: Any,
) -> Any:
    assert (dropout_rate, variadic_args, layout, sliding_window_length) == (0, (False, False), 0, None)
    assert not return_residual
    q, k, v, out = res[0][0], res[1][0], res[2][0], res[11][0]
    assert out.dtype == grad_output.dtype == q.dtype
    causal = mask_type is fused_attention_stablehlo.MaskType.PADDING_CAUSAL
    allowed, piece, place = _mask(len(q), len(k), res[4:6], res[6:8], causal)
    assert res[10].shape == (res[4].shape[1], q.shape[1], len(q))
    lse = res[10][jnp.maximum(piece, 0), :, jnp.maximum(place, 0)]
    return *backward(q, k, v, out, lse, grad_output[0], allowed, scale), *[None] * 7


def _newer_jax_backward(
    scale: float,
    seed: int,
    dropout_rate: float,
    variadic_args: Any,
    mask_type: Any,
    layout: int,
    sliding_window_length: Any,
    score_mod: Any,
    cudnn_version: int,
    return_residual: bool,
    res: Any,
    grad_output: Any,
) -> Any:
    assert score_mod is None
    assert res[10] == ()
    settings = scale, seed, dropout_rate, variadic_args, mask_type, layout, sliding_window_length
    older = (*res[:10], *res[11:])
    return *_jax_backward(*settings, cudnn_version, return_residual, older, grad_output), None


def install(monkeypatch: pytest.MonkeyPatch, *, newer_jax: bool = False) -> None:
    """Both libraries' functions are replaced by these; newer_jax: with the arguments of jax 0.12."""
    package, attention, extensions, sharding = (
        ModuleType(f"transformer_engine.jax{x}")
        for x in ("", ".attention", ".cpp_extensions.attention", ".sharding")
    )
    sharding.MeshResource, sharding.global_shard_guard = _MeshResource, _global_shard_guard  # type: ignore[attr-defined]
    for name in ("AttnBiasType", "AttnMaskType", "AttnSoftmaxType", "QKVLayout"):
        setattr(attention, name, _Kind)
    attention.SequenceDescriptor = _Descriptor  # type: ignore[attr-defined]
    extensions.fused_attn_fwd, extensions.fused_attn_bwd = _te_forward, _te_backward  # type: ignore[attr-defined]
    for module in (ModuleType("transformer_engine"), package, attention, extensions, sharding):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.cpp_extensions", ModuleType("cpp_extensions"))
    module, backward_rule = fused_attention_stablehlo, _newer_jax_backward if newer_jax else _jax_backward
    monkeypatch.setattr(module, "dot_product_attention", _jax_forward)
    monkeypatch.setattr(module, "_dot_product_attention_bwd_rule", backward_rule)
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91400)
