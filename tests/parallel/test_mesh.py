"""The shard_map that every step uses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import DATA, make_mesh, on_ranks


def test_what_has_no_elements_is_made_inside_with_a_rank_s_share_of_its_shape():
    rows, everywhere = PartitionSpec(DATA), PartitionSpec()
    shapes = []

    def rank(pair: dict[str, jax.Array], factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, empty = pair["x"], pair["empty"]
        shapes.append((x.shape, empty.shape, empty.dtype))
        return factor * x, empty

    run = on_ranks(rank, make_mesh(MeshConfig(data=2)), (rows, everywhere), (rows, rows))
    given = {"x": jnp.arange(8.0).reshape(4, 2), "empty": jnp.zeros((4, 0, 3), jnp.int32)}, jnp.float32(3)
    doubled, empty = jax.jit(run)(*given)
    np.testing.assert_array_equal(doubled, 3 * given[0]["x"])
    assert (empty.shape, empty.dtype) == ((4, 0, 3), jnp.int32)
    assert shapes == [((2, 2), (2, 0, 3), jnp.int32)]
    # Some versions of jaxlib crash on a sharded argument without elements.
    (mapped,) = (e for e in jax.make_jaxpr(run)(*given).eqns if e.primitive.name == "shard_map")
    assert all(x.aval.size for x in mapped.invars)
