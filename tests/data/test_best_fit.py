"""Best-fit decreasing: all documents once, within the limits, with less padding; a buffer is carried once."""

import numpy as np
import pytest

from jaxthd.data.best_fit import PackedWindow, is_complete, pack_stream, pack_window
from jaxthd.planning.simulate import pack_lengths


def test_the_largest_come_first_and_go_where_least_is_left():
    sizes = [(5,), (6,), (4,), (5,)]
    assert pack_window(sizes, (10,), is_last=True) == PackedWindow([[0, 3], [1, 2]], [])
    # Both dimensions count: the second buffer has room for the slots, not for the frames.
    sizes = [(6, 0), (5, 8), (2, 3), (2, 2)]
    assert pack_window(sizes, (10, 10), is_last=True).buffers == [[0, 2], [1, 3]]
    assert pack_window([], (10,), is_last=True) == PackedWindow([], [])


def test_the_emptiest_buffer_is_carried_once():
    sizes = [(6,), (7,), (3,), (2,), (9,)]
    assert pack_window(sizes, (10,)) == PackedWindow([[1, 2], [4]], [0, 3])
    assert pack_window(sizes, (10,), carried=1) == PackedWindow([[0, 3], [1, 2], [4]], [])
    assert pack_window(sizes[:1], (10,)) == PackedWindow([[0]], [])
    assert is_complete((20, 0), (10, 0), 2)
    assert not is_complete((19, 99), (10, 0), 2)


@pytest.mark.parametrize("bins", [1, 4, 16])
@pytest.mark.parametrize("most", [1000, 5])
def test_a_stream_is_packed_whole_within_the_limits_and_tighter(bins: int, most: int):
    rng = np.random.default_rng(bins)
    tokens = np.clip(rng.lognormal(4.5, 1.0, 2000), 8, 1000).astype(int)
    frames = np.minimum(tokens * rng.uniform(0.2, 0.8, 2000), 500).astype(int)
    sizes = [(int(n), int(f), 1) for n, f in zip(tokens, frames, strict=True)]
    limits = (1000, 500, most)
    windows = list(pack_stream(sizes, limits, bins))
    buffers = [buffer for window in windows for buffer in window]
    assert sorted(i for buffer in buffers for i in buffer) == list(range(2000))
    for buffer in buffers:
        assert all(sum(sizes[i][k] for i in buffer) <= limits[k] for k in range(3))
    # A document waits for one window at most.
    spans = [(min(map(min, window)), max(map(max, window))) for window in windows]
    assert all(after[0] > before[0] - 1 for before, after in zip(spans, spans[2:], strict=False))
    best = pack_lengths(
        tokens.tolist(),
        (frames * 8).tolist(),
        capacity=1000,
        audio_capacity=4000,
        max_documents=most,
        packing="best_fit",
        packing_bins=bins,
    )
    if most == 1000:
        assert len(buffers) < sum(map(len, best))
