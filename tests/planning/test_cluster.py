"""A run on many machines, on paper: which bytes go over which link, and what fails first."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import Block, ComputeConfig, Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.config.block import block_kinds
from jaxthd.models.blocks import Attention, GatedDelta, KimiDelta, Mamba2
from jaxthd.parallel.mesh import AXES
from jaxthd.planning.cluster import (
    GIB,
    WORK,
    Cluster,
    cluster_cost,
    describe_cluster,
    exchanges,
    ranks_inside,
)
from jaxthd.planning.compiled_step import Measured
from jaxthd.planning.recurrences import bytes_of_token, describe_recurrences, product_bytes, recurrences

SMALL = Config(
    mesh=MeshConfig(data=2, context=2, tensor=4),
    data=DataConfig(rows=4, capacity=1024, audio_capacity=0, max_documents=64),
    model=ModelConfig(
        encoder=None,
        llm=LLMConfig(
            pattern="M*-",
            dim=64,
            blocks={"*": Attention(heads=8, kv_heads=4, head_dim=8), "M": Mamba2(heads=4, groups=4)},
        ),
    ),
)
ALONE = MeshConfig()
STEP = Measured(
    GIB,
    GIB // 2,
    {
        ("context",): 3.0 * 2**20,
        ("context", "tensor"): 2.0 * 2**20,
        ("data", "context"): 40.0 * 2**20,
        ("tensor",): 5.0 * 2**20,
    },
    0.0,
)


@pytest.mark.parametrize("sizes", [(2, 4, 2, 8), (4, 2, 2, 2), (2, 2, 4, 1), (1, 16, 1, 1)])
def test_ranks_of_a_machine_are_those_of_neighbouring_devices(sizes: tuple[int, int, int, int]):
    """Against the mesh itself: an array of device numbers, eight of which are a machine."""
    machine = np.arange(np.prod(sizes)).reshape(sizes) // 8
    for count in range(1, 5):
        for axes in combinations(range(4), count):
            first = machine[tuple(slice(None) if i in axes else 0 for i in range(4))]
            named = tuple(AXES[i] for i in axes)
            assert ranks_inside(MeshConfig(*sizes), named, 8) == (first == first.flat[0]).sum()


def test_every_byte_goes_over_one_link():
    found = exchanges(STEP.received, SMALL.mesh, Cluster(gpus=4))
    assert {x.axes: x.nvlink + x.network for x in found} == pytest.approx(STEP.received)
    by_axes = {x.axes: x for x in found}
    assert by_axes["tensor",].network == 0
    assert by_axes["context",].nvlink == 0
    alone = exchanges(STEP.received, SMALL.mesh, Cluster(gpus=16))
    assert sum(x.network for x in alone) == 0


def test_what_is_scarce_fails_first():
    scarce = {
        "memory": Cluster(memory=1.0, storage=1e15, network=1e15, nvlink=1e15),
        "network": Cluster(gpus=4, network=1.0),
        "saving": Cluster(storage=1.0, nvlink=1e15, network=1e15),
    }
    for name, cluster in scarce.items():
        limits = cluster_cost(SMALL, cluster, STEP).limits
        assert limits[0].name == name
        assert limits[0].share > 1
        shares = [limit.share for limit in limits]
        assert shares == sorted(shares, reverse=True)
        assert f"\n{name} " in describe_cluster(SMALL, cluster, STEP)


def test_a_step_takes_as_long_as_its_slots():
    double = replace(SMALL, data=replace(SMALL.data, rows=8))
    once, twice = (cluster_cost(each, Cluster(), STEP).seconds["computing"] for each in (SMALL, double))
    assert twice == pytest.approx(2 * once)


@pytest.mark.parametrize("kind", block_kinds().values(), ids=block_kinds())
def test_recurrences_are_kernels_or_have_a_cost(kind: type[Block]):
    passed = kind().passed(1, 4)
    has_state = passed is not None and passed.state > 0
    assert has_state == bool(kind().scan(1) or bytes_of_token(kind(), 1, "bfloat16"))


def test_products_count_as_often_as_they_run():
    def twice_in_a_loop(x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, _: (x @ y, None), jax.jit(lambda x: x @ y)(x), length=2)
        return x

    x, y = jax.ShapeDtypeStruct((3, 5), "float32"), jax.ShapeDtypeStruct((5, 5), "float32")
    traced = jax.make_jaxpr(twice_in_a_loop)(x, y)
    assert product_bytes(traced.jaxpr) == 3 * 4 * (15 + 25 + 15)


STILL = STEP._replace(received={})


def delta_config(mesh: MeshConfig = ALONE, **compute: Any) -> Config:
    """Two layers of the delta rule and one of Kimi's."""
    delta = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=8)
    blocks = {
        "D": delta,
        "K": KimiDelta(heads=4, head_dim=8),
        "*": Attention(heads=8, kv_heads=4, head_dim=8),
    }
    model = ModelConfig(encoder=None, llm=LLMConfig(pattern="DK*D", dim=64, blocks=blocks))
    return replace(SMALL, model=model, mesh=mesh, compute=ComputeConfig(dtype="bfloat16", **compute))


def test_recurrences_without_a_kernel_take_the_time_of_their_bytes():
    config = delta_config(remat="none")
    blocks, tokens = config.model.llm.blocks, 4 * 1024
    delta, kimi = (tokens * bytes_of_token(blocks[x], 1, "bfloat16") for x in "DK")
    moved = 2 * delta + kimi
    found = cluster_cost(config, Cluster(bandwidth=1e9), STILL)
    assert found.seconds["recurrences"] == pytest.approx(moved / 1e9)
    assert found.seconds["bubble"] == 0
    text = describe_recurrences(config, 1e9)
    assert f"{1e3 * kimi / 1e9:,.1f} ms" in text
    assert describe_recurrences(SMALL, 1e9) == ""


def test_ranks_share_recurrences_and_recomputation_adds_to_them():
    """Tensor ranks share all but the masks of a scan chunk, which are those of all heads."""
    whole = sum(x.moved for x in recurrences(delta_config(remat="none")))
    for mesh in (MeshConfig(data=2), MeshConfig(context=2), MeshConfig(pipeline=2)):
        assert sum(x.moved for x in recurrences(delta_config(mesh, remat="none"))) == pytest.approx(whole / 2)
    moved = sum(x.moved for x in recurrences(delta_config(MeshConfig(tensor=2), remat="none")))
    assert whole / 2 <= moved <= 0.53 * whole
    assert sum(x.moved for x in recurrences(delta_config(remat="layers"))) == pytest.approx(whole * 4 / 3)


def test_stages_that_wait_wait_for_recurrences_too():
    def waiting(config: Config) -> tuple[float, float]:
        seconds = cluster_cost(config, Cluster(bandwidth=1e6), STILL).seconds
        return seconds["bubble"], seconds["computing"] + seconds["recurrences"]

    bubble, work = waiting(delta_config(MeshConfig(pipeline=2)))
    assert bubble == pytest.approx(work)  # one microbatch: half of the step is the bubble
    assert set(WORK) < set(cluster_cost(SMALL, Cluster(), STILL).seconds)
