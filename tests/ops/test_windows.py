"""Attention in a sliding window, with sinks: packed equals each document alone, on every context size."""

from itertools import product

import jax
import numpy as np
import pytest

from jaxthd.ops.attention.ring import packed_attention
from jaxthd.packing.segments import segments_of
from tests.helpers import CAPACITY, CASES, assert_same, on_context, row_arrays, spans
from tests.ops import fake_kernels

H, K, D, V = 4, 2, 8, 6
SCALE = D**-0.5
ALL = 1000
"""A window that is longer than all documents."""


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


def dense_documents(lengths, q, k, v, sink, dout, window):
    want = [np.zeros_like(x, np.float64) for x in (dout, q, k, v)]
    d_sink = np.zeros(H)
    for span in spans(lengths):
        *parts, of_sink = dense_document(q[span], k[span], v[span], sink, dout[span], window)
        d_sink += of_sink
        for whole, part in zip(want, parts, strict=True):
            whole[span] = part
    return *want, d_sink


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
        want = dense_documents(lengths, *(x.astype(np.float64) for x in given), window)
        assert_same((y, *gradients, d_sink), want, 1e-10 if dtype == np.float64 else 1e-5)


MESHES = [(1, "ring"), *product((2, 4), ("ring", "all_gather"))]
WINDOWS = (1, 3, 8, 25, 64, ALL)
TYPICAL = [
    (1, "ring", 3),
    (4, "ring", 25),
    (2, "all_gather", 64),
    (4, "ring", ALL),
]


@pytest.mark.parametrize(
    ("context", "exchange", "window"),
    [
        run if run in TYPICAL else pytest.param(*run, marks=pytest.mark.exhaustive)
        for run in ((*mesh, window) for mesh, window in product(MESHES, WINDOWS))
        if run in TYPICAL or (MESHES.index(run[:2]) + WINDOWS.index(run[2])) % 3 == 0
    ],
)
def test_packed_equals_each_document_alone(context, exchange, window):
    """Windows shorter than, equal to and longer than documents and context chunks."""
    with jax.enable_x64(True):
        compare(context, exchange, window)


def test_sinks_are_the_same_for_fused_back_ends(monkeypatch):
    """They compute calls; the sink enters after these."""
    fake_kernels.install_te(monkeypatch)
    compare(2, "ring", ALL, "te")


def test_blocks_outside_all_windows_are_not_computed():
    """64 tokens in blocks of 8: with a window of 9 a block of queries meets two blocks of keys."""
    windowed = segments_of([64], block=8, window=9).windowed
    assert windowed is not None
    first, end = np.asarray(windowed[0].local.blocks).T
    np.testing.assert_array_equal(end - first, [1] + [2] * 7)
