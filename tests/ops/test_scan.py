"""The scan kernels, interpreted: equal to the XLA scan in float64, lowered for CUDA, refused if wrong."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import triton as pltriton

from jaxthd.config import BlockSizes, ComputeConfig, Config, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.kernels.admission import error
from jaxthd.kernels.scan_probe import QUANTITIES, error_bound, probe_errors, probe_inputs, probe_program
from jaxthd.models.blocks import Attention, Mamba2, Mamba2Mixer
from jaxthd.ops.scan import pallas as scan_pallas
from jaxthd.ops.scan import pallas_kernels as scan_kernels
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs, ScanShape
from jaxthd.ops.scan.pallas import ssd_pallas
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.mesh import make_mesh
from jaxthd.parallel.params import Init
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, state_shardings
from jaxthd.steps.training import make_train_step
from tests.helpers import assert_same, batch_of, on_context, row_arrays
from tests.weights import random_state

TOKENS = 96
CASES = {
    "ragged, one token documents, padding": [1, 1, 5, 1, 30, 1, 17, 2, 20],
    "one document": [TOKENS],
    "a document from the middle of a chunk over all chunks to the middle of the last": [13, 70, 3],
    "ends on edges of chunks and tiles": [16, 16, 32, 8, 24],
    "mostly padding": [3, 4],
}
H, P, G, S = 4, 16, 2, 32
DECAYS = np.array([1e-3, 0.5, 20.0, 1000.0], np.float32)
SIZES = [
    (2, 16, 16, "float32"),
    (1, 32, 32, "bfloat16"),
    pytest.param(1, 32, 16, "float32", marks=pytest.mark.exhaustive),
    pytest.param(1, 64, 16, "float32", marks=pytest.mark.exhaustive),
]


def scan_inputs(case: str) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
    """(a, (x, dt, B, C), y's cotangent, which is 0 in padding); x, B and C are exact in bfloat16."""
    rng = np.random.default_rng([2, list(CASES).index(case)])
    x, b, c = (
        np.asarray(jnp.asarray(rng.normal(size=(TOKENS, *s)), jnp.bfloat16), np.float32)
        for s in ((H, P), (G, S), (G, S))
    )
    dt = rng.uniform(0.001, 1.0, size=(TOKENS, H)).astype(np.float32)
    dy = rng.normal(size=(TOKENS, H, P)).astype(np.float32)
    dy[sum(CASES[case]) :] = 0
    return -DECAYS, (x, dt, b, c), dy


@pytest.mark.parametrize(("context", "chunk", "tile", "dtype"), SIZES)
def test_the_kernels_equal_the_scan_in_float64(context: int, chunk: int, tile: int, dtype: str) -> None:
    """Compares outputs and all gradients, with several tiles a scan chunk, a last chunk that is padded, and,
    on two context ranks, initial states from the other rank. The bfloat16 tolerance is the sum of its
    roundings (2^-9 each).
    """

    def kernels(a: Any, inputs: Any, segments: Segments) -> Any:
        x, dt, b, c = inputs
        low = ScanInputs(x.astype(dtype), dt, a, b.astype(dtype), c.astype(dtype))
        y = ssd_pallas(low, segments, chunk=chunk, tile=tile)
        assert y.dtype == dtype
        return y.astype(jnp.float32)

    def exact(a: Any, inputs: Any, segments: Segments) -> Any:
        x, dt, b, c = inputs
        return ssd(ScanInputs(x, dt, a, b, c), segments, chunk=24)

    run, run_exact = (on_context(f, context, block=8) for f in (kernels, exact))
    for name, lengths in CASES.items():
        a, inputs, dy = scan_inputs(name)
        y, *gradients = run(a, inputs, *row_arrays(lengths, TOKENS), dy)
        with jax.enable_x64(True):
            wide = jax.tree.map(np.float64, (a, inputs, dy))
            want, *want_gradients = run_exact(*wide[:2], *row_arrays(lengths, TOKENS), wide[2])
        real = sum(lengths)
        found, want = (y[:real], *gradients), (want[:real], *want_gradients)
        assert_same(found, want, 1e-5 if dtype == "float32" else 2e-2)


def test_mamba2_on_two_ranks_with_the_kernels() -> None:
    """Compares outputs and gradients of all its parameters with the XLA scan's in float64."""
    dim, lengths = 16, CASES["ragged, one token documents, padding"]
    block = Mamba2(heads=4, head_dim=16, state=16)
    llm = LLMConfig(dim=dim, blocks={"M": block})
    rng = np.random.default_rng(3)
    x, dy = rng.normal(size=(2, TOKENS, dim)).astype(np.float32)
    dy[sum(lengths) :] = 0
    results = []
    for backend, dtype in (("pallas", np.float32), ("xla", np.float64)):
        compute = ComputeConfig(scan_backend=backend, block_sizes=BlockSizes(scan=16))  # type: ignore[arg-type]
        made = nnx.eval_shape(
            lambda compute=compute: Mamba2Mixer(block, llm, Init(jax.random.key(0)), compute)
        )
        graph, params, buffers = random_state(made)

        def apply(params: Any, x: Any, segments: Segments, graph: Any = graph, buffers: Any = buffers) -> Any:
            return nnx.merge(graph, params, buffers)(x, segments)

        with jax.enable_x64(dtype == np.float64):
            params, given, cotangent = jax.tree.map(lambda v, d=dtype: v.astype(d), (params, x, dy))
            y, *gradients = on_context(apply, 2, block=8)(
                params, given, *row_arrays(lengths, TOKENS), cotangent
            )
            results.append(jax.tree.map(np.asarray, (y[: sum(lengths)], *gradients)))
    assert_same(*results, 1e-5)


def broken_first(positions_ref: Any, tile: Any, q: int) -> Any:
    """Broken: as if no document began inside a chunk."""
    return jnp.zeros(q, jnp.int32)


def broken_decays(sizes: Any, sums: Any, positions_N: Any) -> Any:
    """Broken: as if no document began between chunks."""
    return scan_pallas.Sums(*map(jnp.exp, sums))


def lost_carry(sizes: Any, total_HC: Any) -> Any:
    """Broken: as if no state entered a rank's context chunks from other ranks."""
    before, after, whole = over_chunks(sizes, total_HC)
    return 0 * before, 0 * after, whole


over_chunks = scan_pallas._over_chunks
SHAPE = ScanShape("float32", heads=2, groups=1, head_dim=16, state=16, chunk=128)
ON_RANKS = replace(SHAPE, chunk=32, states_enter=True)


@pytest.mark.parametrize("shape", [SHAPE, ON_RANKS])
def test_the_probe_admits_the_kernels_in_float32(shape: ScanShape) -> None:
    errors = probe_errors(ssd_pallas, shape)
    assert tuple(errors) == QUANTITIES
    assert max(errors.values()) < 1e-6 < error_bound(shape.dtype)


def test_the_probe_on_ranks_refuses_kernels_that_lose_other_ranks_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan_pallas, "_over_chunks", lost_carry)
    assert min(probe_errors(ssd_pallas, ON_RANKS).values()) > error_bound(ON_RANKS.dtype)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [(scan_kernels, "_first", broken_first), (scan_pallas, "_decays", broken_decays)],
)
def test_the_probe_refuses_kernels_without_boundaries(
    module: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every output and every gradient shows the fault."""
    monkeypatch.setattr(module, name, wrong)
    assert min(probe_errors(ssd_pallas, SHAPE).values()) > error_bound(SHAPE.dtype)


def test_the_probe_refuses_what_is_not_finite() -> None:
    assert error(np.array([1.0, np.nan]), np.ones(2)) == float("inf")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of jax ask which GPU they lower for; in a shard_map they see only the CPU devices."""
    if hasattr(pltriton, "GpuVersion"):
        info = pltriton.get_gpu_info_from_version(pltriton.GpuVersion.H100)
        monkeypatch.setattr("jax._src.pallas.triton.gpu_info.get_gpu_info", lambda: info)


CALL = "__gpu$xla.gpu.triton"


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("chunk", [128, 256])
def test_the_kernels_lower_for_cuda(chunk: int) -> None:
    """Nemotron-3-Nano's scan has two kernels forward and five backward."""
    n, dims = 512, {"x": (64, 64), "dt": (64,), "b": (8, 128), "c": (8, 128)}
    shapes = {k: jax.ShapeDtypeStruct((n, *s), jnp.bfloat16) for k, s in dims.items()}
    shapes["dt"] = jax.ShapeDtypeStruct((n, 64), jnp.float32)
    a, layout = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((1, n), jnp.int32)

    def gradients(ids: Any, positions: Any, a: Any, given: Any) -> Any:
        segments = make_segments(ids, positions, block=128, axis=None)
        run = partial(scan, segments=segments, chunk=chunk, backend="pallas")
        y, pull = jax.vjp(lambda a, g: run(ScanInputs(a=a, **g)), a, given)
        return y, pull(y)

    program = jax.jit(gradients).trace(layout, layout, a, shapes)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 7
    assert "callback" not in text


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.usefixtures("h100")
def test_the_probe_on_ranks_lowers_for_cuda() -> None:
    """Its ranks add one dim to the programs of the same seven kernels."""
    shape = ScanShape("bfloat16", heads=8, groups=1, head_dim=64, state=128, chunk=128, states_enter=True)
    row = jax.ShapeDtypeStruct((1, len(probe_inputs(shape)[0])), jnp.int32)
    program = probe_program(ssd_pallas, shape).trace(row, row, *probe_inputs(shape))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(CALL) == 7
    assert "callback" not in text


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.usefixtures("h100")
def test_a_whole_train_step_lowers_for_cuda_without_host_callbacks() -> None:
    llm = LLMConfig(
        pattern="MM*", dim=32, blocks={"M": Mamba2(head_dim=16, state=16), "*": Attention(head_dim=16)}
    )
    encoder = EncoderConfig(num_mels=16, layers=1, dim=32, heads=2, ffn_dim=16, subsampling_channels=4)
    model = ModelConfig(encoder=encoder, llm=llm)
    kernels: Any = dict.fromkeys(("attention_backend", "encoder_attention", "scan_backend"), "pallas")
    compute = ComputeConfig(**kernels, dtype="bfloat16", remat="selective", block_sizes=BlockSizes(scan=16))
    config = Config(model=model, compute=compute, mesh=MeshConfig(context=2))
    mesh = make_mesh(config.mesh)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract_state(Blueprint(config)),
        state_shardings(Blueprint(config), mesh),
    )
    step: Any = make_train_step(Blueprint(config), mesh)
    program = step.trace(state, batch_of([5, 20, 11, 1, 17], 2))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    # The scan's, three of the encoder's attention, three of the decoder's and three of its remote call.
    assert text.count(CALL) >= 7 + 3 + 3 + 3
    assert "callback" not in text
