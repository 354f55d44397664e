"""Experts on other ranks: sums and gradients are as on one, for any load, and no token is dropped.
Tensor ranks share the exchange."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxthd.config import MeshConfig
from jaxthd.ops.ffn import FFNForm
from jaxthd.ops.grouped_matmul import combine, dispatch, expert_layout
from jaxthd.parallel.experts import Experts, exchanged_experts, expert_mlp
from jaxthd.parallel.mesh import CONTEXT, DATA, TENSOR, make_mesh
from jaxthd.parallel.params import once, over_tensor
from jaxthd.planning.program import compiled, received_bytes
from tests.helpers import assert_same

TOKENS, EXPERTS, CHOSEN, DIM, INNER = 96, 8, 3, 6, 12
"""Tokens are those of all ranks. Four tensor ranks do not divide DIM."""
AXES = (DATA, CONTEXT)
COLUMNS = P(AXES, None, TENSOR)
SPECS = Experts(COLUMNS, P(AXES, TENSOR), COLUMNS, P(AXES, TENSOR), P(AXES), P(AXES, TENSOR))


def inputs(load: str, gated: bool) -> tuple[Any, ...]:
    """(x, experts, chosen, weight, routed, cotangent) over all ranks; a third of the tokens is padding.

    gated: with biases too, and clamped."""
    rng, n = np.random.default_rng(1), TOKENS
    choices = {"even": EXPERTS, "one rank": 3, "one expert more than it can": 4}[load]
    chosen = np.stack([rng.permutation(choices)[:CHOSEN] for _ in range(n)]).astype(np.int32)
    routed = rng.random(n) < 0.67
    if load == "one expert more than it can":
        routed[: TOKENS // 2] = False  # the first ranks send nothing
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


def pulled(run: Any, x: Any, experts: Experts, chosen: Any, weight: Any, routed: Any, dy: Any) -> Any:
    """(y, dx, dexperts, dweight)"""
    y, pull = jax.vjp(lambda x, experts, weight: run(x, experts, chosen, weight, routed), x, experts, weight)
    return y, *pull(dy)


def exchanged(sizes: MeshConfig, capacity: float, args: Any) -> Any:
    """`pulled` on a mesh, jitted. Tensor ranks' partial sums are added, of y as of cotangents."""
    columns = (TENSOR,) if sizes.tensor > 1 else ()

    def run(x: Any, experts: Experts, *of_tokens: Any) -> Any:
        if experts.down_bias is not None:
            experts = experts._replace(down_bias=once(experts.down_bias, over_tensor(INNER), sizes))
        return exchanged_experts(x, experts, *of_tokens, form_of(experts), AXES, columns, capacity, 4)

    def rank(*args: Any) -> Any:
        y, dx, dexperts, dweight = pulled(run, *args)
        if dexperts.down_bias is not None:
            dexperts = dexperts._replace(down_bias=jax.lax.psum(dexperts.down_bias, TENSOR))
        return *jax.lax.psum((y, dx), TENSOR), dexperts, jax.lax.psum(dweight, TENSOR)

    of_experts = Experts(*(spec if x is not None else None for x, spec in zip(args[1], SPECS, strict=True)))
    shards = P(AXES)
    given, gives = (shards, of_experts, *(shards,) * 4), (shards, shards, of_experts, shards)
    return jax.jit(
        jax.shard_map(rank, mesh=make_mesh(sizes), in_specs=given, out_specs=gives, check_vma=False)
    )


LOADS = "even", "one rank", "one expert more than it can"
CAPACITIES = 0.3, 1.5, 100.0
"""0.3: several rounds, all but for the fullest ranks' first."""
CASES = [(MeshConfig(2, 2), *case) for case in product(LOADS, CAPACITIES, (False, True))]
CASES += [
    (MeshConfig(2, 1, tensor=4), "even", 0.3, True),
    (MeshConfig(1, 2, tensor=4), "one rank", 1.5, False),
    (MeshConfig(2, 2, tensor=2), "one expert more than it can", 0.3, False),
    (MeshConfig(2, 2, tensor=2), "even", 100.0, True),
]


@pytest.mark.parametrize(("sizes", "load", "capacity", "gated"), CASES)
def test_experts_on_other_ranks_give_the_same_sums_and_gradients(
    sizes: MeshConfig, load: str, capacity: float, gated: bool
):
    with jax.enable_x64(True):
        args = inputs(load, gated)
        got = exchanged(sizes, capacity, args)(*args)
        want = jax.jit(lambda *args: pulled(on_one_rank, *args))(*args)
        assert float(jnp.abs(want[0]).max()) > 0
        assert_same(got, want, 1e-12)


def test_tensor_ranks_divide_the_bytes_that_data_ranks_send_one_another():
    args = inputs("even", True)

    def received(tensor: int) -> float:
        """Bytes of one round, forward and backward, into a device from other data ranks."""
        sizes = MeshConfig(2, tensor=tensor)
        text = compiled(exchanged(sizes, 4 / 3, args), *args).as_text()
        return float(received_bytes(text, sizes, lambda _: 1.0)[(DATA,)].max())

    # But for the number of rounds, which all ranks agree on: 4 bytes of tens of thousands.
    assert [received(1) / received(tensor) for tensor in (2, 4)] == pytest.approx([2, 4], rel=1e-3)
