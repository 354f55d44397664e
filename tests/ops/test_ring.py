"""Attention, also in a sliding window and with sinks: packed equals each document alone, on every context
size, by ring and by all-gather."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.attention.cudnn import GROUPED_LEAST
from jaxthd.ops.attention.ring import packed_attention
from jaxthd.ops.backend import version_numbers
from jaxthd.packing.layout import DualChunkSwap
from jaxthd.packing.segments import make_segments, segments_of
from tests.context_costs import fewest_blocks
from tests.helpers import CAPACITY, CASES, assert_same, context_mesh, on_context, row_arrays, spans
from tests.ops import dense_kernels, fake_kernels

H, K, D, V = 4, 2, 8, 6
SCALE = D**-0.5


ALL = 1000
"""A window that is longer than all documents."""
NO_SINK = np.full(H, -np.inf)


def dense_document(q, k, v, sink, dout, window):
    """(output, gradients of q, k, v, sink) of one document by the definition: the softmax of its scores and
    the sink, which has no value. NumPy float64."""
    n = len(q)
    k, v = (np.repeat(x, H // K, axis=1) for x in (k, v))
    back = np.arange(n)[:, None] - np.arange(n)
    s = np.where((back >= 0) & (back < window), SCALE * np.einsum("ihd,jhd->hij", q, k), -np.inf)
    s = np.concatenate([s, np.broadcast_to(sink[:, None, None], (H, n, 1))], -1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.concatenate([np.einsum("ihv,jhv->hij", dout, v), np.zeros((H, n, 1))], -1)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    p, ds, d_sink = p[..., :-1], SCALE * ds[..., :-1], ds[..., -1].sum(1)

    def grouped(x):
        return x.reshape(len(x), K, H // K, -1).sum(2)

    return (
        np.einsum("hij,jhv->ihv", p, v),
        np.einsum("hij,jhd->ihd", ds, k),
        grouped(np.einsum("hij,ihd->jhd", ds, q)),
        grouped(np.einsum("hij,ihv->jhv", p, dout)),
        d_sink,
    )


def dense_documents(lengths, q, k, v, dout, sink=NO_SINK, window=ALL):
    """(outputs, gradients of q, k, v, sink) of a packed buffer, each document computed alone in float64."""
    q, k, v, sink, dout = (x.astype(np.float64) for x in (q, k, v, sink, dout))
    want = [np.zeros_like(x, np.float64) for x in (dout, q, k, v)]
    d_sink = np.zeros(H)
    for span in spans(lengths):
        *parts, of_sink = dense_document(q[span], k[span], v[span], sink, dout[span], window)
        d_sink += of_sink
        for whole, part in zip(want, parts, strict=True):
            whole[span] = part
    return *want, d_sink


MESHES = [(1, "ring"), *product((2, 4), ("ring", "all_gather"))]
ODD = [(3, "ring"), (3, "all_gather")]
TYPICAL_IN_FLOAT32 = [(1, "ring"), (4, "ring"), (2, "all_gather")]


@pytest.mark.parametrize(
    ("context", "exchange", "dtype"),
    [
        *((*mesh, np.float64) for mesh in MESHES),
        *(pytest.param(*mesh, np.float64, marks=pytest.mark.exhaustive) for mesh in ODD),
        *((*mesh, np.float32) for mesh in TYPICAL_IN_FLOAT32),
        *(
            pytest.param(*mesh, np.float32, marks=pytest.mark.exhaustive)
            for mesh in MESHES
            if mesh not in TYPICAL_IN_FLOAT32
        ),
    ],
)
def test_packed_equals_each_document_alone(context, exchange, dtype):
    rng = np.random.default_rng(0)
    even = CAPACITY + -CAPACITY % (2 * context)
    with jax.enable_x64(dtype == np.float64):
        run = on_context(
            lambda _, qkv, segments: packed_attention(
                *qkv, segments, scale=SCALE, exchange=exchange, backend="xla"
            ),
            context,
            block=8,
        )
        for lengths in CASES.values():
            q, k, v, dout = (
                rng.normal(size=(even, *s)).astype(dtype) for s in ((H, D), (K, D), (K, V), (H, V))
            )
            y, _, gradients = run(None, (q, k, v), *row_arrays(lengths, even), dout)
            want = dense_documents(lengths, q, k, v, dout)
            assert_same((y, *gradients), want[:-1], 1e-10 if dtype == np.float64 else 1e-5)


@pytest.mark.parametrize(
    ("backend", "context", "exchange"),
    [
        ("te", 2, "ring"),
        ("te", 2, "all_gather"),
        ("cudnn", 4, "ring"),
    ],
)
def test_fused_back_ends_get_the_same_calls(backend, context, exchange, monkeypatch):
    """As above, with dense kernels that leave NaN outside the segment lengths they are given."""
    fake_kernels.install_te(monkeypatch)
    dense_kernels.under_jax(monkeypatch.setattr)
    rng = np.random.default_rng(1)
    # Jax's grouped queries are wrong before some version: there every query head gets its own keys.
    grouped = backend == "te" or version_numbers(jax.__version__) >= GROUPED_LEAST

    def attend(_, qkv, segments):
        q, *kv = qkv
        k, v = kv if grouped else (jnp.repeat(x, H // K, axis=1) for x in kv)
        return packed_attention(q, k, v, segments, scale=SCALE, exchange=exchange, backend=backend)

    run = on_context(
        attend,
        context,
        block=8,
        documents=max(len(lengths) for lengths in CASES.values()),
    )
    for lengths in CASES.values():
        q, k, v, dout = (
            rng.normal(size=(CAPACITY, *s)).astype(np.float32) for s in ((H, D), (K, D), (K, V), (H, V))
        )
        y, _, gradients = run(None, (q, k, v), *row_arrays(lengths), dout)
        assert_same((y, *gradients), dense_documents(lengths, q, k, v, dout)[:-1], 1e-5)


@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_a_remote_step_is_one_rectangle_and_nothing_else_is_executed(context):
    """Checked by brute force over the mask. The intervals are exactly the allowed pairs; every remote step's
    pairs are a range of queries times a range of keys; no fewer blocks would cover them."""
    rng = np.random.default_rng(context)
    length, block = 16 * context, 4
    mesh_free = jax.jit(_intervals_of_rank, static_argnums=(3, 4))
    for _ in range(20):
        splits = np.sort(rng.choice(np.arange(1, length), size=rng.integers(0, 8), replace=False))
        lengths = np.diff([0, *splits, length])[: None if rng.random() < 0.5 else -1]
        ids, positions = row_arrays(lengths, length)
        order = DualChunkSwap(context).permutation(length).reshape(context, -1)
        allowed = (ids[:, None] == ids) & (ids > 0) & np.tril(np.ones((length, length), bool))
        for rank in range(context):
            intervals = mesh_free(ids[order[rank]], positions[order[rank]], rank, context, block)
            for step, (lo, hi, _, blocks) in enumerate(intervals):
                keys = order[(rank - step) % context]
                want = allowed[np.ix_(order[rank], keys)]
                j = np.arange(len(keys))
                got = (j >= np.asarray(lo)[:, None]) & (j < np.asarray(hi)[:, None])
                np.testing.assert_array_equal(got, want)
                if step and want.any():
                    queries, seen = np.flatnonzero(want.any(1)), np.flatnonzero(want.any(0))
                    assert want.sum() == len(queries) * len(seen)
                    assert np.ptp(queries) == len(queries) - 1
                    assert np.ptp(seen) == len(seen) - 1
                assert np.asarray(blocks).sum() == fewest_blocks(want, block)


def _intervals_of_rank(ids, positions, rank, context, block):
    """The Segments of one rank of a context axis, without devices: vmap names the axis."""

    def one(i):
        segments = make_segments(ids[None], positions[None], block=block, axis="context")
        return [tuple(x) for x in segments.keys.by_step]

    everything = jax.vmap(one, axis_name="context", axis_size=context, in_axes=0)(np.arange(context))
    return jax.tree.map(lambda x: x[rank], everything)


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "in a stage"])
def test_the_exchange_is_the_one_asked_for(exchange):
    """All give the same numbers; the compiled program shows which collective moved the keys and values."""
    is_uniform = exchange != "in a stage"

    def rank(qkv, ids, positions):
        segments = make_segments(
            ids[None], positions[None], block=8, axis="context", uniform_program=is_uniform
        )
        asked = exchange if is_uniform else "ring"
        return packed_attention(*qkv, segments, scale=SCALE, exchange=asked, backend="xla")

    spec = jax.sharding.PartitionSpec("context")
    mapped = jax.shard_map(
        rank, mesh=context_mesh(2), in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )
    qkv = tuple(np.zeros((CAPACITY, *s), np.float32) for s in ((H, D), (K, D), (K, V)))
    program = jax.jit(mapped).lower(qkv, *row_arrays([CAPACITY])).as_text()
    assert ("collective_permute" in program) == (exchange == "ring")
    assert ("all_gather" in program) == (exchange != "ring")


def test_an_exchange_may_stand_where_other_stages_run_something_else():
    """Ranks of the first stage exchange keys; those of the second one never reach that line."""
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("context", "pipeline"))

    def rank(qkv, ids, positions):
        segments = make_segments(ids[None], positions[None], block=8, axis="context", uniform_program=False)

        def attend():
            return packed_attention(*qkv, segments, scale=SCALE, exchange="ring", backend="xla")

        is_first = jax.lax.axis_index("pipeline") == 0
        return jax.lax.cond(is_first, attend, lambda: jnp.zeros((len(ids), H, V), qkv[0].dtype))[None]

    spec = jax.sharding.PartitionSpec("context")
    out = jax.sharding.PartitionSpec("pipeline", "context")
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(spec,) * 3, out_specs=out, check_vma=False))
    rng, length = np.random.default_rng(2), CAPACITY
    q, k, v = (rng.normal(size=(length, *s)).astype(np.float32) for s in ((H, D), (K, D), (K, V)))
    order = DualChunkSwap(4).permutation(length)
    given = jax.tree.map(lambda x: x[order], ((q, k, v), *row_arrays([length])))
    first, second = np.asarray(run(*given))
    want = dense_documents([length], q, k, v, np.zeros((length, H, V)))[0]
    assert_same((first,), (want[order],), 1e-5)
    assert not second.any()


def compare(context: int, exchange: str, window: int, backend: str = "xla") -> None:
    """Windows from ALL on are no windows: full attention with sinks."""
    rng = np.random.default_rng(window)

    def attend(sink, qkv, segments):
        exchanged = {"exchange": exchange, "backend": backend, "in_window": window < ALL}
        return packed_attention(*qkv, segments, scale=SCALE, sink_H=sink, **exchanged)

    run = on_context(attend, context, block=8, documents=9, window=window)
    dtype = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    for lengths in CASES.values():
        q, k, v, dout = (rng.normal(size=(CAPACITY, *s)) for s in ((H, D), (K, D), (K, V), (H, V)))
        given = [x.astype(dtype) for x in (q, k, v, rng.normal(size=H), dout)]
        y, d_sink, gradients = run(given[3], tuple(given[:3]), *row_arrays(lengths), given[4])
        want = dense_documents(lengths, *given[:3], given[4], given[3], window)
        assert_same((y, *gradients, d_sink), want, 1e-10 if dtype == np.float64 else 1e-5)


WINDOWS = (1, 3, 8, 25, 64, ALL)
TYPICAL_WINDOWS = [
    (1, "ring", 3),
    (4, "ring", 25),
    (2, "all_gather", 64),
    (4, "ring", ALL),
]


@pytest.mark.parametrize(
    ("context", "exchange", "window"),
    [
        run if run in TYPICAL_WINDOWS else pytest.param(*run, marks=pytest.mark.exhaustive)
        for run in ((*mesh, window) for mesh, window in product(MESHES, WINDOWS))
        if run in TYPICAL_WINDOWS or (MESHES.index(run[:2]) + WINDOWS.index(run[2])) % 3 == 0
    ],
)
def test_in_windows_packed_equals_each_document_alone(context, exchange, window):
    """Windows shorter than, equal to and longer than documents and context chunks."""
    with jax.enable_x64(True):
        compare(context, exchange, window)


def test_sinks_are_the_same_for_fused_back_ends(monkeypatch):
    """They compute calls; the sink enters after these."""
    fake_kernels.install_te(monkeypatch)
    compare(2, "ring", ALL, "te")


def test_blocks_outside_all_windows_are_not_computed():
    """64 tokens, keys in blocks of 8, queries of 4: in a window of 9 these see 12 keys, in two blocks."""
    windowed = segments_of([64], block=8, window=9).windowed
    assert windowed is not None
    np.testing.assert_array_equal(windowed[0].local.blocks, [1] * 2 + [2] * 14)
