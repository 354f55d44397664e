"""The k largest of numbers of which some are equal, as torch.topk chooses them on a CPU
(tests/references/top_k.py)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.models.front_ends.transcribe.largest import largest
from tests.hf.published import REFERENCES

FOUND = np.load(REFERENCES / "top_k.npz")
GROUPS = sorted(name.removeprefix("x.") for name in FOUND.files if name.startswith("x."))


@pytest.mark.parametrize("group", GROUPS)
def test_of_equal_numbers_those_are_chosen_that_torch_chooses(group: str):
    """Rows of several lengths; what lies behind their numbers is larger than these."""
    stored, counts = FOUND[f"x.{group}"], FOUND[f"count.{group}"]
    k = int(group.rpartition(".")[2])
    x = np.where(stored == -128, -np.inf, np.where(stored == 127, np.inf, stored)).astype(np.float32)
    got = jax.jit(jax.vmap(partial(largest, k=k)))(x, jnp.asarray(counts))
    want = np.unpackbits(FOUND[f"chosen.{group}"], axis=1, count=x.shape[1]).astype(bool)
    np.testing.assert_array_equal(np.asarray(got), want)
    inside = np.where(np.arange(x.shape[1]) < counts[:, None], x, -np.inf)
    first = np.asarray(jax.lax.top_k(jnp.asarray(inside), k)[1])
    is_first = np.zeros_like(want)
    np.put_along_axis(is_first, first, True, axis=1)
    assert 64 * k <= x.shape[1] or (is_first != want).any(), "the first of equal ones are others"


def test_none_and_one_of_one():
    x, one = jnp.asarray([3.0, 5.0, 4.0, 9.0]), jnp.int32(3)
    np.testing.assert_array_equal(largest(x, one, 0), [False] * 4)
    np.testing.assert_array_equal(largest(x, one, 2), [False, True, True, False])
