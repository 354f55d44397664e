"""The back-end "te": Transformer Engine's fused attention for JAX, by its low-level calls. Not yet run on a
GPU.

It is given the packed format (ops/attention/thd.py) with one buffer at a time: with more, its results are
wrong (marin-community/marin #5749). Inside the manual shard_map it computes the rank's own share; its own
context parallelism is not used. The log-sum-exp is float32 [1, N, H, 1] from cuDNN 9.6 on. The backward call
takes it and the output as arguments, so those over all ranks' keys can be given.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

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
from jaxthd.ops.backend import Machine, version_numbers

LEAST = (2, 18)
"""Earlier versions gave wrong gradients on compute capability 12.0."""
BAD = {"12.0": "gradients of packed attention were measured 8 to 960 times off in every layer"}
"""Known faults, by compute capability. There the JAX side allocates the log-sum-exp in another layout than
the kernel's."""


def _unfit(shape: AttentionShape, machine: Machine) -> str | None:
    reason = unfit_shape(shape, machine.platform)
    if reason:
        return reason
    if machine.transformer_engine is None:
        return "transformer-engine is not installed; pip install 'transformer-engine[jax]>=2.18'"
    if version_numbers(machine.transformer_engine) < LEAST:
        return f"it needs transformer-engine 2.18 or later, and this is {machine.transformer_engine}"
    if machine.compute_capability in BAD:
        return f"{BAD[machine.compute_capability]} on compute capability {machine.compute_capability}"
    return unfit_cudnn(machine)


def _arguments(call: Call, scale: float) -> tuple[PackedSegments, Any, dict[str, Any]]:
    """(the packed segments, their sequence descriptor, the other arguments of both calls)."""
    from transformer_engine.jax.attention import (
        AttnBiasType,
        AttnMaskType,
        AttnSoftmaxType,
        QKVLayout,
        SequenceDescriptor,
    )

    assert call.documents is not None
    packed = packed_segments(call.intervals, call.documents)
    mask = AttnMaskType.PADDING_CAUSAL_MASK if call.causal else AttnMaskType.PADDING_MASK
    settings = {
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": mask,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "qkv_layout": QKVLayout.THD_THD_THD,
        "scaling_factor": scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": call.documents,
    }
    return packed, SequenceDescriptor.from_seqlens_and_offsets(*lengths_and_offsets(packed)), settings


def _on_one_rank() -> Any:
    """Tells the library to shard nothing. Without it, its calls fail under a mesh, even a manual one."""
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    return global_shard_guard(MeshResource())


def _forward(q: Array, k: Array, v: Array, call: Call, scale: float) -> tuple[Array, Array]:
    from transformer_engine.jax.cpp_extensions.attention import fused_attn_fwd

    _, descriptor, settings = _arguments(call, scale)
    with _on_one_rank():
        # 2.18 returns three values; later versions also return the largest logit.
        out, softmax_aux, *_ = fused_attn_fwd(
            qkv=(q[None], k[None], v[None]),
            bias=None,
            softmax_offset=None,
            sequence_descriptor=descriptor,
            seed=jnp.zeros(2, jnp.uint32),
            **settings,
        )
    where = sees_a_key(call)
    return nan_if_too_many(keep(where, out[0]), call), keep(where, softmax_aux[0, :, :, 0], -jnp.inf)


def _backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, call: Call, scale: float
) -> tuple[Array, Array, Array]:
    from transformer_engine.jax.cpp_extensions.attention import fused_attn_bwd

    packed, descriptor, settings = _arguments(call, scale)
    where = sees_a_key(call)
    with _on_one_rank():
        (dq, dk, dv), *_ = fused_attn_bwd(
            qkv=(q[None], k[None], v[None]),
            bias=None,
            softmax_offset=None,
            softmax_aux=keep(where, lse)[None, :, :, None],
            rng_state=jnp.zeros((2, 4), jnp.uint32),
            output=out.astype(q.dtype)[None],
            doutput=dout.astype(q.dtype)[None],
            sequence_descriptor=descriptor,
            **settings,
        )
    keys = is_seen(packed, len(k))
    return keep(where, dq[0]), keep(keys, dk[0]), keep(keys, dv[0])


BACKEND = AttentionBackend(
    "te",
    _unfit,
    _forward,
    _backward,
    "not yet run; its own Python code, 2.18.0 and 2.20.2, over dense kernels on a CPU, jax 0.10.2, "
    "2026-11-22",
)
