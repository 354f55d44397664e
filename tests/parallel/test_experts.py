"""Experts on other ranks: sums and gradients are as on one, for any load, and no token is dropped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxthd.ops.ffn import FFNForm
from jaxthd.ops.grouped_matmul import combine, dispatch, expert_layout
from jaxthd.parallel.experts import Experts, exchanged_experts, expert_mlp
from tests.helpers import assert_same

RANKS, TOKENS, EXPERTS, CHOSEN, DIM, INNER = 4, 24, 8, 3, 6, 10


def inputs(load: str, gated: bool) -> tuple[Any, ...]:
    """(x, experts, chosen, weight, routed, cotangent) over all ranks; a third of the tokens is padding.

    gated: with biases too, and clamped."""
    rng = np.random.default_rng(1)
    n = RANKS * TOKENS
    choices = {"even": EXPERTS, "one rank": 3, "one expert more than it can": 4}[load]
    chosen = np.stack([rng.permutation(choices)[:CHOSEN] for _ in range(n)]).astype(np.int32)
    routed = rng.random(n) < 0.67
    if load == "one expert more than it can":
        routed[:TOKENS] = False  # one rank sends nothing
    return (
        rng.normal(size=(n, DIM)),
        Experts(
            rng.normal(size=(EXPERTS, DIM, INNER)),
            rng.normal(size=(EXPERTS, INNER, DIM)),
            rng.normal(size=(EXPERTS, DIM, INNER)) if gated else None,
            *(rng.normal(size=(EXPERTS, n)) if gated else None for n in (INNER, DIM, INNER)),
        ),
        chosen,
        rng.random((n, CHOSEN)),
        routed,
        rng.normal(size=(n, DIM)),
    )


def form_of(experts: Experts) -> FFNForm:
    return FFNForm("relu2" if experts.gate is None else "clamped_swiglu", 1.7, 2.0)


def on_one_rank(x: Any, experts: Experts, chosen: Any, weight: Any, routed: Any) -> Any:
    layout = expert_layout(jnp.asarray(chosen), jnp.asarray(routed), EXPERTS, 4)
    return combine(expert_mlp(dispatch(x, layout), experts, layout, form_of(experts)), weight, layout)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("load", ["even", "one rank", "one expert more than it can"])
@pytest.mark.parametrize("capacity", [0.3, 1.5, 100.0])
def test_experts_on_other_ranks_give_the_same_sums_and_gradients(load: str, capacity: float, gated: bool):
    mesh = jax.make_mesh(
        (2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    axes = ("data", "context")

    def pulled(run: Any, x: Any, experts: Experts, chosen: Any, weight: Any, routed: Any, dy: Any) -> Any:
        y, pull = jax.vjp(
            lambda x, experts, weight: run(x, experts, chosen, weight, routed), x, experts, weight
        )
        return y, *pull(dy)

    def rank(*args: Any) -> Any:
        return pulled(lambda *a: exchanged_experts(*a, form_of(a[1]), axes, capacity, 4), *args)

    spec = PartitionSpec(axes)
    with jax.enable_x64(True):
        spread = jax.shard_map(rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
        got = jax.jit(spread)(*inputs(load, gated))
        want = jax.jit(lambda *args: pulled(on_one_rank, *args))(*inputs(load, gated))
        assert float(jnp.abs(want[0]).max()) > 0
        assert_same(got, want, 1e-12)
