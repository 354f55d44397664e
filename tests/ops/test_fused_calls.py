"""The fused attention back-ends through their libraries' own Python code, without a GPU.

Transformer Engine and jax check, convert and shard their arguments before a kernel sees them. Here all
of that code runs on a CPU; only the kernels are replaced, by dense references given the same arguments.
Transformer Engine's compiled part, which needs CUDA, is replaced by a stand-in; its Python part is the
installed one, version 2.18 or later:

    pip install --no-deps transformer-engine pydantic pydantic-core annotated-types typing-inspection

It does not show that the real kernels run, or that their results are right: admission tests that, on a GPU.
"""

import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

from jaxthd.config import Config, MeshConfig
from jaxthd.kernels.admission import error_bound
from jaxthd.kernels.attention_probe import probe_errors
from jaxthd.kernels.choose import using
from jaxthd.kernels.machine import installed
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.cudnn import GROUPED_LEAST
from jaxthd.ops.backend import version_numbers
from tests.meshes.gradients import check, of_decoder
from tests.meshes.runs import variants
from tests.ops import dense_kernels

MESHES = (MeshConfig(1, 4, 1, 2), MeshConfig(2, 2, 2, 1))
HEADS = ((8, 8), (8, 2))


class _Names(type):
    """A compiled enumeration: a member is created when it is first asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls(len(vars(cls)))
        member.name = name
        setattr(cls, name, member)
        return member


class _Member(int, metaclass=_Names):
    name: str

    @property
    def value(self) -> int:
        return int(self)


class _Compiled(ModuleType):
    """Stands in for Transformer Engine's compiled module: the names, sizes and versions it must offer."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_ep_" in name:  # optional features are absent
            raise AttributeError(name)
        made: Any = lambda *given: 0  # noqa: E731
        if name.startswith(("NVTE_", "JAXX_", "DType", "CommOverlap")):
            made = _Names(name, (_Member,), {})
        setattr(self, name, made)
        return made


def with_stand_in() -> str | None:
    """Imports Transformer Engine's Python part over the stand-in and the dense kernels, and returns its
    version; None if it is not installed.
    """
    if not (found := installed("transformer-engine")):
        return None
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no CUDA libraries are loaded
    compiled: Any = _Compiled("transformer_engine_jax")
    compiled.__spec__ = ModuleSpec("transformer_engine_jax", None)
    compiled.registrations = dict
    compiled.get_cudnn_version = lambda: 91400
    compiled.get_device_compute_capability = lambda device: 90
    fused = compiled.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    # Since 2.19 it takes one argument and also returns a message.
    compiled.get_fused_attn_backend = lambda *given: (fused, "") if len(given) == 1 else fused
    compiled.nvte_get_qkv_format = lambda layout: getattr(
        compiled.NVTE_QKV_Format, "NVTE_BSHD" if "BS" in layout.name else "NVTE_THD"
    )
    for name in ("fwd", "bwd"):
        workspace = (16,), compiled.DType.kByte
        setattr(compiled, f"get_fused_attn_{name}_workspace_sizes", lambda *given, w=workspace: w)
    sys.modules["transformer_engine_jax"] = compiled

    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    from transformer_engine.jax.cpp_extensions import attention

    for primitive, kernel in (
        (attention.FusedAttnFwdPrimitive.inner_primitive, _forward),
        (attention.FusedAttnBwdPrimitive.inner_primitive, _backward),
    ):
        lowering = mlir.lower_fun(_like(primitive, kernel), multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")
    return found


def _like(primitive: Any, kernel: Any) -> Any:
    """The kernel with its results checked against the primitive's shapes; results it lacks are zeros."""

    def run(*given: Any, config: Any) -> list[Any]:
        results = list(kernel(*given, config=config))
        wanted = jax.eval_shape(lambda *x: primitive.bind(*x, config=config), *given)
        for result, want in zip(results, wanted, strict=False):
            assert (result.shape, result.dtype) == (want.shape, want.dtype), (result, want)
        return [*results, *(jnp.zeros(x.shape, x.dtype) for x in wanted[len(results) :])]

    return run


def _pairs(q: Any, k: Any, ends: tuple[Any, Any], starts: tuple[Any, Any], config: Any) -> Any:
    """The allowed query/key pairs of a call. ends: cumulative lengths, starting at 0."""
    lengths, starts = [jnp.diff(x) for x in ends], tuple(x.reshape(-1)[:-1] for x in starts)
    causal = config.attn_mask_type.is_causal()
    return dense_kernels.pairs_of(q.shape[1], k.shape[1], lengths, starts, causal)


def _forward(q: Any, k: Any, v: Any, *more: Any, config: Any) -> Any:
    """Forward kernel. more: bias, softmax offset, seed, then cumulative lengths and offsets."""
    pairs = _pairs(q, k, more[3:5], more[5:7], config)
    out, lse = dense_kernels.forward(q[0], k[0], v[0], pairs, config.scaling_factor)
    return out[None], lse[None, :, :, None]


def _backward(q: Any, k: Any, v: Any, *more: Any, config: Any) -> Any:
    """Backward kernel. more: bias, softmax offset, log-sum-exp, random state, output and its gradient, then
    cumulative lengths and offsets.
    """
    lse, _, out, dout = more[2:6]
    pairs = _pairs(q, k, more[6:8], more[8:10], config)
    gradients = dense_kernels.backward(
        q[0], k[0], v[0], out[0], lse[0, :, :, 0], dout[0], pairs, config.scaling_factor
    )
    return [x[None] for x in gradients]


@pytest.fixture(scope="module", params=["te", "cudnn"])
def backend(request: pytest.FixtureRequest) -> str:
    """A back-end whose library is there, over dense kernels."""
    dense_kernels.under_jax(setattr)
    if request.param == "te" and not with_stand_in():
        pytest.skip("transformer-engine is not installed")
    return request.param


def is_grouped(name: str) -> bool:
    """Whether the back-end takes fewer key/value heads than query heads."""
    return name != "cudnn" or version_numbers(jax.__version__) >= GROUPED_LEAST


@pytest.mark.nightly
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_fused_back_end_passes_the_admission_probe(backend: str, heads: int, kv_heads: int):
    if heads != kv_heads and not is_grouped(backend):
        pytest.skip("this version of jax has no grouped heads")
    errors = probe_errors(BACKENDS[backend], AttentionShape("bfloat16", heads, kv_heads, 64))
    assert max(errors.values()) <= error_bound("bfloat16"), errors


@pytest.mark.nightly
@pytest.mark.parametrize("config", [config for mesh in MESHES for config in variants(mesh)])
def test_a_fused_back_end_changes_neither_loss_nor_gradients(backend: str, config: Config, record_property):
    """In float32 on 8 devices, against float64 on one device; without the gradients of the encoder's
    parameters: the encoder's own attention makes of the same rounding errors some ten times larger ones.
    """
    if not is_grouped(backend):
        llm = config.model.llm.with_settings("*", kv_heads=config.model.llm.blocks["*"].heads)
        config = replace(config, model=replace(config.model, llm=llm))
    row = check(using(config, attention_backend=backend), of_decoder)
    record_property("error", f"{row['error']:.1e}")
    assert row["error"] <= row["allowed"], row
