"""Look-ups in a vocabulary that ranks share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxthd.parallel.tensor import vocabulary_rows
from tests.helpers import context_mesh

TOKENS = np.array([3, 0, 7, 7, 2**31 - 1, 5, 1, -1], np.int32)
"""The last two of the eight rows are no tokens of the vocabulary: too large, and negative."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_are_those_of_the_matrix_and_zeros_elsewhere_and_only_indices_are_kept(ranks: int):
    axes = ("context",) if ranks > 1 else ()

    def rows(matrix: jax.Array) -> jax.Array:
        return vocabulary_rows(matrix, jnp.asarray(TOKENS), axes, "float32")

    def both(matrix: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(rows, matrix)
        kept = [x for x in jax.tree.leaves(pull) if isinstance(x, jax.Array)]
        assert max(x.size for x in kept) <= len(TOKENS), "no array of the embeddings' dims"
        (gradient,) = pull(dy)
        return y, gradient

    rng = np.random.default_rng(0)
    matrix, dy = (rng.normal(size=(8, 5)).astype(np.float32) for _ in range(2))
    run = jax.jit(both)
    if ranks > 1:
        shard, whole = PartitionSpec("context"), PartitionSpec()
        run = jax.jit(
            jax.shard_map(
                both,
                mesh=context_mesh(ranks),
                in_specs=(shard, whole),
                out_specs=(whole, shard),
                check_vma=False,
            )
        )
    y, gradient = run(matrix, dy / ranks)
    chosen = (TOKENS[:, None] == np.arange(8)).astype(np.float32)
    np.testing.assert_array_equal(y, chosen @ matrix)
    np.testing.assert_allclose(gradient, chosen.T @ dy, rtol=1e-6)
