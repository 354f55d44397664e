"""Segments made of lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.packing.segments import make_segments, segments_of
from tests.helpers import row_arrays


@pytest.mark.parametrize(("lengths", "capacity"), [([5, 1, 3], None), ([5, 1, 3], 12), ([], 4)])
def test_segments_of_lengths_are_those_of_the_row(lengths: list[int], capacity: int | None):
    ids, positions = row_arrays(lengths, sum(lengths) if capacity is None else capacity)
    want = make_segments(
        jnp.asarray(ids)[None], jnp.asarray(positions)[None], block=4, axis=None, documents=len(lengths)
    )
    jax.tree.map(np.testing.assert_array_equal, segments_of(lengths, capacity, block=4), want)


@pytest.mark.parametrize(("lengths", "capacity"), [([5, 0], None), ([5, 3], 7)])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], capacity: int | None):
    with pytest.raises(ValueError, match="capacity"):
        segments_of(lengths, capacity)
