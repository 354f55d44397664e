"""scripts/bench_audio_padding.py: what a program would compute that skips padding inside a step."""

import numpy as np

from scripts.bench_audio_padding import skipped_inside


def test_each_microbatch_computes_eighths_of_its_fullest_row():
    needed_BR = np.array([[0, 100, 101, 800], [0, 0, 8, 0]])
    # Eighths of a row: 0 1 | 2 8 and 0 0 | 1 0.
    assert skipped_inside(needed_BR, 800, 2) == 2 * 100 * (1 + 8 + 0 + 1)
    assert skipped_inside(needed_BR, 800, 1) == 100 * (1 + 2 + 8 + 1)
    assert skipped_inside(needed_BR, 800, 4) == 4 * 100 * (8 + 1)
