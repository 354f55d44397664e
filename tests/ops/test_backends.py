"""Attention back-ends: the arguments of fused kernels against the mask by brute force; executed blocks."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxthd.kernels.attention_probe import probe_errors
from jaxthd.ops.attention import blockwise, cudnn
from jaxthd.ops.attention.backends import BACKENDS
from jaxthd.ops.attention.contract import AttentionBackend, AttentionShape, Call
from jaxthd.ops.attention.thd import packed_segments
from jaxthd.ops.backend import Machine, version_numbers
from jaxthd.packing.intervals import key_intervals
from jaxthd.packing.layout import DualChunkSwap
from jaxthd.packing.segments import Segments, make_segments
from tests.context_costs import fewest_blocks
from tests.helpers import row_arrays
from tests.ops import dense_kernels, fake_kernels

H100 = Machine("gpu", "NVIDIA H100", 1, "9.0", "0.11.1", "0.11.1", "3.12.0", 12090, 91600, "570.1", "2.18.0")
BF16 = AttentionShape("bfloat16", 32, 8, 128)


def on_ranks(ids: np.ndarray, positions: np.ndarray, block: int) -> Segments:
    """The Segments of all ranks, from [ranks, rows, tokens], without devices: vmap names the axis."""
    rows = ids.shape[1]

    def of_rank(ids: Any, positions: Any) -> Segments:
        segments: Segments = make_segments(ids, positions, block=block, axis="context", documents=12 // rows)
        return segments

    return jax.vmap(of_rank, axis_name="context")(ids, positions)


def calls(segments: Segments) -> list[Call]:
    """The local one, then those of the ring steps."""
    local, *remote = segments.keys.by_step
    documents, block, rows = segments.rows * (segments.documents or 0), segments.block, segments.rows
    return [Call(local, True, block, documents), *(Call(x, False, block, rows) for x in remote)]


@partial(jax.jit, static_argnums=2)
def intervals_of(ids: Any, positions: Any, block: int) -> Any:
    """What the queries of one device see."""
    return make_segments(ids, positions, block=block, axis=None).keys.local


@pytest.mark.parametrize("context", [2, 4])
def test_the_packed_segments_of_a_call_are_exactly_what_the_mask_allows(context: int):
    """Two rows a rank, random documents; local and remote calls. No segment has queries but no keys."""
    rng, rows, capacity = np.random.default_rng(context), 2, 24 * context
    order = DualChunkSwap(context).permutation(capacity).reshape(context, -1)
    derive = jax.jit(on_ranks, static_argnums=2)
    segments_of_call = jax.jit(packed_segments, static_argnums=1)
    for _ in range(8):
        packed = []
        for _ in range(rows):
            lengths: list[int] = []
            while len(lengths) < 6 and (room := capacity - sum(lengths)):
                lengths.append(int(rng.integers(1, min(room, 8 * context) + 1)))
            packed.append(row_arrays(lengths, capacity))
        ids, positions = (np.stack([x[order] for x in each], axis=1) for each in zip(*packed, strict=True))
        segments = derive(ids, positions, 8)
        for rank in range(context):
            mine = jax.tree.map(lambda x, rank=rank: x[rank], segments)
            for step, call in enumerate(calls(mine)):
                source = (rank - step) % context
                assert call.causal == (step == 0)
                want = np.zeros((rows, len(order[0]), rows, len(order[0])), bool)
                for row, (row_ids, _) in enumerate(packed):
                    q, k = order[rank][:, None], order[source]
                    want[row, :, row] = (row_ids[q] == row_ids[k]) & (row_ids[q] > 0) & (k <= q)
                want = want.reshape(ids.shape[1] * ids.shape[2], -1)
                got = np.zeros_like(want)
                found = segments_of_call(call.intervals, call.documents)
                for q_start, q_length, k_start, k_length in np.stack(found, axis=1):
                    assert (q_length > 0) == (k_length > 0)
                    block = np.ones((q_length, k_length), bool)
                    got[q_start : q_start + q_length, k_start : k_start + k_length] |= (
                        np.tril(block) if call.causal else block
                    )
                np.testing.assert_array_equal(got, want)


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    fake_kernels.install_te(monkeypatch)
    return BACKENDS["te"]


@pytest.fixture
def cudnn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """Jax's own code, with cuDNN's kernels computed densely."""
    dense_kernels.under_jax(monkeypatch.setattr)
    assert cudnn.changed() is None
    return BACKENDS["cudnn"]


@pytest.fixture
def cudnn_of_another_jax(
    cudnn_on_a_cpu: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> AttentionBackend:
    module, rule = fused_attention_stablehlo, fake_kernels.other_backward_rule()
    monkeypatch.setattr(module, "_dot_product_attention_bwd_rule", rule)
    assert cudnn.changed() is None
    # Compiled programs are cached by back-end, whatever replaces its library.
    return cudnn_on_a_cpu._replace(name="cudnn of another jax")


@pytest.mark.parametrize("fixture", ["te", "cudnn_on_a_cpu", "cudnn_of_another_jax"])
def test_fused_calls_agree_with_the_blockwise_one(fixture: str, request: pytest.FixtureRequest):
    """Runs the probe with kernels that use the given lengths and offsets, and leave NaN elsewhere."""
    backend: AttentionBackend = request.getfixturevalue(fixture)
    grouped = fixture == "te" or version_numbers(jax.__version__) >= cudnn.GROUPED_LEAST
    errors = probe_errors(backend, AttentionShape("float32", 4, 2 if grouped else 4, 8))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.skipif(version_numbers(jax.__version__) >= cudnn.GROUPED_LEAST, reason="jax is right since")
def test_grouped_queries_are_wrong_before_the_version_that_is_asked_for(cudnn_on_a_cpu: AttentionBackend):
    """The kernel starts at jax's offset, counted in elements of the keys."""
    errors = probe_errors(cudnn_on_a_cpu, AttentionShape("float32", 4, 2, 8))
    assert min(errors.values()) > 0.1, errors


def test_the_cudnn_calls_lower_for_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Forward and backward, both calls, in a CPU process, without a host callback."""
    assert cudnn.changed() is None
    module = fused_attention_stablehlo
    monkeypatch.setattr(module, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(module, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(module, "is_cuda_compute_capability_equal", lambda capability: False)
    ids, positions = row_arrays([30, 1, 50], 96)
    intervals = intervals_of(ids[None], positions[None], 32)

    def both(q: Any, k: Any, v: Any, dout: Any, causal: bool) -> Any:
        call = Call(intervals, causal, 32, 4)
        out, lse = cudnn.BACKEND.forward(q, k, v, call, 0.125)
        return cudnn.BACKEND.backward(q, k, v, out, lse, dout, call, 0.125)

    x = jax.ShapeDtypeStruct((96, 4, 64), jnp.bfloat16)
    for causal, mask in ((True, "PADDING_CAUSAL"), (False, "PADDING")):
        program = jax.jit(both, static_argnums=4).trace(x, x, x, x, causal)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"custom_call @(\S+?)\(", text) == [
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxBackward",
        ]
        assert "callback" not in text
        assert set(re.findall(r"mask_type\\22: \\22(\w+)", text)) == {mask}
        assert set(re.findall(r"max_seg_per_batch\\22: (\d+)", text)) == {"5"}


@pytest.mark.parametrize("context", [1, 2, 4])
def test_no_block_is_executed_that_could_be_skipped(context: int, monkeypatch: pytest.MonkeyPatch):
    """Executed blocks, forward and backward, are compared with the fewest that cover the allowed pairs."""
    executed: list[int] = []
    scores = blockwise._Queries.scores

    def counted(*given: Any) -> Any:
        jax.debug.callback(lambda: executed.append(1))
        return scores(*given)

    monkeypatch.setattr(blockwise._Queries, "scores", counted)
    rng, block, length = np.random.default_rng(context), 4, 16 * context
    backend, tokens = blockwise.BACKEND, 16

    @jax.jit
    def forward(call_intervals: Any, x: Any) -> Any:
        return backend.forward(x, x, x, Call(call_intervals, True, block, None), 1.0)

    @jax.jit
    def backward(call_intervals: Any, x: Any, out: Any, lse: Any) -> Any:
        return backend.backward(x, x, x, out, lse, x, Call(call_intervals, True, block, None), 1.0)

    derive = jax.jit(on_ranks, static_argnums=2)
    x, some_skipped = rng.normal(size=(tokens, 1, 2)).astype(np.float32), False
    for _ in range(4):
        splits = np.sort(rng.choice(np.arange(1, length), size=3, replace=False))
        ids, positions = row_arrays(np.diff([0, *splits, length - 3]).clip(1), length)
        order = DualChunkSwap(context).permutation(length).reshape(context, 1, -1)
        segments = derive(ids[order], positions[order], block)
        for rank in range(context):
            for step, call in enumerate(calls(jax.tree.map(lambda x, rank=rank: x[rank], segments))):
                q, k = order[rank, 0][:, None], order[(rank - step) % context, 0]
                allowed = (ids[q] == ids[k]) & (ids[q] > 0) & (k <= q)
                least = fewest_blocks(allowed, block)
                out, lse = jax.block_until_ready(forward(call.intervals, x))
                jax.effects_barrier()
                assert len(executed) == least
                executed.clear()
                jax.block_until_ready(backward(call.intervals, x, out, lse))
                jax.effects_barrier()
                assert len(executed) == least
                executed.clear()
                some_skipped |= least < 2 * (tokens // block) ** 2
    assert some_skipped


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("te", {"platform": "cpu"}, "it runs on NVIDIA GPUs, and this is cpu"),
        ("te", {"transformer_engine": None}, "transformer-engine is not installed; pip install"),
        (
            "te",
            {"transformer_engine": "2.17.1"},
            "needs transformer-engine 2.18 or later, and this is 2.17.1",
        ),
        (
            "te",
            {"compute_capability": "12.0"},
            "960 times off in every layer on compute capability 12.0",
        ),
        ("te", {"cudnn": 90500}, "it needs cuDNN 9.6.0 or later, and this is 9.5.0"),
        ("cudnn", {"cudnn": 91001}, "it cannot use cuDNN 9.10.1: Transformer Engine leaves out"),
        ("cudnn", {"cudnn": 91402}, "it cannot use cuDNN 9.14.2: 9.13 and 9.14 read beyond"),
        ("cudnn", {"cudnn": None}, "cuDNN is missing"),
        ("cudnn", {"compute_capability": "8.9"}, "needs compute capability 9.0 (Hopper) or later"),
        ("cudnn", {"jax": "0.11.0"}, "grouped-query attention is wrong in it before jax 0.11.1"),
    ],
)
def test_what_a_back_end_cannot_run_on_is_said_in_one_line(name: str, changes: dict[str, Any], reason: str):
    backend: AttentionBackend = BACKENDS[name]
    assert backend.unfit(BF16, H100) is None
    found = backend.unfit(BF16, replace(H100, **changes))
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_what_a_back_end_cannot_compute_is_said():
    for name in ("te", "cudnn"):
        assert "compute.dtype is float32" in (
            BACKENDS[name].unfit(replace(BF16, dtype="float32"), H100) or ""
        )
        assert "they have 20" in (BACKENDS[name].unfit(replace(BF16, head_dim=20), H100) or "")
    alike = replace(BF16, kv_heads=32)
    assert BACKENDS["cudnn"].unfit(alike, replace(H100, jax="0.10.2")) is None


def test_cudnn_is_refused_where_its_backward_pass_would_take_too_much_memory():
    """It holds two float32 gradients of the queries for each document, as long as the buffer."""
    backend = BACKENDS["cudnn"]
    fits, too_many = (replace(BF16, tokens=8192, documents=n) for n in (15, 16))  # 256 MiB each, and one more
    assert backend.unfit(fits, H100) is None
    found = backend.unfit(too_many, H100) or ""
    assert found.startswith(
        "its backward pass would take 4.25 GiB of workspace, 8 bytes x 17 segments x 32 heads"
    )
    assert found.endswith("4.00 GiB is the most that it may: lower data.max_documents or data.capacity")


def test_more_documents_than_places_give_nan_and_not_something_else(
    te: AttentionBackend, cudnn_on_a_cpu: AttentionBackend
):
    ids, positions = row_arrays([9, 1, 20], 32)
    intervals, x = intervals_of(ids[None], positions[None], 16), np.ones((32, 2, 8), np.float32)

    @partial(jax.jit, static_argnums=(0, 1))
    def forward(backend: AttentionBackend, documents: int, intervals: Any, x: Any) -> Any:
        return backend.forward(x, x, x, Call(intervals, True, 16, documents), 1.0)

    for backend in (te, cudnn_on_a_cpu):
        enough, too_few = (forward(backend, n, intervals, x) for n in (3, 2))
        assert np.isfinite(enough[0]).all()
        assert np.isnan(too_few[0]).all()


def test_changed_private_functions_of_jax_are_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_rule", lambda scale, res: None)
    assert "have changed (arguments scale, res)" in (BACKENDS["cudnn"].unfit(BF16, H100) or "")
    monkeypatch.delattr(fused_attention_stablehlo, "dot_product_attention")
    assert "have changed" in (BACKENDS["cudnn"].unfit(BF16, H100) or "")


BLOCK = 8
INTERVALS = [(0, 5), (5, 6), (6, 30), (0, 0), (30, 41), (41, 50), (40, 50), (3, 3), (7, 9), (49, 50), (0, 50)]
"""The interval of 50 keys or more that each of 11 queries sees."""


@pytest.mark.parametrize("keys", [50, 100])
@pytest.mark.parametrize("query_block", [None, 1, 3, 11, 16])
def test_queries_in_blocks_of_any_size_see_their_intervals(query_block: int | None, keys: int):
    """Of more than eight times as many keys as queries, blocks are taken where they lie."""
    rng = np.random.default_rng(0)
    sizes = (11, 4), (keys, 2), (keys, 2)
    q, k, v = (rng.normal(size=(n, heads, 4)).astype(np.float32) for n, heads in sizes)
    lo, hi = jnp.asarray(INTERVALS, jnp.int32).T
    intervals = key_intervals(lo, hi, BLOCK, query_block)
    forward = jax.jit(blockwise.attention_forward, static_argnums=(4, 5, 6))
    out, lse = map(np.asarray, forward(q, k, v, intervals, 0.5, BLOCK, query_block))
    for i, (first, end) in enumerate(INTERVALS):
        for head in range(4):
            scores = 0.5 * k[first:end, head // 2].astype(float) @ q[i, head]
            weights = np.exp(scores)
            total = weights.sum()
            want = weights @ v[first:end, head // 2] / max(total, 1e-300)
            np.testing.assert_allclose(out[i, head], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                lse[i, head], np.log(total) if total else -np.inf, rtol=1e-5, atol=1e-6
            )
    at = np.arange(len(k))
    seen = np.stack([(at >= first) & (at < end) for first, end in INTERVALS])
    assert int(intervals.blocks.sum()) == fewest_blocks(seen, BLOCK, query_block)
