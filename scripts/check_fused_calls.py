"""Runs the fused attention back-ends through their libraries' own Python code, without a GPU.

    pip install --no-deps transformer-engine pydantic pydantic-core annotated-types typing-inspection
    python scripts/check_fused_calls.py

Transformer Engine and jax check, convert and shard their arguments before a kernel sees them. Here all of
that code runs on a CPU. Only the kernels are replaced, by dense references given the same arguments: the
lengths of the segments and where they start (tests/ops/dense_kernels.py). Transformer Engine's
compiled part, which needs CUDA, is replaced by a stand-in; its Python part is the installed one, version 2.18
or later. A back-end whose library is missing is skipped and reported.

Each back-end must then pass the admission probe, once with as many key/value heads as query heads and once
with fewer. The whole model's loss and gradients on meshes of 8 simulated devices, in float32, are compared
with one device in float64, as in scripts/check_meshes.py; but not the gradients of the encoder's parameters.
These back-ends compute the decoder's attention; the encoder's own makes of the same rounding errors some ten
times larger ones, on one device too. Exits 1 if any comparison fails.

It takes minutes. It does not show that the real kernels run, or that their results are right: admission tests
that, on a GPU.
"""

import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.quick_compilation import quick_on_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_NPROC", "32")  # threads; see jaxthd.run.startup.simulate_devices
os.environ["XLA_FLAGS"] = quick_on_devices()
os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no CUDA libraries are loaded

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from jaxthd.config import Config, MeshConfig
from jaxthd.kernels.attention_probe import error_bound, probe_errors
from jaxthd.kernels.choose import attention_shape, using
from jaxthd.kernels.machine import installed
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.cudnn import GROUPED_LEAST
from jaxthd.ops.backend import version_numbers
from jaxthd.terminal.tables import table
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


def probes(name: str) -> list[list[str]]:
    """Table rows: the errors of the admission probe."""
    rows = []
    for heads, kv_heads in HEADS:
        if name == "cudnn" and heads != kv_heads and version_numbers(jax.__version__) < GROUPED_LEAST:
            continue
        shape = AttentionShape("bfloat16", heads, kv_heads, 64)
        errors = probe_errors(BACKENDS[name], shape)
        rows.append(row(f"admission: {shape}", max(errors.values()), error_bound("bfloat16")))
    return rows


def steps(name: str) -> list[list[str]]:
    """Table rows: errors of the model's loss and gradients on meshes."""
    rows = []
    for config in (config for mesh in MESHES for config in variants(mesh)):
        if name == "cudnn" and version_numbers(jax.__version__) < GROUPED_LEAST:
            config = with_all_heads(config)
        found = check(using(config, attention_backend=name), of_decoder)
        heads = "{0.q_heads} and {0.kv_heads} heads".format(attention_shape(config))
        what = f"mesh {found['mesh']}, {found['exchange']}, {found['layout']}, {heads} a rank"
        rows.append(row(what, found["error"], found["allowed"]))
    return rows


def with_all_heads(config: Config) -> Config:
    """The same config with as many key/value heads as query heads."""
    llm = config.model.llm
    return replace(config, model=replace(config.model, llm=replace(llm, kv_heads=llm.q_heads)))


def row(what: str, error: float, bound: float) -> list[str]:
    return [what, f"{error:.1e}", f"{bound:.1e}", "" if error <= bound else "FAILS"]


def main() -> None:
    dense_kernels.under_jax(setattr)
    libraries = {"te": with_stand_in(), "cudnn": f"jax {jax.__version__}"}
    failed = False
    for name, library in libraries.items():
        if library is None:
            print(f"{name}: not run, transformer-engine is not installed")
            continue
        library = f"Transformer Engine {library}, jax {version('jax')}" if name == "te" else library
        rows = [*probes(name), *steps(name)]
        failed |= any(cells[-1] for cells in rows)
        print(f"{table(f'{name}: {library}', '|error|at most|', rows)}\n", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
