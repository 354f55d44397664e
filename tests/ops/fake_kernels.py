"""Stand-ins for library calls: Transformer Engine's, computed by dense_kernels because it is not installed;
and jax's backward rule, with the arguments of other versions."""

import inspect
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

from jaxthd.ops.attention import cudnn
from tests.ops.dense_kernels import Pairs, backward, forward, pairs_of


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
"""Transformer Engine's mesh resources that are active."""


class _MeshResource:
    """A mesh resource with no axis set."""


@contextmanager
def _global_shard_guard(resource: _MeshResource) -> Iterator[None]:
    _GUARDS.append(resource)
    yield
    _GUARDS.pop()


def _te_settings(settings: dict[str, Any], descriptor: Any) -> bool:
    """Whether the mask is causal; asserts that the other settings are right."""
    assert _GUARDS or jax.sharding.get_abstract_mesh().empty, "Global mesh resource is not set"
    assert settings["qkv_layout"] is _Kind.THD_THD_THD
    assert settings["is_training"]
    assert settings["dropout_probability"] == 0
    assert settings["max_segments_per_seq"] == descriptor[0][0].shape[1]
    assert "context_parallel_strategy" not in settings
    return settings["attn_mask_type"] is _Kind.PADDING_CAUSAL_MASK


def _shifted(x: Any, unused: int) -> Any:
    """[1, M] without its -1s; `unused` fills up the end."""
    (at,) = jnp.nonzero(x[0] >= 0, size=x.shape[1], fill_value=x.shape[1])
    return jnp.take(x[0], at, fill_value=unused)


def _te_pairs(n: int, s: int, descriptor: Any, causal: bool) -> Pairs:
    lengths, offsets = descriptor
    assert all(x.dtype == jnp.int32 and x.shape[0] == 1 for x in (*lengths, *offsets))
    assert offsets[0].shape[1] == lengths[0].shape[1] + 1
    starts = [_shifted(x, unused)[:-1] for x, unused in zip(offsets, (n, s), strict=True)]
    return pairs_of(n, s, [_shifted(x, 0) for x in lengths], starts, causal)


def _te_forward(*, qkv: Any, sequence_descriptor: Any, scaling_factor: float, **settings: Any) -> Any:
    q, k, v = (x[0] for x in qkv)
    causal = _te_settings(settings, sequence_descriptor)
    out, lse = forward(q, k, v, _te_pairs(len(q), len(k), sequence_descriptor, causal), scaling_factor)
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
    pairs = _te_pairs(len(q), len(k), sequence_descriptor, causal)
    gradients = backward(q, k, v, output[0], softmax_aux[0, :, :, 0], doutput[0], pairs, scaling_factor)
    return tuple(x[None] for x in gradients), None


def install_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs these stand-ins as Transformer Engine's modules."""
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


def other_backward_rule() -> Any:
    """Jax's own backward rule, with the arguments of the versions that are not installed: those of 0.12, or
    those before it.
    """
    rule: Any = fused_attention_stablehlo._dot_product_attention_bwd_rule

    is_newer = "score_mod" in inspect.signature(rule).parameters
    names = cudnn._OLDER if is_newer else cudnn._NEWER

    def other(*given: Any) -> Any:
        settings, res, grad_output = given[:7], given[-2], given[-1]
        if is_newer:
            return rule(*settings, None, *given[7:9], (*res[:10], (), *res[10:]), grad_output)[:-1]
        score_mod, *more = given[7:10]
        assert score_mod is None
        assert res[10] == ()
        return *rule(*settings, *more, (*res[:10], *res[11:]), grad_output), None

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    other.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return other
