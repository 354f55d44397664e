"""A run on many machines, on paper: which bytes go over which link, and what fails first."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.parallel.mesh import AXES
from jaxthd.planning.cluster import GIB, Cluster, cluster_cost, describe_cluster, exchanges, ranks_inside
from jaxthd.planning.compiled_step import Measured

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
