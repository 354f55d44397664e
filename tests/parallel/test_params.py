"""Parameters are sharded in whole units, FSDP-sharded where ranks divide them, and gathered when used."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxthd.config import MeshConfig
from jaxthd.models.layers import Linear
from jaxthd.parallel.mesh import make_mesh
from jaxthd.parallel.params import (
    Init,
    ShardedDim,
    gathered,
    gathered_state,
    over_tensor,
    own_part,
    partition_spec,
    scan_stack,
    stack,
)
from jaxthd.parallel.remat import Remat, rematerialized

P = PartitionSpec


def init(mesh: MeshConfig, fsdp: tuple[str, ...] = ("data", "context")) -> Init:
    return Init(jax.random.key(0), mesh=mesh, fsdp=fsdp)


@pytest.mark.parametrize(
    ("mesh", "shape", "dims", "want"),
    [
        (MeshConfig(), (8, 6), (), P(None, None)),
        (MeshConfig(2, 2), (8, 6), (), P(("data", "context"), None)),
        (MeshConfig(2, 2), (6, 12), (), P(None, ("data", "context"))),  # the larger dim that divides
        (MeshConfig(4, 2), (6, 4), (), P(None, ("data",))),  # 8 divides neither, 4 divides one
        (MeshConfig(4), (6, 9), (), P(None, None)),
        (MeshConfig(2, tensor=2), (6, 8), (None, over_tensor(4)), P(("data",), ("tensor",))),
        # A sharded dim can be FSDP-sharded as well.
        (MeshConfig(2, tensor=2), (5, 8), (None, over_tensor(4)), P(None, ("tensor", "data"))),
        # Two key heads for four ranks: every rank holds both.
        (MeshConfig(tensor=4), (6, 8), (None, over_tensor(2)), P(None, None)),
        # Experts over data and context leave nothing for FSDP over these axes.
        (
            MeshConfig(2, 2),
            (8, 6, 4),
            (ShardedDim(("data", "context"), 8), None, None),
            P(("data", "context"), None, None),
        ),
    ],
)
def test_matrices_are_sharded_and_fsdp_sharded(mesh, shape, dims, want):
    assert partition_spec(init(mesh).normal(shape, dims)) == want


def test_vectors_are_not_fsdp_sharded_and_nothing_is_without_fsdp():
    assert partition_spec(init(MeshConfig(2, tensor=2)).zeros((8,), (over_tensor(4),))) == P(("tensor",))
    assert partition_spec(init(MeshConfig(2)).ones((8,))) == P(None)
    assert partition_spec(init(MeshConfig(2, fsdp=False)).normal((8, 6))) == P(None, None)


def test_a_rank_uses_the_unit_of_its_own():
    """Three key heads of two features for six ranks: ranks 0 and 1 use the first, ..."""
    mesh, heads = MeshConfig(tensor=6), over_tensor(3)
    run = jax.shard_map(
        lambda x: own_part(x, 1, heads, mesh)[None],
        mesh=make_mesh(mesh),
        in_specs=P(),
        out_specs=P("tensor"),
        check_vma=False,
    )
    features = jnp.arange(6.0).reshape(1, 6)
    np.testing.assert_array_equal(run(features)[:, 0], [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2)


def test_more_units_than_ranks_that_do_not_divide_them_are_refused():
    with pytest.raises(
        ValueError, match="7 units do not divide over the 6 ranks of tensor: expected a multiple of 6"
    ):
        own_part(jnp.zeros((1, 14)), 1, over_tensor(7), MeshConfig(tensor=6))


LAYERS = 3


class Layer(nnx.Module):
    def __init__(self, init: Init) -> None:
        self.w, self.bias = init.normal((4, 4)), init.ones((4,))


@pytest.mark.parametrize(
    ("remat", "unroll", "products"),
    [("full", False, 4), ("none", False, 3), ("selective", False, 3), ("full", True, 4)],
)
def test_a_stack_is_whole_for_its_turn_and_its_gradient_comes_back_scattered(
    remat: Remat, unroll: bool, products: int
):
    """Compared with the same layers unrolled on one device; backward keeps no whole matrix. products: of a
    layer in both passes."""
    mesh = MeshConfig(2, 2)

    def layers(mesh: MeshConfig) -> Layer:
        return stack(Layer, init(mesh), LAYERS)

    module = layers(mesh)
    graph, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    specs = {"w": partition_spec(module.w), "bias": partition_spec(module.bias)}
    assert specs == {"w": P(None, ("data", "context"), None), "bias": P(None, None)}
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(layers(MeshConfig()))))

    def applied(params: dict, x_ND: jax.Array) -> jax.Array:
        def body(layer: Layer, x_ND: jax.Array) -> tuple[jax.Array, None]:
            assert layer.w.shape == (4, 4)
            return jnp.tanh(x_ND @ layer.w[...] + layer.bias[...]), None

        return scan_stack(nnx.merge(graph, params), body, x_ND, remat=remat, unroll=unroll)[0].sum()

    def rank(params: dict, x_ND: jax.Array) -> dict:
        gradients = jax.grad(applied)(params, x_ND)
        return gradients | {"bias": jax.lax.psum(gradients["bias"], ("data", "context"))}

    x_ND = jax.random.normal(jax.random.key(1), (8, 4))
    run = jax.shard_map(
        rank, mesh=make_mesh(mesh), in_specs=(specs, P(("data", "context"))), out_specs=specs, check_vma=False
    )
    got = jax.jit(run)(params, x_ND)

    def alone(params: dict) -> jax.Array:
        x = x_ND
        for w, bias in zip(params["w"], params["bias"], strict=True):
            x = jnp.tanh(x @ w + bias)
        return x.sum()

    want = jax.grad(alone)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    program = jax.jit(run).lower(params, x_ND).as_text()
    # Layers that are written out are calls of one function, or, by newer versions of jax, a copy each.
    copies = program.count("stablehlo.dot_general") // products
    assert copies in ((1, LAYERS) if unroll else (1,))
    assert program.count("stablehlo.dot_general") == copies * products
    assert ("stablehlo.while" in program) != unroll
    gathers = program.count("stablehlo.all_gather")
    assert gathers == 2 * copies, "once for the forward pass, once again for the backward pass"


def test_what_is_not_fsdp_sharded_is_not_gathered():
    """One device therefore needs no mesh."""
    w = init(MeshConfig()).normal((4, 4))
    np.testing.assert_array_equal(jax.jit(lambda: gathered(w))(), w[...])


def test_keys_that_are_known_and_keys_that_are_traced_draw_the_same():
    """Known keys are split before the program is compiled, those of stacks in stacks too."""

    class Drawn(nnx.Module):
        def __init__(self, given: Init) -> None:
            self.a = given.normal((4, 3))
            self.b = given.with_fsdp(()).normal((2, 3))

    class Twice(nnx.Module):
        def __init__(self, given: Init) -> None:
            self.inner = stack(Drawn, given, 3)
            self.after = given.normal((3, 2))

    def made(key: jax.Array) -> dict[str, Any]:
        given = Init(key)
        parts = Drawn(given), stack(Twice, given, 2), Drawn(given)
        return nnx.to_pure_dict(nnx.state(parts))

    key = jax.random.key(7)
    known, traced = jax.jit(lambda: made(key))(), jax.jit(made)(key)
    jax.tree.map(np.testing.assert_array_equal, known, traced)
    leaves = [np.asarray(x).ravel() for x in jax.tree.leaves(known)]
    assert len(np.unique(np.concatenate(leaves))) == sum(map(len, leaves)), "every draw has its own key"


def test_shapes_alone_are_those_of_what_is_drawn():
    """With stacks of stacks: shapes, dtypes and how each variable is sharded."""

    class Twice(nnx.Module):
        def __init__(self, given: Init) -> None:
            self.inner = stack(lambda given: Linear(8, 4, given), given, 3)
            self.after = given.with_fsdp(("data",)).normal((8, 2), (over_tensor(4), None))

    def made(draws: bool) -> nnx.Module:
        mesh = MeshConfig(2, 2, tensor=2)
        given = Init(jax.random.key(0), jnp.bfloat16, mesh, ("data", "context"), draws=draws)
        return stack(Twice, given, 2, axes=("pipeline",))

    drawn, shapes = (
        {path: (v.shape, v.dtype, v.get_metadata()) for path, v in nnx.to_flat_state(nnx.state(module))}
        for module in (nnx.eval_shape(lambda draws=draws: made(draws)) for draws in (True, False))
    )
    assert drawn == shapes
    assert {path[0] for path in drawn} == {"inner", "after"}


@pytest.mark.parametrize("remat", ["full", "none", "selective"])
def test_a_matrix_is_gathered_in_the_compute_dtype_and_its_gradient_is_summed_in_its_own(remat: Remat):
    """Bit by bit as if it were gathered and then cast. Each rank sees other activations."""
    mesh, ranks = MeshConfig(2, 2), P(("data", "context"))
    specs = {"w": P(None, ("data", "context"), None)}
    x_ND = jax.random.normal(jax.random.key(1), (8, 8), jnp.bfloat16)
    found = []
    for cast in (True, False):
        module = stack(lambda init: Linear(8, 8, init), init(mesh), 2)
        module.w.set_metadata(cast=cast)
        graph, state = nnx.split(module)

        def applied(params: dict, x_ND: jax.Array, graph: Any = graph) -> jax.Array:
            def body(layer: Linear, x_ND: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(layer(x_ND)), None

            x_ND, _ = scan_stack(nnx.merge(graph, params), body, x_ND, remat=remat)
            return x_ND.astype(jnp.float32).sum(keepdims=True)[0]

        run = jax.shard_map(
            jax.value_and_grad(lambda *given, applied=applied: applied(*given).sum()),
            mesh=make_mesh(mesh),
            in_specs=(specs, ranks),
            out_specs=(P(), specs),
            check_vma=False,
        )
        given = nnx.to_pure_dict(state), x_ND
        found.append(jax.jit(run)(*given))
        program = jax.jit(run).lower(*given).as_text().splitlines()
        gathers = [line for line in program if "stablehlo.all_gather" in line]
        assert len(gathers) == 2, "once for each pass"
        assert all(("xbf16>" in line.split("->")[-1]) == cast for line in gathers)
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][1]["w"].dtype == jnp.float32


@pytest.mark.parametrize("cast", [True, False])
def test_a_layer_that_is_not_recomputed_keeps_no_gathered_weight(cast: bool) -> None:
    """cast: before it is gathered. Otherwise, as under LoRA, its cast after that is not kept either. Of
    activations it keeps what a cast gives.
    """
    mesh, ranks = MeshConfig(data=2), P(("data",))
    module = Linear(8, 8, init(mesh))
    module.w.set_metadata(cast=cast)
    graph, state = nnx.split(module)
    kept: list[tuple[tuple[int, ...], Any]] = []

    def step(state: Any, x_ND: jax.Array) -> jax.Array:
        wide_ND = 3 * x_ND.astype(jnp.float32)
        return nnx.merge(graph, gathered_state(state, x_ND.dtype))(wide_ND.astype(x_ND.dtype))

    def rank(params: dict, x_ND: jax.Array) -> jax.Array:
        given = nnx.state(nnx.merge(graph, params))
        y_ND, back = jax.vjp(rematerialized(step, "none", state), given, x_ND)
        kept.extend((x.shape, x.dtype) for x in jax.tree.leaves(back))
        return y_ND

    run = jax.shard_map(
        rank,
        mesh=make_mesh(mesh),
        in_specs=({"w": P("data")}, ranks),
        out_specs=ranks,
        check_vma=False,
    )
    jax.eval_shape(run, nnx.to_pure_dict(state), jnp.ones((12, 8), jnp.bfloat16))
    assert not [shape for shape, _ in kept if shape == (8, 8)], "the whole matrix, in any dtype"
    assert (((4, 8), jnp.bfloat16) in kept) == cast, "this rank's shard of it, cast once for both passes"
    assert ((6, 8), jnp.bfloat16) in kept
    assert ((6, 8), jnp.float32) not in kept
