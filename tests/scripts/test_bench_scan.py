"""The scan's benchmark, where there is no GPU."""

import numpy as np
import pytest

import scripts.bench_scan as bench
from jaxthd.kernels.scan_probe import row_of


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["bench_scan.py"])
    bench.main()
    assert "no GPU here, nothing was run" in capsys.readouterr().out


def test_its_documents_are_ragged_and_fill_the_row() -> None:
    lengths = bench.recordings(8192)
    ids, positions = row_of(lengths, 3)
    assert len(set(lengths)) > 20
    assert ids.shape == positions.shape == (1, 8195)
    assert np.array_equal(np.bincount(ids[0])[1:], lengths)
    assert (ids[0, -3:] == 0).all()
    assert int(positions.max()) == max(lengths) - 1


def test_the_least_bytes_and_the_products_of_a_token() -> None:
    """One head of 2, state 4: x, B, C in bfloat16, dt; y in float32; C B^T and y over (1 + 128) / 2 tokens on
    average, the state written and read."""
    tiny = bench.ScanShape("bfloat16", heads=1, groups=1, head_dim=2, state=4, chunk=128)
    assert bench.work(tiny, 10, False) == (10 * 2 * (64.5 * (4 + 2) + 2 * 4 * 2), 10 * (2 * 10 + 4 + 8))
