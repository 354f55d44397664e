"""The attention benchmark, in small on a CPU: it times packed attention, and its rates are of pairs."""

from typing import Any

import numpy as np
import pytest

from jaxthd.kernels.admission import error
from scripts import bench_attention as bench


def test_every_case_is_timed_and_rates_are_of_allowed_pairs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bench, "seconds", lambda *given: 1e-3)
    monkeypatch.setattr(bench, "recordings", lambda size: [size // 4, 3 * size // 4])
    rows: list[dict[str, Any]] = []
    bench.measure(True, 1e12, rows.append)
    out = capsys.readouterr().out
    assert "te: not run, it runs on NVIDIA GPUs" in out
    assert "FlexAttention: not run" in out
    assert [(row["back-end"], row["what"]) for row in rows] == 3 * [
        ("xla", "forward"),
        ("xla", "forward+backward"),
    ]
    # 2 x 256 tokens: 256 x 257 pairs, 4 heads of 32, products forward 2, backward 5 more, 2 FLOP each.
    forward = 256 * 257 * 4 * 32 * 2 * 2 / 1e-3
    assert float(rows[4]["share"]) == pytest.approx(forward / 1e12, abs=1e-3)
    assert float(rows[5]["share"]) == pytest.approx(3.5 * forward / 1e12, abs=1e-3)


def test_the_call_is_attention_inside_each_document():
    lengths, shape = (5, 1, 10), bench.Shape(4, 2, 16)
    given = bench.inputs(lengths, shape)
    arrays = given[1:]
    q, k, v, _ = (np.asarray(x, np.float64) for x in arrays)
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    ids, places = np.repeat(range(3), lengths), np.arange(16)
    allowed = (ids[:, None] == ids) & (places[:, None] >= places)
    scores = np.where(allowed, np.einsum("nhd,shd->hns", q, k) / 4, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hns,shd->nhd", weights / weights.sum(-1, keepdims=True), v)
    out, gradients = bench.jax_call("xla", True)(*given)
    assert error(np.asarray(out, np.float64), want) < 2e-2
    assert [x.shape for x in gradients] == [x.shape for x in arrays[:3]]
