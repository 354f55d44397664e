"""The shard_map that every step uses, and meshes that others have made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxthd.config import Config, MeshConfig
from jaxthd.errors import UserError
from jaxthd.parallel.mesh import DATA, adopt_mesh, make_mesh, on_ranks, with_mesh


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


def test_a_mesh_made_elsewhere_is_adopted() -> None:
    """Same devices, on the axes that were named; several of theirs become one of ours."""
    shape = {"model": 2, "replica": 2, "unused": 1, "fsdp": 2}
    theirs = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Explicit,) * 4)
    mesh = adopt_mesh(theirs, data=("replica", "fsdp"), tensor="model")
    assert dict(mesh.shape) == {"data": 4, "context": 1, "pipeline": 1, "tensor": 2}
    for model, replica, fsdp in np.ndindex(2, 2, 2):
        assert mesh.devices[2 * replica + fsdp, 0, 0, model] == theirs.devices[model, replica, 0, fsdp]
    config = Config(mesh=MeshConfig(fsdp=False))
    assert with_mesh(config, mesh).mesh == MeshConfig(data=4, tensor=2, fsdp=False)
    fewer = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    assert adopt_mesh(fewer) == make_mesh(MeshConfig(context=2))
    assert adopt_mesh(make_mesh(MeshConfig(data=2, tensor=2))) == make_mesh(MeshConfig(data=2, tensor=2))
    for wrong in (
        {"data": "replica"},
        {"data": ("replica", "fsdp"), "tensor": "tp"},
        {"data": ("fsdp", "fsdp")},
    ):
        with pytest.raises(UserError, match="expected each axis"):
            adopt_mesh(theirs, **wrong)
