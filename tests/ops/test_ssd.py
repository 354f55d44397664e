"""Scan and convolution: packed equals each document alone, step by step, on every context size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxthd.ops.conv import causal_conv, last_inputs
from jaxthd.ops.scan import state_passing
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing.layout import DualChunkSwap
from jaxthd.packing.segments import make_segments
from tests.helpers import CAPACITY, CASES, assert_same, context_mesh, on_context, row_arrays, spans

H, P, G, S, TAPS = 4, 3, 2, 5, 4
DECAYS = np.array([1e-3, 0.5, 20.0, 1000.0])


@jax.jit
def recurrence(a_H, x_LHP, dt_LH, b_LGS, c_LGS, reset_L):
    """h_i = exp(dt_i a) h_{i-1} + dt_i x_i B_i^T, y_i = h_i C_i, one token at a time; h = 0 where reset."""

    def step(h_HPS, inputs):
        x, dt, b, c, reset = inputs
        b, c = (jnp.repeat(v, H // G, axis=0) for v in (b, c))
        h_HPS = jnp.where(reset, 0, jnp.exp(dt * a_H))[:, None, None] * h_HPS
        h_HPS += (dt[:, None] * x)[..., None] * b[:, None]
        return h_HPS, (h_HPS * c[:, None]).sum(-1)

    return jax.lax.scan(step, jnp.zeros((H, P, S), x_LHP.dtype), (x_LHP, dt_LH, b_LGS, c_LGS, reset_L))[1]


def each_document_alone(a, inputs, lengths, dy):
    """Outputs and gradients of the recurrence, from a state of zeros at each document's start, in float64."""
    reset = np.isin(np.arange(len(dy)), [span.start for span in spans(lengths)])
    a, inputs, dy = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (a, inputs, dy))
    y, pull = jax.vjp(lambda a, inputs: recurrence(a, *inputs, reset), a, inputs)
    return y, *pull(dy)


@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("context", "gather_up_to"), [(1, 8), (2, 8), (4, 8), (4, 1)])
def test_scan_equals_the_recurrence_of_each_document_alone(context, gather_up_to, dtype, monkeypatch):
    """|A| is from 1e-3 to 1000: everything is finite and exact. (4, 1) passes states in log2 steps."""
    monkeypatch.setattr(state_passing, "GATHER_UP_TO", gather_up_to)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        run = on_context(
            lambda a, x, segments: ssd(ScanInputs(*x[:2], a, *x[2:]), segments, chunk=6), context, block=8
        )
        for lengths in CASES.values():
            x, b, c = (rng.normal(size=(CAPACITY, *s)).astype(dtype) for s in ((H, P), (G, S), (G, S)))
            dt = rng.uniform(0.001, 1.0, size=(CAPACITY, H)).astype(dtype)
            dy = rng.normal(size=(CAPACITY, H, P)).astype(dtype)
            a = -DECAYS.astype(dtype)
            inputs = (x, dt, b, c)
            real = sum(lengths)
            dy[real:] = 0  # padding's outputs are meaningless: a model never reads them
            y, da, dinputs = run(a, inputs, *row_arrays(lengths), dy)
            want_y, want_da, want_dinputs = each_document_alone(a, inputs, lengths, dy)
            tolerance = 1e-10 if dtype == np.float64 else 1e-5
            assert_same(y[:real], want_y[:real], tolerance)
            assert_same((da, dinputs), (want_da, want_dinputs), tolerance)


@pytest.mark.parametrize(("context", "silu"), [(1, False), (1, True), (2, True), (4, False), (4, True)])
def test_convolution_equals_each_document_alone(context, silu):
    rng = np.random.default_rng(2)
    channels = 5
    with jax.enable_x64(True):
        run = on_context(
            lambda w, x, segments: causal_conv(x, w[0], w[1], segments, silu=silu), context, block=8
        )
        for lengths in CASES.values():
            x, dy = rng.normal(size=(2, CAPACITY, channels))
            w, bias = rng.normal(size=(TAPS, channels)), rng.normal(size=channels)
            dy[sum(lengths) :] = 0
            y, (dw, dbias), dx = run((w, bias), x, *row_arrays(lengths), dy)
            want_z, want_dx, want_dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
            taps = [
                (i, j)
                for span in spans(lengths)
                for i in range(span.start, span.stop)
                for j in range(min(TAPS, i - span.start + 1))
            ]
            for i, j in taps:
                want_z[i] += w[TAPS - 1 - j] * x[i - j]
            want_z += bias
            gate = 1 / (1 + np.exp(-want_z))
            want_y, dz = (want_z * gate, dy * gate * (1 + want_z * (1 - gate))) if silu else (want_z, dy)
            for i, j in taps:
                want_dx[i - j] += w[TAPS - 1 - j] * dz[i]
                want_dw[TAPS - 1 - j] += x[i - j] * dz[i]
            real = sum(lengths)
            assert_same((y[:real], dw, dbias, dx), (want_y[:real], want_dw, dz.sum(0), want_dx), 1e-10)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_the_last_inputs_of_a_prompt_are_its_documents_alone(context: int):
    """Prompts have any length, also shorter than the taps; the ranks' results are summed."""
    rng = np.random.default_rng(3)

    def rank(ends, x, ids, positions):
        segments = make_segments(ids[None], positions[None], block=8, axis="context")
        return jax.lax.psum(last_inputs(x, *ends, TAPS, segments), "context")

    everywhere, spread = PartitionSpec(), PartitionSpec("context")
    specs = {"in_specs": (everywhere, spread, spread, spread), "out_specs": everywhere, "check_vma": False}
    run = jax.jit(jax.shard_map(rank, mesh=context_mesh(context), **specs))
    for lengths in CASES.values():
        x = rng.normal(size=(CAPACITY, 5)).astype(np.float32)
        ids, positions = row_arrays(lengths)
        first, last = np.full((2, 1, 12), -1, np.int32)
        want = np.zeros((12, TAPS - 1, 5), np.float32)
        for d, span in enumerate(spans(lengths)):
            first[0, d], last[0, d] = span.start, rng.integers(span.start, span.stop)
            seen = x[span.start : last[0, d] + 1][1 - TAPS :]
            want[d, TAPS - 1 - len(seen) :] = seen
        order = DualChunkSwap(context).permutation(CAPACITY)
        found = run((first, last), x[order], ids[order], positions[order])
        np.testing.assert_array_equal(found, want)


def test_a_chunk_shorter_than_the_convolution_is_refused():
    run = on_context(lambda w, x, segments: causal_conv(x, w, w[0], segments), 4, block=8)
    with pytest.raises(ValueError, match=r"raise data\.capacity or lower mesh\.context"):
        run(np.ones((TAPS, 1)), np.ones((16, 1)), *row_arrays([16], 16), np.ones((16, 1)))
